r"""Composition of discrete privacy losses by one Fourier transform, tilted towards the losses that delta is made of.

Plain transforms round relative to the whole distribution: a delta of 1e-10 after a million steps drowns. So each step's
distribution x is tilted first (Esscher), ``x_t(l) = exp(t l - K) x(l)`` with ``K = log sum_l exp(t l) x(l)``. Tilting
and composing commute: with S the sum of the K's of all steps, the composition y and that of the tilted ones, y_t, obey
``y(l) = exp(S - t l) y_t(l)``.

Guarantee: the divergence at order e is ``delta(e) = infinity + exp(S - t e) sum_{u > 0} g(u) y_t(e + u)`` with
``g(u) = (1 - exp(-u)) exp(-t u)``. Three things are wrong with the computed y_t, and `Composed.error` charges them.

* The transform is circular. Its length is chosen by Chernoff's inequality so that y_t has at most some tail outside of
  the window, which is aliased to anywhere. It moves delta(e) by at most ``exp(S - t e) max g`` times that tail.
* Transforms, powers and products round. A transform X of N points goes through log2(N) levels of a few operations
  each: with u = 2^-53 every value is off by at most ``d = 16 u log2(N)`` for masses that add up to one, and in the
  Euclidean norm by d times the norm (at most 6.7 u log2(N) by Higham, Accuracy and Stability of Numerical Algorithms,
  chapter 24). The power X^T is then off by ``T d (|X| + d)^(T - 1) + 16 T u (|X| + d)^T``, which is summed as it is
  (`_rounding`). So y_t is
  off by some r in the Euclidean norm, and delta(e), by Cauchy and Schwarz, by ``exp(S - t e) ||g|| r``, where
  ``||g||^2 <= min(N, (1/h) int_0^inf g^2 + max g^2)`` for the grid interval h.
* The exponents round: relative errors of `Composed.drift`.

At the t that minimises Chernoff's bound, ``exp(S - t e)`` is delta but for a factor of a few hundreds, so that all
three are negligible for every delta above 1e-250; the least t that makes them so is used. At t = 0 the same formulas
bound the plain transform, whoever makes it.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import fft

from dprc_lightning.accounting.grid import IntArray
from dprc_lightning.accounting.law import FloatArray
from dprc_lightning.errors import AccountingResourceError

_EPS = float(np.finfo(np.float64).eps)
_TAIL = 1e-4
"""Most of a tilted distribution that may lie outside of the window."""
_LEAST_TAIL = 1e-30
"""Least of it that is worth resolving."""
_UNTILTED_TAIL = 1e-14
"""What may lie outside where no delta is given."""
_SHARE = 1e-5
"""Share of delta that the tails are meant to cost; what they do cost is charged."""
_ROUNDING_SHARE = 1e-4
"""The same for rounding, whose bound is far above what happens."""
_TOO_MUCH = 1e-3
"""Share of delta that the errors may cost before another tilt is tried."""
_LOOSE = math.log(1000.0)
"""Chernoff's bound on delta is usually too large by less than the exponential of this."""
_TILTS = np.geomspace(1e-8, 1e6, 94)
"""Orders per unit of loss among which the tilt is chosen: the factor sqrt(2) between them costs next to nothing."""
_SUMS = 1e-12
"""Relative error of adding up a divergence pairwise, with room to spare."""
_BLOCK, _SPAN = 1 << 16, 500.0
"""Grid points, and losses, that are added up at once in the search for epsilon."""
_NORM = 0.03
"""A guess at the Euclidean norm of a composed distribution, by which the tilt is chosen."""
_KEPT = 2
"""Tilts whose transforms are kept: neighbouring step counts use the same one."""


@dataclass(frozen=True)
class LossPMF:
    """A distribution of the privacy loss on integer multiples of a grid interval.

    Attributes:
        index: Losses divided by the interval, shape [n], int64.
        mass: Their probabilities, shape [n], float64.
        infinity: Probability of an infinite loss.
    """

    index: IntArray
    mass: FloatArray
    infinity: float = 0.0


