"""Looks for contradictions in a law of one's own, so that a slip in its code does not become a wrong guarantee.

What it finds is wrong for certain. What it cannot see is whether the law dominates the estimator: that is a proof.
"""

from typing import Any

import numpy as np

from dprc_lightning.accounting.law import FloatArray, Order, SensitivityLaw
from dprc_lightning.errors import InvalidArgumentError

_ROUNDING = 1e-9
_POINTS = 2000
_COARSER = 20


def require_law(name: str, law: Any) -> SensitivityLaw:
    """Returns ``law`` if it is a law that does not contradict itself.

    Its cdf must rise within [0, 1], its bins must agree with its cdf; a law in convex order must have mean one and an
    integral of its lower tail that is not too small.

    Args:
        name: The argument as the caller wrote it.
        law: What was passed.

    Returns:
        The law.

    Raises:
        InvalidArgumentError: If it is no `SensitivityLaw`, or contradicts itself.
    """
    if not isinstance(law, SensitivityLaw):
        raise InvalidArgumentError(name, law, "must be a SensitivityLaw")
    problem = _problem(law)
    if problem:
        raise InvalidArgumentError(name, law, problem)
    return law


def _problem(law: SensitivityLaw) -> str | None:
    """Returns what is wrong with a law, in a few words; None if nothing was found."""
    if not isinstance(law.order, Order):
        return f"order={law.order!r} must be a member of Order"
    for flag in ("certified", "attained"):
        if not isinstance(getattr(law, flag), bool):
            return f"{flag}={getattr(law, flag)!r} must be True or False"
    if not all(np.isfinite(atom) and atom > 0 for atom in law.atoms):
        return f"atoms={law.atoms!r} must be finite values of w > 0; mass at zero belongs into cdf(0)"
    # Atoms and the floats below them are edges in the accountant too; the wide ends find masses that do not add up.
    near = [value for atom in law.atoms for value in (np.nextafter(atom, 0.0), atom)]
    edges = np.unique(np.concatenate([np.geomspace(1e-8, 1e8, _POINTS), near]))
    cdf = np.asarray(law.cdf(edges), dtype=np.float64)
    if cdf.shape != edges.shape:
        return f"cdf must keep the shape of its argument, got {cdf.shape} for {edges.shape}"
    if not np.all(np.isfinite(cdf)) or cdf.min() < -_ROUNDING or cdf.max() > 1 + _ROUNDING:
        return "its cdf must lie in [0, 1]"
    at_zero = law.mass_at_infinity
    if not -_ROUNDING <= at_zero <= cdf[0] + _ROUNDING or np.diff(cdf).min() < -_ROUNDING:
        return "its cdf must not fall"
    mass, mean = law.bins(edges)
    # A mass of 1e-9 decides a delta of 1e-9: differences of a cdf are no more accurate than its rounding.
    if np.shape(mass) != (edges.size - 1,) or np.any(np.abs(mass - np.diff(cdf)) > 1e-6 * cdf[1:] + 1e-15):
        return "its bins must have the masses of its cdf in (edges[i], edges[i + 1]]"
    if mean is not None:
        coarse_mass, coarse_mean = law.bins(edges[::_COARSER])
        if coarse_mean is None:
            return "its bins must know their means for all edges or for none"
        inside = (mean >= edges[:-1] * (1 - _ROUNDING)) & (mean <= edges[1:] * (1 + _ROUNDING))
        if np.shape(mean) != (edges.size - 1,) or not np.all(inside | (mass <= 0)):
            return "its bins must have their means within their edges"
        last = (edges.size - 1) // _COARSER * _COARSER
        moments = (mass * mean)[:last].reshape(-1, _COARSER).sum(1)
        # Where next to no mass is, any mean within the edges will do.
        slack = 1e-5 * coarse_mass * coarse_mean + 1e-11 * edges[_COARSER::_COARSER]
        if np.any(np.abs(coarse_mass * coarse_mean - moments) > slack):
            return "its bins must have means that add up: mass times mean of a bin is the sum over its parts"
    return _problem_of_convex_order(law, edges, cdf, mass) if law.order is Order.CONVEX else None


def _problem_of_convex_order(law: SensitivityLaw, edges: FloatArray, cdf: FloatArray, mass: FloatArray) -> str | None:
    lowest = float(mass @ edges[:-1] + (1 - cdf[-1]) * edges[-1])
    highest = float(mass @ edges[1:] + cdf[0] * edges[0])
    # The accountant leaves out as much of the upper tail; more of it could hold any part of the mean.
    complete = cdf[-1] > 1 - 1e-12
    if lowest > 1 + 1e-6 or (complete and highest < 1 - 1e-6):
        return f"a law in convex order must have mean one, its mean is about {lowest:.6g}"
    for limit in (0.01, 1 / 12, 0.3, 1.0):
        below = edges[edges <= limit]
        least = float(law.cdf(below[:-1]) @ np.diff(below))
        if law.lower_tail_integral(limit) < least * (1 - 1e-6):
            return f"lower_tail_integral({limit:.3g}) must be at least the integral of its cdf"
    return None
