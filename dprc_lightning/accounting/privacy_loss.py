r"""The certified upper bound: pessimistic privacy loss distributions, composed by `dp_accounting`.

Guarantee: for each step the hockey-stick curve, averaged over an upper law of Z (see `discretization`) and raised by
the slack of a law in convex order (see `slack`), is evaluated for removing and for adding a record. Connecting its
values ("connect the dots", arXiv 2207.04380) gives a pair of distributions that dominates the step in that direction.
Such pairs compose adaptively (arXiv 2106.08567), and the larger epsilon of the two directions is reported. Whatever is
cut off (the last sliver of Z, losses above the grid, the tails of the composition) counts as an infinite loss.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dprc_lightning.accounting.composition import Composer, LossPMF, epsilon_for_delta, round_off
from dprc_lightning.accounting.discretization import Nodes, upper_nodes
from dprc_lightning.accounting.grid import IntArray, Resolution, interval_for, measure, orders_between
from dprc_lightning.accounting.hockey_stick import add_curve, remove_curve
from dprc_lightning.accounting.law import FloatArray, Order, SensitivityLaw
from dprc_lightning.accounting.slack import step_slack
from dprc_lightning.errors import AccountingResourceError

_SLIVER = 2e-4
"""Share of delta that the largest values of Z may cost, over all steps."""
_TAIL = 1e-4
"""Share of delta that one-step losses above the grid may cost, over all steps."""
_FEWEST_POINTS = 64
"""One step's losses are resolved by at least so many grid intervals, or the computation is refused."""
_COMPOSED_TAIL = 1e-6
"""Share of delta that the tails of the composition may cost."""


@dataclass(frozen=True)
class Step:
    """One kind of step, ready to be accounted: which law, how much noise, how often.

    Attributes:
        law: The law of w = 1 / Z^2.
        noise_multiplier: sigma.
        sample_rate: q.
        count: How many such steps are composed.
    """

    law: SensitivityLaw
    noise_multiplier: float
    sample_rate: float
    count: int


def sliver(delta: float, steps: int, sample_rate: float) -> float:
    """Probability of the largest Z that may be moved to infinity: it costs 2e-4 of delta over all steps.

    Args:
        delta: The target.
        steps: Number of steps composed.
        sample_rate: q: only a sampled record meets its Z.

    Returns:
        A probability, at most 1e-4.
    """
    return min(1e-4, _SLIVER * delta / (steps * sample_rate))


@dataclass(frozen=True)
class _Prepared:
    """A step with its upper law of Z, its slack and the range of its losses."""

    step: Step
    nodes: Nodes
    slack: float
    top: float
    bottom: float
    interval: float


def _nodes(step: Step, delta: float, steps: int, resolution: Resolution) -> Nodes:
    return upper_nodes(step.law, step.noise_multiplier, sliver(delta, steps, step.sample_rate), resolution.bins)


def _slack(step: Step, nodes: Nodes) -> float:
    if step.law.order is not Order.CONVEX:
        return 0.0
    at_zero = remove_curve(np.zeros(1), nodes, step.noise_multiplier, step.sample_rate)
    return step_slack(step.law, step.noise_multiplier, step.sample_rate, float(at_zero[0]))


def _prepare(step: Step, delta: float, steps: int, resolution: Resolution) -> _Prepared:
    nodes = _nodes(step, delta, steps, resolution)
    extent = measure(nodes, step.noise_multiplier, step.sample_rate, _TAIL * delta / steps)
    return _Prepared(step, nodes, _slack(step, nodes), extent.top, extent.bottom, interval_for(extent, resolution))


def slack_per_step(step: Step, delta: float, steps: int, resolution: Resolution) -> float:
    """r: what the convex order of a step's law costs at each step, in units of delta.

    Args:
        step: The step.
        delta: The target.
        steps: Number of all steps composed.
        resolution: How fine the computation is.

    Returns:
        The slack of `dprc_lightning.accounting.slack`; zero for a law in stochastic order.
    """
    return _slack(step, _nodes(step, delta, steps, resolution))