def round_off(steps: int, points: int, norm: float = 1.0) -> float:
    """Bound on what floating point adds to any divergence of a composition that was not tilted, whoever makes it.

    It takes ``(|X| + d)^(T - 1)`` of the module's text as a constant for all values X of the transform.

    Args:
        steps: Number of composed steps, and two more for each transform of different steps.
        points: Length of the transform, or an upper bound on it.
        norm: The largest Euclidean norm of a distribution that was transformed; at most one.

    Returns:
        The bound, in units of delta: that of the transform, and that of adding up its values one by one.
    """
    unit = 8 * _EPS * math.log2(max(points, 2))
    # Each value may be above one by d, and in the Euclidean norm all of them by d sqrt(points) norm.
    growth = math.exp(min((steps + 2) * unit, 700.0))
    return math.sqrt(points) * (steps + 2) * unit * norm * growth + points * _EPS


def _log_moments(pmf: LossPMF, orders: FloatArray) -> FloatArray:
    """Returns log sum_i mass_i exp(order * index_i), shape of ``orders``."""
    keep = pmf.mass > 0
    index, log_mass = pmf.index[keep].astype(np.float64), np.log(pmf.mass[keep])
    out = np.empty_like(orders)
    for i, order in enumerate(orders):
        exponent = log_mass + order * index
        peak = exponent.max()
        out[i] = peak + math.log(float(np.exp(exponent - peak).sum()))
    return out


class _Chernoff:
    """Where the sum of tilted losses lies, for any counts: the log-moments are computed once."""

    def __init__(self, pmfs: Sequence[LossPMF], interval: float, order: float) -> None:
        spread = max(int(pmf.index[-1] - pmf.index[0]) for pmf in pmfs) * interval
        # Per unit of loss: from the scale of a sum of many small losses to that of a single large one.
        self._steps = np.geomspace(min(0.01, 0.1 / max(spread, 1e-9)), 1e4, 70) * interval
        self._pmfs = pmfs
        self.log_moment = [float(_log_moments(pmf, np.array([order]))[0]) for pmf in pmfs]
        self._up = [_log_moments(p, order + self._steps) - k for p, k in zip(pmfs, self.log_moment, strict=True)]
        self._down = [_log_moments(p, order - self._steps) - k for p, k in zip(pmfs, self.log_moment, strict=True)]

    def window(self, counts: Sequence[int], tail: float) -> tuple[int, int]:
        """Grid points between which the sum lies, up to probability ``tail``; wider for larger counts."""
        cost = math.log(2 / tail)
        up = sum((n * log for n, log in zip(counts, self._up, strict=True)), np.zeros_like(self._steps))
        down = sum((n * log for n, log in zip(counts, self._down, strict=True)), np.zeros_like(self._steps))
        most = sum(n * int(pmf.index[-1]) for n, pmf in zip(counts, self._pmfs, strict=True))
        least = sum(n * int(pmf.index[0]) for n, pmf in zip(counts, self._pmfs, strict=True))
        top = min(float(np.min((up + cost) / self._steps)), float(most))
        low = math.floor(max(float(np.max(-(down + cost) / self._steps)), float(least)))
        return low, max(low, math.ceil(top))


def window(parts: Sequence[tuple[LossPMF, int]], interval: float, tail: float) -> tuple[int, int]:
    """Grid points between which the composed finite loss lies, up to probability ``tail``.

    Args:
        parts: Each distribution with the number of times it is composed.
        interval: The grid interval.
        tail: Probability allowed outside.

    Returns:
        The lowest and the highest grid point, both inside.
    """
    chernoff = _Chernoff([pmf for pmf, _ in parts], interval, 0.0)
    return chernoff.window([count for _, count in parts], tail)


