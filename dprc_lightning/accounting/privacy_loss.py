r"""The certified upper bound: pessimistic privacy loss distributions, composed by `dp_accounting` or by this package.

Guarantee: for each step the hockey-stick curve, averaged over an upper law of Z (see `discretization`) and raised by
the slack of a law in convex order (see `slack`), is evaluated for removing and for adding a record. Connecting its
values ("connect the dots", arXiv 2207.04380) gives a pair of distributions that dominates the step in that direction.
Such pairs compose adaptively (arXiv 2106.08567), and the larger epsilon of the two directions is reported. Whatever is
cut off (the last sliver of Z, losses above the grid, the tails of the composition) counts as an infinite loss.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dprc_lightning.accounting.composition import Composer, LossPMF, round_off, window
from dprc_lightning.accounting.discretization import Nodes, upper_nodes
from dprc_lightning.accounting.grid import IntArray, Resolution, interval_for, measure, orders_between
from dprc_lightning.accounting.hockey_stick import add_curve, remove_curve
from dprc_lightning.accounting.law import FloatArray, Order, SensitivityLaw
from dprc_lightning.accounting.slack import law_to_average, step_slack
from dprc_lightning.errors import AccountingResourceError

if TYPE_CHECKING:
    from dp_accounting.pld.pld_pmf import PLDPmf

_SLIVER = 2e-4
"""Share of delta that the largest values of Z may cost, over all steps."""
_TAIL = 1e-4
"""Share of delta that one-step losses above the grid may cost, over all steps."""
_FEWEST_POINTS = 64
"""One step's losses are resolved by at least so many grid intervals, or the computation is refused."""
_LEAST_MASS = 1e-300
_CANCELLATION = 1e-12
"""Relative error of a Gaussian's divergence in units of sigma; 7e-14 was found up to ten deviations out."""
_COMPOSED_TAIL = 1e-6
"""Share of delta that the tails of the composition may cost."""
_ROUNDING_SHARE = 3e-4
"""Share of delta that rounding may cost where `dp_accounting` composes."""


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
    law = law_to_average(step.law, step.noise_multiplier)
    return upper_nodes(law, step.noise_multiplier, sliver(delta, steps, step.sample_rate), resolution.bins)


def _slack(step: Step, nodes: Nodes) -> float:
    if step.law.order is Order.STOCHASTIC:
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
    mass = np.maximum(mass, 0.0)
    if not mass.any():
        # Every loss is infinite. Something finite is left to take moments of; more mass is pessimistic.
        mass[0] = _LEAST_MASS
    return LossPMF(index, mass, float(delta[-1]))


Curve = tuple[IntArray, FloatArray]
"""Orders divided by the grid interval, increasing, and delta there."""


def _curves(part: _Prepared, interval: float, spacing: int) -> tuple[Curve, Curve]:
    """Returns the curves of one step at the grid's points, slack included, REMOVE and ADD."""
    sigma, q = part.step.noise_multiplier, part.step.sample_rate
    edge = math.log1p(-q) if q < 1 else -math.inf
    remove = orders_between(max(part.bottom, edge), part.top, interval, spacing)
    add = orders_between(-part.top, min(-part.bottom, -edge), interval, spacing)
    remove_delta = remove_curve(np.float64(interval) * remove, part.nodes, sigma, q)
    add_delta = add_curve(np.float64(interval) * add, part.nodes, sigma, q)
    # `gaussian_hockey_stick` takes a difference that cancels as 1 / sigma does; a thousand times what was found.
    rounding = 1.0 + _CANCELLATION * max(1.0, sigma)
    return (
        (remove, np.minimum(part.slack + (1 - part.slack) * remove_delta * rounding, 1.0)),
        (add, np.minimum(part.slack + (1 - part.slack) * add_delta * rounding, 1.0)),
    )


