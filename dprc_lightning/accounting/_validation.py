"""Validation of accounting arguments: each refusal names the argument, its value and what is accepted."""

import math
from numbers import Integral, Real
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dprc_lightning.errors import InvalidArgumentError

SMALLEST_NOISE, LARGEST_NOISE = 1e-6, 1e9
"""Noise multipliers outside of this range mean nothing, and their squares leave the range of doubles."""
SMALLEST_PROBABILITY = 1e-100
"""The same for delta and for sampling rates: what is cut off is a share of delta over steps and rate."""
LARGEST_INTEGER = 2**53
"""Counts above it are no longer exact as doubles."""


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
    try:
        number = float(value)
    except OverflowError:
        raise InvalidArgumentError(name, value, remedy) from None
    if not math.isfinite(number) or number <= 0:
        raise InvalidArgumentError(name, value, remedy)
    return number


def noise_multiplier(name: str, value: Any) -> float:
    """Returns ``value`` as a float if it is a noise multiplier that can be computed with.

    Args:
        name: The argument as the caller wrote it.
        value: What was passed.

    Returns:
        The value as a Python float.

    Raises:
        InvalidArgumentError: If the value is no number, or one whose square leaves the range of doubles.
    """
    remedy = f"must be a number from {SMALLEST_NOISE:g} to {LARGEST_NOISE:g}"
    number = positive_float(name, value, remedy)
    if not SMALLEST_NOISE <= number <= LARGEST_NOISE:
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
    remedy = f"must lie strictly between 0 and 1, and not below {SMALLEST_PROBABILITY:g}"
    number = positive_float(name, value, remedy)
    if not SMALLEST_PROBABILITY <= number < 1:
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
    if not SMALLEST_PROBABILITY <= number <= 1:
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
    if int(value) > LARGEST_INTEGER:
        raise InvalidArgumentError(name, f"{float(min(int(value), 10**300)):g}", f"must be at most {LARGEST_INTEGER}")
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
    if not isinstance(value, str) or value not in accepted:
        raise InvalidArgumentError(name, value, "must be one of " + ", ".join(repr(word) for word in accepted))
    return str(value)


def numbers(name: str, value: Any, remedy: str) -> NDArray[np.float64]:
    """Returns ``value`` as an array of floats, none of them NaN.

    Args:
        name: The argument as the caller wrote it.
        value: What was passed: a number, or an array or nested sequence of numbers; no text and no truth values.
        remedy: What is accepted.

    Returns:
        float64, of the value's shape.

    Raises:
        InvalidArgumentError: If it holds anything else.
    """
    try:
        raw = np.asarray(value)
        entries = [float(entry) for entry in raw.ravel().tolist() if _is_number(entry)]
    except (TypeError, ValueError, OverflowError):
        raise InvalidArgumentError(name, value, remedy) from None
    if len(entries) < raw.size or any(math.isnan(entry) for entry in entries):
        raise InvalidArgumentError(name, value, remedy)
    return np.array(entries, dtype=np.float64).reshape(raw.shape)


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