@dataclass(frozen=True)
class Composed:
    """A composed distribution, accurate where its tilt is aimed at, with bounds on what is wrong with it.

    Attributes:
        pmf: The distribution on consecutive grid points.
        interval: The grid interval.
        tilt: t, per unit of loss.
        log_error: Logarithm of the absolute error of the divergence at order zero; at order e it is smaller by t e.
        drift: Relative error.
        top: The largest finite loss that the composition can have.
    """

    pmf: LossPMF
    interval: float
    tilt: float
    log_error: float
    drift: float
    top: float

    def error(self, order: float) -> float:
        """Bound on the absolute error of the divergence at an order and above.

        Args:
            order: e.

        Returns:
            The bound, in units of delta.
        """
        return math.exp(min(self.log_error - self.tilt * order, 700.0))

    def upper_epsilon(self, delta: float) -> float:
        """Upper bound on epsilon, all errors charged.

        Args:
            delta: The target.

        Returns:
            The bound; inf if none can be given.
        """
        # A negative mass is rounding; an upper bound takes it as zero.
        pmf = LossPMF(self.pmf.index, np.maximum(self.pmf.mass, 0.0), self.pmf.infinity)
        target = delta * (1.0 - self.drift)
        if pmf.infinity >= target:
            return math.inf
        # No loss is larger than the largest: there the divergence is what is infinite, whatever the errors are.
        top = math.nextafter(self.top, math.inf)
        charge = self.error(epsilon_for_delta(pmf, self.interval, target))
        if target <= charge:
            return top
        # The epsilon of what is left is larger, and the error there smaller.
        found, step = epsilon_for_delta(pmf, self.interval, target - charge), 1e-12
        while found < math.inf and divergence(pmf, self.interval, found) > target - charge:
            # Running sums round more than pairwise ones.
            found, step = found * (1 + step) + step * self.interval, 4 * step
        # The term just above an order is only as accurate as their difference.
        return min(found + 4 * math.ulp(found), top)

    def lower_epsilon(self, delta: float, floor: float) -> float:
        """Lower bound on epsilon, all errors charged.

        Args:
            delta: The target.
            floor: Where the search ends.

        Returns:
            The bound, or the floor.
        """
        target = delta * (1.0 + self.drift)
        found = epsilon_for_delta(self.pmf, self.interval, target, floor)
        charge = 2.0 * self.error(found)
        while found > floor and charge < 1.0:
            found, step = epsilon_for_delta(self.pmf, self.interval, target + charge, floor), 1e-12
            while found > floor and divergence(self.pmf, self.interval, found) < target + charge:
                found, step = max(floor, found - step * (abs(found) + self.interval)), 4 * step
            if self.error(found) <= charge:
                return max(floor, found - 4 * math.ulp(found))
            charge *= 4.0
        return floor


@dataclass(frozen=True)
class _Spectra:
    """Transforms of the one-step distributions under one tilt, of one length."""

    points: int
    chernoff: _Chernoff
    spectra: list[np.ndarray]