def composed_points(parts: Sequence[tuple[LossPMF, int]], tail: float) -> int:
    """The largest grid that composing in `dp_accounting` may allocate.

    Its self-composition bounds the window with Chernoff orders of at most 20 per one-step range; its composition of
    different steps adds the ranges up.

    Args:
        parts: One-step distributions with their counts.
        tail: What the self-composition may cut off.

    Returns:
        A number of grid points.
    """
    total = 0
    for pmf, count in parts:
        length = int(pmf.index[-1] - pmf.index[0]) + 1
        offsets, keep = (pmf.index - pmf.index[0]).astype(np.float64), pmf.mass > 0
        log_mass, offsets = np.log(pmf.mass[keep]), offsets[keep]
        low, high, cost = 0.0, float((length - 1) * count), math.log(2 / tail)
        for order in (-20, -10, -5, -2, -1, 1, 2, 5, 10, 20):
            exponent = log_mass + order / length * offsets
            moment = exponent.max() + math.log(float(np.exp(exponent - exponent.max()).sum()))
            bound = (count * moment + cost) * length / order
            low, high = (max(low, bound), high) if order < 0 else (low, min(high, bound))
        total += max(int(high - low) + 1, length)
    return total


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
        self._composed: tuple[PLDPmf, PLDPmf] | None = None
        self._composers: tuple[Composer, Composer] | None = None
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
                self._most = points
                break
            if self.interval >= coarsest:
                raise AccountingResourceError(
                    f"steps={total}: the composed loss needs {points} grid points even at an interval of "
                    f"{self.interval:.3g}, more than {resolution.max_total_points}: raise noise_multiplier, or lower "
                    "sample_rate or steps"
                )
            self.interval = min(coarsest, self.interval * max(2.0, points / resolution.max_total_points))

    def _curve(self, part: _Prepared) -> tuple[_Prepared, Curve, Curve]:
        return (part, *_curves(part, self.interval, self._resolution.relative_spacing))

    def _points(self, parts: Sequence[tuple[LossPMF, int]]) -> int:
        if len(parts) > 1:
            low, high = window(parts, self.interval, self._tail)
            return high - low + 1
        return composed_points(parts, self._tail)

    def epsilon(self, delta: float | None = None) -> float:
        """Certified upper bound on epsilon: the larger of `directions`.

        Args:
            delta: Any delta in (0, 1); default: the one that the bound was made for, where it is tightest.

        Returns:
            The larger epsilon of the two directions; inf if none can be certified.
        """
        delta = self.delta if delta is None else delta
        if self._hopeless(self._remove, delta) or self._hopeless(self._add, delta):
            return math.inf
        return max(self.directions(delta))

    def directions(self, delta: float | None = None) -> tuple[float, float]:
        """Certified upper bounds on epsilon for each direction.

        Guarantee: a pair that dominates one direction of every step dominates that direction of the composition, so
        each of the two numbers holds by itself. The guarantee of add/remove needs both, hence their maximum. The
        composition is that of `dp_accounting` where its rounding, bounded by `round_off`, is a small share of delta,
        and the tilted one of `composition` where delta is too small for that, for a single step, and for several kinds.

        Args:
            delta: As in `epsilon`.

        Returns:
            epsilon for removing a record and for adding one; inf where none can be certified.
        """
        delta = self.delta if delta is None else delta
        # What infinite losses alone forbid needs no composition.
        hopeless = self._hopeless(self._remove, delta), self._hopeless(self._add, delta)
        rounding = max(self._rounding)
        if all(hopeless):
            return math.inf, math.inf
        single = sum(count for _, count in self._remove) == 1
        several = len(self._remove) > 1
        if rounding <= _ROUNDING_SHARE * delta and not single and not several:
            found = [float(pmf.get_epsilon_for_delta(delta - rounding)) for pmf in self.composed()]
        else:
            found = [composer.compose(delta=delta).upper_epsilon(delta) for composer in self.composers()]
        remove, add = (math.inf if known else value for known, value in zip(hopeless, found, strict=True))
        return remove, add

    def composed(self) -> tuple["PLDPmf", "PLDPmf"]:
        """The composed loss distributions as `dp_accounting` has them, made once. For steps of one kind.

        Guarantee: apart from the rounding of floating point, which `directions` charges, each dominates its direction
        of the whole history.

        Returns:
            One for removing a record and one for adding it.
        """
        # Of different steps dp_accounting makes one grid as long as all of theirs together, which nothing here bounds.
        assert len(self._curves) == 1
        if self._composed is None:
            ((part, remove, add),) = self._curves
            self._composed = self._compose(remove, part.step.count), self._compose(add, part.step.count)
        return self._composed

    def _compose(self, curve: Curve, count: int) -> "PLDPmf":
        # Slow to import (a second): `dprc calibrate --help` must not pay for it.
        from dp_accounting.pld import pld_pmf

        index, delta = curve
        pmf = pld_pmf.create_pmf_pessimistic_connect_dots(self.interval, index, np.minimum.accumulate(delta))
        # Sparse distributions compose by dictionaries, and take index ** count as an exact integer to decide it.
        return pmf.to_dense_pmf().self_compose(count, self._tail)

    @property
    def _rounding(self) -> tuple[float, float]:
        """What floating point may add to a divergence that `dp_accounting` composed, per direction."""
        steps = sum(count + 2 for _, count in self._remove)
        norms = (max(float(np.linalg.norm(pmf.mass)) for pmf, _ in part) for part in (self._remove, self._add))
        # A length that suits the transform is not much above the one that is needed.
        remove, add = (round_off(steps, 2 * self._most, norm) for norm in norms)
        return remove, add

    def _hopeless(self, parts: Sequence[tuple[LossPMF, int]], delta: float) -> bool:
        """Returns whether infinite losses alone exceed delta, which no composition is needed to know."""
        return self._infinite(parts) > delta

    @property
    def infinite_loss(self) -> float:
        """Probability of an infinite loss over all steps: what is cut off of one step, and the slack."""
        return max(self._infinite(self._remove), self._infinite(self._add))

    @staticmethod
    def _infinite(parts: Sequence[tuple[LossPMF, int]]) -> float:
        return -math.expm1(sum(count * math.log1p(-min(pmf.infinity, 1 - 1e-16)) for pmf, count in parts))

    def composers(self) -> tuple[Composer, Composer]:
        """The same distributions in this package's own composition, REMOVE and ADD.

        Returns:
            One composer per direction.
        """
        if self._composers is None:
            limit = self._resolution.max_total_points * 2
            self._composers = (
                Composer(self._remove, self.interval, limit),
                Composer(self._add, self.interval, limit),
            )
        return self._composers

    def fast_epsilon(self, composers: tuple[Composer, Composer], counts: Sequence[int] | None = None) -> float:
        """The same bound composed by this package, for many step counts.

        Args:
            composers: From `composers`.
            counts: How often each step occurs, at most its count; default: its count.

        Returns:
            Upper bound on epsilon; inf if none can be given.
        """
        return max(composer.compose(counts, self.delta).upper_epsilon(self.delta) for composer in composers)
