r"""The certified lower bound on the worst-case epsilon, and the estimate.

Guarantee: the law that a real record attains is replaced by a discrete law with a smaller curve (see `discretization`).
The output (Z, y) of a step, y the component of the released sum along the record's gradient, is then mapped to the
cell of the loss ``log(1 - q + q exp(mu y - mu^2 / 2))`` in which it falls. That is post-processing: the cells' pair of
distributions is at most as distinguishable as the step. The log-ratio l of each cell is rounded to the nearest grid
point g, l = g + x. Composed, with L = G + X,

    delta(e) = E (1 - exp(e - L))_+ >= E (1 - exp(e + s - G))_+ - P(X < -s),

and P(X < -s) is bounded by Chernoff's inequality from the exact moments of x. So the epsilon of G at a slightly larger
delta, minus s, is a lower bound. It is a bound on the worst case over gradients, not on a data set's own loss. Cells
are centred on grid points, which leaves only a second-order x.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import special

from dprc_lightning.accounting.composition import Composer, LossPMF, epsilon_for_delta, window
from dprc_lightning.accounting.discretization import Nodes, lower_nodes
from dprc_lightning.accounting.grid import Extent, Resolution, interval_for, measure, orders_between
from dprc_lightning.accounting.law import FloatArray
from dprc_lightning.accounting.privacy_loss import Step, sliver

_FINER = 3
_ROUNDING_SHARE = 1e-3
"""Share of delta spent on the probability that the summed rounding error is large."""


@dataclass(frozen=True)
class _Cells:
    """Cells of one step: their probabilities with and without the record, and the log-ratio, each of shape [n]."""

    with_record: FloatArray
    without: FloatArray
    ratio: FloatArray


def _differences(lower: FloatArray, upper: FloatArray) -> FloatArray:
    """Cell masses from distribution and survival functions at the boundaries, from the smaller tail of the two.

    Args:
        lower: P(loss <= boundary), shape [n].
        upper: P(loss > boundary), shape [n].

    Returns:
        Masses of the n + 1 cells.
    """
    below = np.diff(np.concatenate([[0.0], lower, [1.0]]))
    above = -np.diff(np.concatenate([[1.0], upper, [0.0]]))
    centre = np.concatenate([lower, [1.0]])
    return np.where(centre < 0.5, below, above)


def _cells(nodes: Nodes, step: Step, extent: Extent, interval: float, relative_spacing: int) -> _Cells:
    q, sigma = step.sample_rate, step.noise_multiplier
    edge = math.log1p(-q) if q < 1 else -math.inf
    bottom = max(extent.bottom, edge)
    orders = orders_between(bottom, extent.top, interval, relative_spacing) * interval
    boundaries = (orders[1:] + orders[:-1]) / 2
    boundaries = boundaries[boundaries > edge]
    threshold = np.log1p(np.expm1(boundaries) / q) if q < 1 else boundaries
    tails = [np.empty_like(boundaries) for _ in range(4)]
    mu = nodes.z / sigma
    rows = max(1, (1 << 19) // mu.size)
    for start in range(0, boundaries.size, rows):
        part = slice(start, start + rows)
        ratio = threshold[part, None] / mu[None, :]
        for out, sign, shift in zip(tails, (1, -1, 1, -1), (0.5, 0.5, -0.5, -0.5), strict=True):
            out[part] = special.ndtr(sign * (ratio + shift * mu)) @ nodes.mass
    left_out = max(0.0, 1.0 - float(nodes.mass.sum()))
    # What the discrete law leaves out has Z = 0: its loss is zero in both directions.
    tails[0] += left_out * (boundaries >= 0)
    tails[1] += left_out * (boundaries < 0)
    tails[2] += left_out * (boundaries >= 0)
    tails[3] += left_out * (boundaries < 0)
    without = _differences(tails[0], tails[1])
    sampled = _differences(tails[2], tails[3])
    with_record = (1 - q) * without + q * sampled
    # Cells of negligible probability carry rounding, not information: dropping them only lowers the divergence.
    keep = (without > 1e-280) & (with_record > 1e-280) & ((without > 1e-19) | (with_record > 1e-19))
    with_record, without = with_record[keep], without[keep]
    return _Cells(with_record, without, np.log(with_record / without))


def _rounded(mass: FloatArray, ratio: FloatArray, interval: float) -> tuple[LossPMF, FloatArray]:
    """Returns the distribution of the log-ratio at the nearest grid points, and each cell's rounding error."""
    index = np.rint(ratio / interval).astype(np.int64)
    points, inverse = np.unique(index, return_inverse=True)
    return LossPMF(points, np.bincount(inverse, weights=mass).astype(np.float64)), ratio - index * interval