class Composer:
    """Composes fixed one-step distributions for any number of steps; transforms are kept between calls.

    Args:
        parts: One-step distributions with the largest count that will be asked of each.
        interval: The grid interval.
        max_points: Memory guard: the largest length of the transform.
    """

    def __init__(self, parts: Sequence[tuple[LossPMF, int]], interval: float, max_points: int = 1 << 24) -> None:
        self.parts, self.interval, self._max_points = list(parts), interval, max_points
        self._pmfs, self._most = [pmf for pmf, _ in parts], [count for _, count in parts]
        self._log_moments = [_log_moments(pmf, _TILTS * interval) for pmf in self._pmfs]
        self._spectra: dict[float, _Spectra] = {}

    def compose(self, counts: Sequence[int] | None = None, delta: float | None = None) -> Composed:
        """The composed distribution.

        Args:
            counts: How often each part occurs, at most the counts given at construction (the default).
            delta: The delta that the tilt aims at; default: no tilt.

        Returns:
            The distribution, with the bounds on its errors.

        Raises:
            AccountingResourceError: If the transform would be longer than ``max_points``.
        """
        counts = self._most if counts is None else list(counts)
        active = [(pmf, count) for pmf, count in zip(self._pmfs, counts, strict=True) if count > 0]
        infinity = -math.expm1(sum(count * math.log1p(-min(pmf.infinity, 1 - 1e-16)) for pmf, count in active))
        if sum(counts) == 1:
            # Nothing to compose, nothing to charge.
            pmf = active[0][0]
            index = np.arange(pmf.index[0], pmf.index[-1] + 1, dtype=np.int64)
            mass = np.bincount(pmf.index - pmf.index[0], weights=pmf.mass).astype(np.float64)
            return Composed(
                LossPMF(index, mass, pmf.infinity),
                self.interval,
                0.0,
                -math.inf,
                _SUMS,
                float(index[-1]) * self.interval,
            )
        if delta is None or delta <= infinity:
            return self._composed(counts, infinity, [(0.0, _UNTILTED_TAIL)])
        composed = self._composed(counts, infinity, self._tilts(counts, delta - infinity))
        order = epsilon_for_delta(composed.pmf, self.interval, delta)
        if composed.error(order) > _TOO_MUCH * delta:
            # Chernoff's bound was far above epsilon. Now that it is about known, the tilt can aim at it.
            again = self._composed(counts, infinity, self._tilts(counts, delta - infinity, order))
            composed = min(composed, again, key=lambda one: one.error(order))
        return composed

    def _composed(self, counts: Sequence[int], infinity: float, aims: Sequence[tuple[float, float]]) -> Composed:
        """Returns the composition under the first tilt whose window fits."""
        tilt, tail, made = self._transforms(aims, counts)
        low, high = made.chernoff.window(counts, tail)
        product = np.ones(made.points // 2 + 1, dtype=np.complex128)
        for spectrum, count in zip(made.spectra, counts, strict=True):
            product *= spectrum**count
        rounding = _rounding(made.spectra, counts, made.points)
        circular = fft.irfft(product, made.points)
        index = low + np.arange(min(high - low + 1, made.points), dtype=np.int64)
        mass, scale, drift = circular[index % made.points], 0.0, _SUMS
        if tilt > 0:
            shares = zip(counts, made.chernoff.log_moment, strict=True)
            scale = sum(count * log_moment for count, log_moment in shares)
            exponent = scale - tilt * self.interval * index
            # Far below the losses that the tilt aims at there is only noise, which must not overflow. Nothing below
            # exp(600) may be cut: losses with a positive exponent still count wherever `error` is small.
            mass = mass * np.exp(np.minimum(exponent, 600.0))
            sizes = zip(counts, made.chernoff.log_moment, strict=True)
            drift += 4 * _EPS * sum(count * (abs(log_moment) + 1500) for count, log_moment in sizes)
            drift += 4 * _EPS * (abs(scale) + float(np.abs(exponent).max()) + 8)
        error = _weight(tilt, self.interval, made.points) * rounding + _peak(tilt) * tail
        top = sum(count * int(pmf.index[-1]) for pmf, count in zip(self._pmfs, counts, strict=True)) * self.interval
        return Composed(LossPMF(index, mass, infinity), self.interval, tilt, scale + math.log(error), drift, top)

    def _tilts(self, counts: Sequence[int], delta: float, order: float | None = None) -> list[tuple[float, float]]:
        """Returns tilts, each with what may lie outside of its window, the best first.

        Whatever is chosen here is valid. Where epsilon is not known, the first is the least that should make rounding
        negligible next to delta; where single large losses matter, its window may be too long, and a lesser one has to
        do. Where it is known to be about ``order``, the first is the one that rounds least.
        """
        most = 1 << 22
        rounding = _NORM * 8 * _EPS * math.log2(most) * (sum(counts) + 2)
        sums = sum((n * log for n, log in zip(counts, self._log_moments, strict=True)), np.zeros_like(_TILTS))
        peaks = np.log([_peak(float(tilt)) for tilt in _TILTS])
        orders = (sums + peaks - math.log(delta)) / _TILTS
        best = _TILTS.size - 1
        if order is None:
            best = int(np.argmin(orders))
            # Chernoff's bound on epsilon, less what it usually is above it.
            guess = max(0.0, float(orders[best]) - _LOOSE / float(_TILTS[best]))
        else:
            guess = order
        found: list[tuple[float, float, float]] = []
        for tilt, scale in zip([0.0, *_TILTS[: best + 1].tolist()], [0.0, *sums[: best + 1].tolist()], strict=True):
            log_scale = scale - tilt * guess
            tail = math.log(_SHARE * delta) - log_scale - math.log(_peak(tilt))
            log_error = log_scale + math.log(_weight(tilt, self.interval, most) * rounding)
            found.append((tilt, math.exp(min(max(tail, math.log(_LEAST_TAIL)), math.log(_TAIL))), log_error))
            if order is None and log_error <= math.log(_ROUNDING_SHARE * delta):
                break
        ranked = found[::-1] if order is None else sorted(found, key=lambda one: one[2])
        return [(tilt, tail) for tilt, tail, _ in ranked]

    def _transforms(self, aims: Sequence[tuple[float, float]], counts: Sequence[int]) -> tuple[float, float, _Spectra]:
        """Returns the first tilt whose window fits, its tail, and the transforms."""
        for tilt, tail in aims:
            made = self._spectra.pop(tilt, None)
            if made is None or _length(made.chernoff.window(counts, tail)) > made.points:
                chernoff = made.chernoff if made else _Chernoff(self._pmfs, self.interval, tilt * self.interval)
                # Room for twice the steps, lest a schedule makes new transforms for each count.
                twice = [min(2 * n, most) for n, most in zip(counts, self._most, strict=True)]
                lengths = [_length(chernoff.window(reach, tail)) for reach in (twice, counts)]
                length = next((length for length in lengths if length <= self._max_points), 0)
                made = self._transform(tilt, length, chernoff) if length else None
            if made is not None:
                self._spectra[tilt] = made  # the last one used is the last one to go
                while len(self._spectra) > _KEPT:
                    del self._spectra[next(iter(self._spectra))]
                return tilt, tail, made
        raise AccountingResourceError(
            f"steps={sum(counts)}: composing them on a loss grid of {self.interval:.3g} needs {lengths[-1]} points, "
            f"more than {self._max_points}; raise noise_multiplier, or lower sample_rate or steps"
        )

    def _transform(self, tilt: float, length: int, chernoff: _Chernoff) -> _Spectra:
        points = int(fft.next_fast_len(length, real=True))
        spectra = []
        for pmf, log_moment in zip(self._pmfs, chernoff.log_moment, strict=True):
            mass = pmf.mass
            if tilt > 0:
                with np.errstate(divide="ignore"):
                    mass = np.exp(np.log(mass) + tilt * self.interval * pmf.index - log_moment)
            # The step's own grid may be longer than the window: positions are taken modulo its length.
            dense = np.bincount(pmf.index % points, weights=mass, minlength=points)
            spectra.append(fft.rfft(dense))
        return _Spectra(points, chernoff, spectra)


def _rounding(spectra: Sequence[np.ndarray], counts: Sequence[int], points: int) -> float:
    """Bound on the Euclidean norm of what rounding adds to the composition of the given transforms."""
    unit = 8 * _EPS * math.log2(max(points, 2))
    log_product = np.zeros(points // 2 + 1)
    relative = np.full(points // 2 + 1, 8 * _EPS * (sum(counts) + 2 * len(counts)))
    for spectrum, count in zip(spectra, counts, strict=True):
        size = np.abs(spectrum) + unit
        log_product += count * np.log(size)
        relative += count * unit / size
    product = np.exp(log_product)
    # Half of the values are stored, the other half are their conjugates; the way back rounds once more.
    error = math.sqrt(2.0 / points) * float(np.linalg.norm(product * relative))
    return error + unit * (math.sqrt(2.0 / points) * float(np.linalg.norm(product)) + error)


def _length(window: tuple[int, int]) -> int:
    return window[1] - window[0] + 1


def _peak(tilt: float) -> float:
    """Returns the maximum of g(u) = (1 - exp(-u)) exp(-tilt u) over u > 0: tilt^tilt / (1 + tilt)^(1 + tilt)."""
    return math.exp(-tilt * math.log1p(1 / tilt)) / (1 + tilt) if tilt > 0 else 1.0


def _weight(tilt: float, interval: float, points: int) -> float:
    """Returns the Euclidean norm of g on a grid: its square is unimodal, so a sum is an integral and one maximum."""
    if tilt == 0:
        return math.sqrt(points)
    integral = 2.0 / (2 * tilt * (2 * tilt + 1) * (2 * tilt + 2))  # the Beta function B(2 tilt, 3)
    return math.sqrt(min(points, integral / interval + _peak(tilt) ** 2))


def divergence(pmf: LossPMF, interval: float, order: float) -> float:
    """Hockey-stick divergence ``infinity + sum_l (1 - exp(order - l))_+ mass_l``.

    Args:
        pmf: A distribution on increasing grid points.
        interval: The grid interval.
        order: e.

    Returns:
        The divergence, each term accurate by itself.
    """
    first = int(np.searchsorted(pmf.index, order / interval - 1))
    weight = -np.expm1(np.minimum(order - pmf.index[first:] * interval, 0.0))
    return pmf.infinity + float(np.sum(weight * pmf.mass[first:]))


def epsilon_for_delta(pmf: LossPMF, interval: float, delta: float, floor: float = 0.0) -> float:
    """Smallest epsilon >= floor with `divergence` at most delta.

    Args:
        pmf: A distribution on increasing grid points.
        interval: The grid interval.
        delta: The target.
        floor: Where the search ends; negative where the losses carry a known shift.

    Returns:
        epsilon; inf if the infinite loss alone exceeds delta.
    """
    if pmf.infinity > delta:
        return math.inf
    index, mass = pmf.index[::-1], pmf.mass[::-1]
    # Sums over the losses seen so far, from the top down, plain and discounted by exp(previous - loss).
    above, discounted, previous, start = pmf.infinity, 0.0, math.inf, 0
    while start < index.size and index[start] * interval > floor:
        # A block's span keeps exp(top - loss) far from overflow.
        stop = start + max(1, int(np.searchsorted(-index[start : start + _BLOCK], _SPAN / interval - index[start])))
        loss, top = index[start:stop] * interval, float(index[start] * interval)
        growth = np.exp(top - loss)
        block = mass[start:stop]
        plain = above + np.concatenate([[0.0], np.cumsum(block)])
        scaled = discounted * math.exp(top - previous) + np.concatenate([[0.0], np.cumsum(block * growth)])
        crossed = np.flatnonzero(plain[:-1] - scaled[:-1] / growth > delta)
        if crossed.size:
            first = int(crossed[0])
            last = float(loss[first - 1]) if first else previous
            if scaled[first] > 0:
                last = min(last, top + math.log((plain[first] - delta) / scaled[first]))
            return max(floor, last)
        above, discounted, previous, start = float(plain[-1]), float(scaled[-1] / growth[-1]), float(loss[-1]), stop
    if above <= delta or discounted <= 0:
        return floor
    return max(floor, previous + math.log((above - delta) / discounted))
