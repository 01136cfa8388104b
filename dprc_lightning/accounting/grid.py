r"""Where a step's curve is evaluated: a grid of losses, fine near zero and relatively spaced further out.

Guarantee: a hockey-stick curve is convex in exp(e). Its piecewise linear interpolation in exp(e) through any increasing
orders, from the point (0, 1) to the first of them and constant after the last, therefore lies above it, and is itself
the curve of a pair of distributions whose losses lie on these orders and at infinity ("connect the dots", Doroshenko,
Ghazi, Kamath, Kumar and Manurangsi, arXiv 2207.04380). So every choice made in this module is safe: it only decides how
tight the bound is, and how much memory it takes.
"""

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dprc_lightning.accounting.discretization import Nodes
from dprc_lightning.accounting.hockey_stick import add_curve, remove_curve

IntArray = NDArray[np.int64]

_FEW = 4
"""Kinds of steps up to which each is computed as finely as one alone."""
MAX_LOSS = 600.0
"""Losses of one step above this count as infinite: exp(600) is the last comfortable double."""


@dataclass(frozen=True)
class Resolution:
    """How fine a computation is. Each choice gives valid bounds; a finer one gives tighter bounds.

    Attributes:
        bins: Bins of w = 1 / Z^2.
        relative_spacing: Orders e are spaced by e / relative_spacing where that exceeds the grid.
        max_interval: Largest grid interval (loss).
        per_deviation: At least so many grid intervals per standard deviation of the one-step loss.
        max_step_points: Memory guard: largest number of grid intervals that one step's losses may span.
        max_total_points: Memory guard: largest number of grid points of a composed distribution.
    """

    bins: int
    relative_spacing: int
    max_interval: float
    per_deviation: float
    max_step_points: int = 1 << 21
    max_total_points: int = 1 << 22


FINE = Resolution(bins=256, relative_spacing=800, max_interval=1e-4, per_deviation=10)
COARSE = Resolution(bins=64, relative_spacing=200, max_interval=1e-3, per_deviation=4)


def resolution_for(kinds: int) -> Resolution:
    """How fine a history is computed: its time grows with the kinds of steps in it, so that many are each made coarser.

    Args:
        kinds: Number of different steps.

    Returns:
        `FINE` for a few; a dozen kinds take about as long as four.
    """
    if kinds <= _FEW:
        return FINE
    share = _FEW / kinds
    return replace(
        FINE,
        bins=max(COARSE.bins, int(FINE.bins * share)),
        relative_spacing=max(COARSE.relative_spacing, int(FINE.relative_spacing * share)),
    )


@dataclass(frozen=True)
class Extent:
    """Range and scale of the losses of one step.

    Attributes:
        top: REMOVE losses above it have divergence within the tail allowance; at most `MAX_LOSS`.
        bottom: The same for ADD, as a REMOVE loss (its losses are the negative ones); negative.
        deviation: Standard deviation of the loss without the record.
    """

    top: float
    bottom: float
    deviation: float


def measure(nodes: Nodes, noise_multiplier: float, sample_rate: float, tail: float) -> Extent:
    """Finds the range and the scale of one step's losses.

    Args:
        nodes: A discrete law of Z.
        noise_multiplier: sigma.
        sample_rate: q.
        tail: Divergence per step that may be counted as an infinite loss.

    Returns:
        The extent.
    """
    orders = np.geomspace(1e-9, MAX_LOSS, 600)
    remove = remove_curve(orders, nodes, noise_multiplier, sample_rate) <= tail + sample_rate * nodes.infinity
    # At q = 1 an infinite Z is an infinite loss in this direction too.
    add_floor = nodes.infinity if sample_rate == 1.0 else 0.0
    add = add_curve(orders, nodes, noise_multiplier, sample_rate) <= tail + add_floor
    top = float(orders[int(np.argmax(remove))]) if remove.any() else MAX_LOSS
    bottom = -(float(orders[int(np.argmax(add))]) if add.any() else MAX_LOSS)
    # Distribution function of the REMOVE loss without the record: F(e) = 1 + d(delta)/d(exp(e)) needs no new formula.
    losses = np.concatenate([np.linspace(bottom, 0, 400), np.geomspace(1e-9, top, 400)])
    losses = np.unique(np.concatenate([losses, -np.geomspace(1e-9, -bottom, 400)]))
    curve = remove_curve(losses, nodes, noise_multiplier, sample_rate)
    survival = np.clip(-np.diff(curve) / np.diff(np.exp(np.minimum(losses, MAX_LOSS))), 0.0, 1.0)
    mass = np.maximum(-np.diff(np.concatenate([[1.0], np.minimum.accumulate(survival), [0.0]])), 0.0)
    mean = float(mass @ losses)
    return Extent(top, bottom, math.sqrt(max(float(mass @ (losses - mean) ** 2), 0.0)))


def interval_for(extent: Extent, resolution: Resolution) -> float:
    """Grid interval for one step: the resolution's, coarser only where the one-step grid would be too large.

    Args:
        extent: Range and scale of the losses.
        resolution: How fine the computation is.

    Returns:
        The interval, in units of loss.
    """
    wanted = min(resolution.max_interval, extent.deviation / resolution.per_deviation)
    return max(wanted, (extent.top - extent.bottom) / resolution.max_step_points)


def orders_between(bottom: float, top: float, interval: float, relative_spacing: int) -> IntArray:
    """Grid points, as multiples of the interval: each one near zero, relatively spaced further out.

    Args:
        bottom: Lowest loss, negative; rounded down.
        top: Highest loss, positive; rounded up.
        interval: The grid interval.
        relative_spacing: Orders e are spaced by e / relative_spacing where that exceeds the interval.

    Returns:
        Increasing integers, shape [n].
    """
    low, high = math.floor(bottom / interval), math.ceil(top / interval)
    reach = max(-low, high, 1)
    points = np.arange(min(relative_spacing, reach) + 1, dtype=np.float64)
    if reach > relative_spacing:
        count = math.ceil(relative_spacing * math.log(reach / relative_spacing)) + 1
        points = np.concatenate([points, np.geomspace(relative_spacing, reach, count + 1)])
    half = np.unique(np.rint(points).astype(np.int64))
    inside = np.concatenate([-half[half < -low][::-1], half[(half > 0) & (half < high)]])
    return np.unique(np.concatenate([[low], inside, [high]])).astype(np.int64)