def _rounding_shift(parts: Sequence[tuple[FloatArray, FloatArray, int]], interval: float, probability: float) -> float:
    """An s with P(sum of rounding errors < -s) <= probability: Chernoff's bound, optimised over its order.

    Args:
        parts: Masses, rounding errors and count of each kind of step.
        interval: The grid interval.
        probability: The allowed probability.

    Returns:
        s, in units of loss; it may be negative if the errors are positive on average.
    """
    best = math.inf
    for order in np.geomspace(1e-5, 30.0, 120) / interval:
        log_moment = 0.0
        for mass, error, count in parts:
            # Dropped cells make this a subprobability; for the bound their error counts as zero.
            missing = max(0.0, 1.0 - float(mass.sum()))
            log_moment += count * math.log(float(mass @ np.exp(-order * error)) + missing)
        best = min(best, (log_moment - math.log(probability)) / float(order))
    return best


def lower_and_estimate(steps: Sequence[Step], delta: float, resolution: Resolution) -> tuple[float, float]:
    """Certified lower bound on the worst-case epsilon, and the same without what certification costs.

    Args:
        steps: Steps whose laws are attained by a real record.
        delta: The target delta.
        resolution: How fine the computation is.

    Returns:
        The lower bound and the estimate.
    """
    total = sum(step.count for step in steps)
    laws, extents = [], []
    for step in steps:
        nodes = lower_nodes(step.law, step.noise_multiplier, sliver(delta, total, step.sample_rate), resolution.bins)
        laws.append(nodes)
        extents.append(measure(nodes, step.noise_multiplier, step.sample_rate, 1e-4 * delta / total))
    # Rounding errors add up over the steps here, which they do not in the upper bound: a finer grid pays.
    finer = replace(resolution, per_deviation=_FINER * resolution.per_deviation)
    interval = min(interval_for(extent, finer) for extent in extents)
    interval = max(interval, max(e.top - e.bottom for e in extents) / resolution.max_step_points)
    while True:
        cells = [
            _cells(nodes, step, extent, interval, resolution.relative_spacing)
            for nodes, step, extent in zip(laws, steps, extents, strict=True)
        ]
        bounds, coarser = [], 0.0
        for sign in (1, -1):
            rounded, errors = [], []
            for cell, step in zip(cells, steps, strict=True):
                mass = cell.with_record if sign > 0 else cell.without
                pmf, error = _rounded(mass, sign * cell.ratio, interval)
                rounded.append((pmf, step.count))
                errors.append((mass, error, step.count))
            low, high = window(rounded, interval, 1e-6 * delta)
            if high - low + 1 > resolution.max_total_points:
                coarser = max(2.0, (high - low + 1) / resolution.max_total_points)
                break
            composed = Composer(rounded, interval, resolution.max_total_points * 2).compose(delta=delta)
            shift = _rounding_shift(errors, interval, _ROUNDING_SHARE * delta)
            # The estimate takes the summed rounding error at its mean instead of at a bound.
            drift = sum(count * float(mass @ error) for mass, error, count in errors)
            bounds.append((
                composed.lower_epsilon(delta * (1 + _ROUNDING_SHARE), floor=shift) - shift,
                epsilon_for_delta(composed.pmf, interval, delta, floor=-drift) + drift,
            ))
        if not coarser:
            return max(low for low, _ in bounds), max(estimate for _, estimate in bounds)
        interval *= coarser
