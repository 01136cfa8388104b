"""Validation of accounting arguments: each refusal names the argument, its value and what is accepted."""

import math
from numbers import Integral, Real
from typing import Any

from dprc_lightning.errors import InvalidArgumentError


def positive_float(name: str, value: Any, remedy: str = "must be a finite number > 0") -> float:
    """Returns ``value`` as a float if it is finite and positive.

    Args:
        name: The argument as the caller wrote it.
        value: What was passed.
        remedy: What is accepted.

    Returns:
        The value as a Python float.

    Raises:
        InvalidArgumentError: If the value is no number, not finite, or not positive.
    """
    if isinstance(value, bool) or not isinstance(value, Real):
        raise InvalidArgumentError(name, value, remedy)
    number = float(value)
    if not math.isfinite(number) or number <= 0:
        raise InvalidArgumentError(name, value, remedy)
    return number


def open_unit_float(name: str, value: Any) -> float:
    """Returns ``value`` as a float if it lies strictly between 0 and 1.

    Args:
        name: The argument as the caller wrote it.
        value: What was passed.

    Returns:
        The value as a Python float.

    Raises:
        InvalidArgumentError: If the value is no number or not in (0, 1).
    """
    remedy = "must lie strictly between 0 and 1"
    number = positive_float(name, value, remedy)
    if number >= 1:
        raise InvalidArgumentError(name, value, remedy)
    return number


def sampling_rate(name: str, value: Any) -> float:
    """Returns ``value`` as a float if it is a probability in (0, 1].

    Args:
        name: The argument as the caller wrote it.
        value: What was passed.

    Returns:
        The value as a Python float.

    Raises:
        InvalidArgumentError: If the value is no number or not in (0, 1].
    """
    remedy = "must be a sampling probability in (0, 1]: expected batch size / number of records"
    number = positive_float(name, value, remedy)
    if number > 1:
        raise InvalidArgumentError(name, value, remedy)
    return number


def integer(name: str, value: Any, minimum: int) -> int:
    """Returns ``value`` as an int if it is an integer of at least ``minimum``.

    Args:
        name: The argument as the caller wrote it.
        value: What was passed; NumPy integers are accepted, floats and bools are not.
        minimum: The smallest accepted value.

    Returns:
        The value as a Python int.

    Raises:
        InvalidArgumentError: If the value is no integer or too small.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < minimum:
        raise InvalidArgumentError(name, value, f"must be an integer >= {minimum}")
    return int(value)


def choice(name: str, value: Any, accepted: tuple[str, ...]) -> str:
    """Returns ``value`` if it is one of the accepted words.

    Args:
        name: The argument as the caller wrote it.
        value: What was passed.
        accepted: The accepted words.

    Returns:
        The word.

    Raises:
        InvalidArgumentError: If the value is not among the accepted words.
    """
    if value not in accepted:
        raise InvalidArgumentError(name, value, "must be one of " + ", ".join(repr(word) for word in accepted))
    return str(value)
