r"""The trade-off function: how small the error rates of any test for a record's presence can be.

A test that looks at everything released and decides whether a record was used errs with probability alpha when the null
hypothesis is true (false positive) and beta when it is not (false negative).

Guarantee: let delta(e) bound the hockey-stick divergence of the alternative from the null at a real order e. A region
of rejection has probability 1 - beta under the alternative and alpha under the null, so that
``1 - beta <= exp(e) alpha + delta(e)`` (Wasserman and Zhou, arXiv 0811.2501), and

    beta >= f(alpha) = sup over e of 1 - delta(e) - exp(e) alpha

(Dong, Roth and Su, arXiv 1905.02383, proposition 6, here with negative orders too and one direction at a time). Any set
of orders and any upper bounds on delta give a valid f; all of them give the best, by duality. Each f is the largest of
decreasing straight lines: convex, nonincreasing, at most 1 - alpha. In direction "remove" the null hypothesis is that
the record was absent, in direction "add" that it was present. With the larger delta of the two at each order, f holds
whichever hypothesis is the null: it is the largest convex function below both directions, and its own inverse.
"""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from dprc_lightning.accounting import _validation
from dprc_lightning.accounting.divergence import LARGEST_ORDER, Divergences
from dprc_lightning.accounting.law import FloatArray
from dprc_lightning.errors import InvalidArgumentError

DIRECTIONS = ("remove", "add")

_EVENLY, _RELATIVE = 1 << 14, 4000
"""Orders over the range of losses, and orders near zero where losses are small: more of them gain below 1e-6."""
_LEAST, _MOST = 1e-10, 1e-2
"""Between these lies the delta for which the curves are made."""


def validate_levels(alpha: ArrayLike) -> FloatArray:
    """False-positive rates in [0, 1], refused by name otherwise.

    Args:
        alpha: What was passed.

    Returns:
        The values, float64, same shape.

    Raises:
        InvalidArgumentError: If a value is no number in [0, 1].
    """
    remedy = "must hold false-positive rates in [0, 1]"
    levels = _validation.numbers("alpha", alpha, remedy)
    outside = ~((levels >= 0) & (levels <= 1))
    if outside.any():
        raise InvalidArgumentError("alpha", float(levels[outside].flat[0]), remedy)
    return levels


def target_delta(levels: FloatArray) -> float:
    """The delta for which to bound a history: what is cut off for it must not matter at any level asked for.

    Args:
        levels: False-positive rates in [0, 1], any shape.

    Returns:
        The smallest distance of a level from zero and one, within limits; a level at the end itself sets none.
    """
    distance = np.minimum(levels, 1.0 - levels)
    inside = distance[distance > 0]
    return float(np.clip(inside.min(), _LEAST, _MOST)) if inside.size else _MOST


def without_steps(levels: FloatArray) -> FloatArray:
    """The trade-off function of a history without steps, 1 - alpha.

    Args:
        levels: False-positive rates in [0, 1], any shape.

    Returns:
        False-negative rates, same shape.
    """
    return 1.0 - levels


def smallest_false_negative_rate(levels: FloatArray, curves: Divergences, direction: str | None) -> FloatArray:
    """f(alpha), a lower bound on the false-negative rate of every test.

    Args:
        levels: False-positive rates in [0, 1], any shape.
        curves: Upper bounds on delta.
        direction: "remove", "add", or None for whichever hypothesis is the null.

    Returns:
        False-negative rates in [0, 1], same shape.
    """
    orders = _orders(*curves.losses)
    remove, add = curves.at(orders)
    delta = np.maximum(remove, add) if direction is None else (remove if direction == "remove" else add)
    slope, intercept = _highest_lines(np.exp(orders), 1.0 - delta)
    # Line i + 1 is above line i to the left of where they cross; crossings move left along the lines.
    crossings = (np.diff(intercept) / np.diff(slope))[::-1]
    line = crossings.size - np.searchsorted(crossings, levels)
    found = np.maximum(intercept[line] - slope[line] * levels, 0.0)
    return np.minimum(found, without_steps(levels))


def _highest_lines(slope: FloatArray, intercept: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Returns those lines, intercept - slope * alpha, that are highest somewhere: a convex hull, by monotone chain.

    Exact bounds would all be on it; rounding, and the larger one of two bounds, put some below.
    """
    kept: list[tuple[float, float]] = []
    for s, b in zip(slope.tolist(), intercept.tolist(), strict=True):
        if kept and b <= kept[-1][1]:
            continue
        while kept and s == kept[-1][0]:
            kept.pop()
        while len(kept) > 1 and _is_below(kept[-2], kept[-1], (s, b)):
            kept.pop()
        kept.append((s, b))
    lines = np.asarray(kept)
    return lines[:, 0], lines[:, 1]


def _is_below(left: tuple[float, float], middle: tuple[float, float], right: tuple[float, float]) -> bool:
    """Returns whether the middle point is on or below the chord from left to right."""
    rise, run = middle[1] - left[1], middle[0] - left[0]
    return rise * (right[0] - middle[0]) <= (right[1] - middle[1]) * run


def _orders(low: float, high: float) -> FloatArray:
    near = np.geomspace(1e-6, max(abs(low), abs(high), 2e-6), _RELATIVE)
    orders = np.concatenate([np.linspace(low, high, _EVENLY + 1), -near, [0.0], near])
    return np.unique(np.clip(orders, -LARGEST_ORDER, LARGEST_ORDER))


def shaped_like(values: FloatArray, argument: Any) -> Any:
    """A float for a scalar argument, an array of its shape otherwise.

    Args:
        values: The results.
        argument: What the caller passed.

    Returns:
        The results in the caller's form.
    """
    return float(values) if np.ndim(argument) == 0 else values