def connect_dots(index: IntArray, delta: FloatArray, interval: float) -> LossPMF:
    """The distribution of the loss whose curve connects the given points, Algorithm 1 of arXiv 2207.04380.

    Args:
        index: Increasing orders divided by the interval, shape [n].
        delta: The curve there, nonincreasing, shape [n].
        interval: The grid interval.

    Returns:
        The distribution.
    """
    delta = np.minimum.accumulate(delta)
    gap, drop = np.diff(index) * interval, np.diff(delta)
    mass = np.append(1.0 - delta[0], drop / np.expm1(-gap)) + np.append(drop / np.expm1(gap), 0.0)
    return LossPMF(index, np.maximum(mass, 0.0), float(delta[-1]))


class UpperBound:
    """Pessimistic loss distributions of a sequence of steps, for one delta.

    The one-step distributions depend on delta and on the number of steps only through what may be cut off; they stay
    valid for every other delta and for fewer steps.

    Args:
        steps: The steps, in any order: the bound does not depend on it.
        delta: The target delta.
        resolution: How fine the computation is.

    Raises:
        AccountingResourceError: If no grid within the memory guard holds the composed distribution.
    """

    def __init__(self, steps: Sequence[Step], delta: float, resolution: Resolution) -> None:
        self.delta, self._resolution, self._tail = delta, resolution, _COMPOSED_TAIL * delta
        total = sum(step.count for step in steps)
        prepared = [_prepare(step, delta, total, resolution) for step in steps]
        self.slack = sum(part.step.count * part.slack for part in prepared)
        self.interval = max(
            min(part.interval for part in prepared),
            max(part.top - part.bottom for part in prepared) / resolution.max_step_points,
        )
        # Memory guard, before any dense grid exists: coarser intervals keep the bound valid.
        coarsest = max(part.top - part.bottom for part in prepared) / _FEWEST_POINTS
        while True:
            self._curves = [self._curve(part) for part in prepared]
            self._remove = [(connect_dots(*remove, self.interval), part.step.count) for part, remove, _ in self._curves]
            self._add = [(connect_dots(*add, self.interval), part.step.count) for part, _, add in self._curves]
            points = max(self._points(self._remove), self._points(self._add))
            if points <= resolution.max_total_points:
                break
            if self.interval >= coarsest:
                raise AccountingResourceError(
                    f"steps={total}: the composed loss needs {points} grid points even at an interval of "
                    f"{self.interval:.3g}, more than {resolution.max_total_points}: raise noise_multiplier, or lower "
                    "sample_rate or steps"
                )
            self.interval = min(coarsest, self.interval * max(2.0, points / resolution.max_total_points))

    def _curve(self, part: _Prepared) -> tuple[_Prepared, tuple[IntArray, FloatArray], tuple[IntArray, FloatArray]]:
        """Returns the curves of one step at the grid's points, slack included, REMOVE and ADD."""
        spacing, sigma, q = self._resolution.relative_spacing, part.step.noise_multiplier, part.step.sample_rate
        edge = math.log1p(-q) if q < 1 else -math.inf
        remove = orders_between(max(part.bottom, edge), part.top, self.interval, spacing)
        add = orders_between(-part.top, min(-part.bottom, -edge), self.interval, spacing)
        remove_delta = remove_curve(np.float64(self.interval) * remove, part.nodes, sigma, q)
        add_delta = add_curve(np.float64(self.interval) * add, part.nodes, sigma, q)
        return (
            part,
            (remove, part.slack + (1 - part.slack) * remove_delta),
            (add, part.slack + (1 - part.slack) * add_delta),
        )

    def _points(self, parts: Sequence[tuple[LossPMF, int]]) -> int:
        """Returns the largest grid that composing in `dp_accounting` may allocate.

        Its self-composition bounds the window with Chernoff orders of at most 20 per one-step range; its composition of
        different steps adds the ranges up.
        """
        total = 0
        for pmf, count in parts:
            length = int(pmf.index[-1] - pmf.index[0]) + 1
            offsets, keep = (pmf.index - pmf.index[0]).astype(np.float64), pmf.mass > 0
            log_mass, offsets = np.log(pmf.mass[keep]), offsets[keep]
            low, high, cost = 0.0, float((length - 1) * count), math.log(2 / self._tail)
            for order in (-20, -10, -5, -2, -1, 1, 2, 5, 10, 20):
                exponent = log_mass + order / length * offsets
                moment = exponent.max() + math.log(float(np.exp(exponent - exponent.max()).sum()))
                bound = (count * moment + cost) * length / order
                low, high = (max(low, bound), high) if order < 0 else (low, min(high, bound))
            total += max(int(high - low) + 1, length)
        return total

    def epsilon(self) -> float:
        """Certified upper bound on epsilon: discretised and composed by `dp_accounting`.

        Returns:
            The larger epsilon of the two directions; inf if none can be certified.
        """
        if self._hopeless(self._remove) or self._hopeless(self._add):
            return math.inf
        return max(self.directions())

    def directions(self) -> tuple[float, float]:
        """Certified upper bounds on epsilon for each direction: discretised and composed by `dp_accounting`.

        Guarantee: a pair that dominates one direction of every step dominates that direction of the composition, so
        each of the two numbers holds by itself. The guarantee of add/remove needs both, hence their maximum.

        Returns:
            epsilon for removing a record and for adding one; inf where none can be certified.
        """
        remove = [(curve, part.step.count) for part, curve, _ in self._curves]
        add = [(curve, part.step.count) for part, _, curve in self._curves]
        return (
            math.inf if self._hopeless(self._remove) else self._certified(remove),
            math.inf if self._hopeless(self._add) else self._certified(add),
        )

    def _certified(self, curves: Sequence[tuple[tuple[IntArray, FloatArray], int]]) -> float:
        # Slow to import (a second): `dprc calibrate --help` must not pay for it.
        from dp_accounting.pld import pld_pmf

        composed = None
        for (index, delta), count in curves:
            pmf = pld_pmf.create_pmf_pessimistic_connect_dots(self.interval, index, np.minimum.accumulate(delta))
            # Sparse distributions compose by dictionaries, and take index ** count as an exact integer to decide it.
            pmf = pmf.to_dense_pmf().self_compose(count, self._tail)
            composed = pmf if composed is None else composed.compose(pmf, self._tail)
        assert composed is not None
        target = self.delta - round_off(sum(count for _, count in curves), 1 << 23)
        return float(composed.get_epsilon_for_delta(target)) if target > 0 else math.inf

    def _hopeless(self, parts: Sequence[tuple[LossPMF, int]]) -> bool:
        """Returns whether infinite losses alone exceed delta, which no composition is needed to know."""
        return -math.expm1(sum(count * math.log1p(-min(pmf.infinity, 1 - 1e-16)) for pmf, count in parts)) > self.delta

    def composers(self) -> tuple[Composer, Composer]:
        """The same distributions in this package's own composition, REMOVE and ADD.

        Returns:
            One composer per direction.
        """
        limit = self._resolution.max_total_points * 2
        return (
            Composer(self._remove, self.interval, self._tail, limit),
            Composer(self._add, self.interval, self._tail, limit),
        )

    def fast_epsilon(self, composers: tuple[Composer, Composer], counts: Sequence[int] | None = None) -> float:
        """The same bound composed by this package, for many step counts.

        Args:
            composers: From `composers`.
            counts: How often each step occurs, at most its count; default: its count.

        Returns:
            Upper bound on epsilon; inf if none can be given.
        """
        worst = 0.0
        for composer in composers:
            pmf, allowance = composer.compose(counts)
            # A negative mass is rounding; an upper bound takes it as zero.
            pmf = LossPMF(pmf.index, np.maximum(pmf.mass, 0.0), pmf.infinity)
            target = self.delta - allowance
            worst = max(worst, epsilon_for_delta(pmf, composer.interval, target) if target > 0 else math.inf)
        return worst
