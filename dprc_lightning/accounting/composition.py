r"""Composition of discrete privacy losses by one Fourier transform, and epsilon from the result.

This serves the certified lower bound, the running epsilon of a training run and the search of a calibration. The upper
bound that counts is composed by `dp_accounting` (see `privacy_loss`); the two implementations check each other.

Guarantee: the transform is circular. Its length is chosen by a Chernoff bound so that the composed loss leaves the
window with probability at most `tail`; that mass is aliased somewhere into the window, so that the composed divergence
is off by at most `tail`, plus the rounding error of the transform, for which `round_off` allows. Callers charge both.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import fft

from dprc_lightning.accounting.grid import IntArray
from dprc_lightning.accounting.law import FloatArray
from dprc_lightning.errors import AccountingResourceError


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


def round_off(steps: int, points: int) -> float:
    """Allowance for floating point in a composed divergence: relative errors grow with steps and log(points).

    Args:
        steps: Number of composed steps.
        points: Length of the transform.

    Returns:
        The allowance, in units of delta.
    """
    return 8 * np.finfo(np.float64).eps * (steps + math.log2(max(points, 2)))


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


def window(parts: Sequence[tuple[LossPMF, int]], interval: float, tail: float) -> tuple[int, int]:
    """Grid points between which the composed finite loss lies, up to probability ``tail``.

    Args:
        parts: Each distribution with the number of times it is composed.
        interval: The grid interval.
        tail: Probability allowed outside.

    Returns:
        The lowest and the highest grid point, both inside.
    """
    spread = max(int(pmf.index[-1] - pmf.index[0]) for pmf, _ in parts) * interval
    # Chernoff orders per unit of loss: from the scale of a sum of many small losses to that of a single large one.
    orders = np.geomspace(min(0.01, 0.1 / max(spread, 1e-9)), 1e4, 70) * interval
    up = sum((count * _log_moments(pmf, orders) for pmf, count in parts), np.zeros_like(orders))
    down = sum((count * _log_moments(pmf, -orders) for pmf, count in parts), np.zeros_like(orders))
    cost = math.log(2 / tail)
    top = min(float(np.min((up + cost) / orders)), float(sum(int(pmf.index[-1]) * count for pmf, count in parts)))
    low = max(float(np.max(-(down + cost) / orders)), float(sum(int(pmf.index[0]) * count for pmf, count in parts)))
    low_point = math.floor(low)
    return low_point, max(low_point, math.ceil(top))


class Composer:
    """Composes fixed one-step distributions for any number of steps; the transform of a step is made once.

    Args:
        parts: One-step distributions with the largest count that will be asked of each.
        interval: The grid interval.
        tail: Probability allowed outside of the window.
        max_points: Memory guard: the largest length of the transform.

    Raises:
        AccountingResourceError: If the transform would be longer than ``max_points``.
    """

    def __init__(
        self, parts: Sequence[tuple[LossPMF, int]], interval: float, tail: float, max_points: int = 1 << 24
    ) -> None:
        self._parts, self.interval, self._tail = list(parts), interval, tail
        low, high = window(parts, interval, tail)
        if high - low + 1 > max_points:
            raise AccountingResourceError(
                f"composing {sum(count for _, count in parts)} steps on a loss grid of {interval:.3g} needs "
                f"{high - low + 1} points, more than {max_points}: use a coarser grid"
            )
        self.points = int(fft.next_fast_len(high - low + 1, real=True))
        self._spectra = []
        for pmf, _ in parts:
            # The step's own grid may be longer than the window: positions are taken modulo its length.
            dense = np.bincount(pmf.index % self.points, weights=pmf.mass, minlength=self.points)
            self._spectra.append(fft.rfft(dense))

    def compose(self, counts: Sequence[int] | None = None) -> tuple[LossPMF, float]:
        """The composed distribution, and the divergence by which it may be off.

        Args:
            counts: How often each part occurs, at most the counts given at construction (the default).

        Returns:
            The distribution on consecutive grid points, and the allowance for what fell outside the window and for
            rounding.
        """
        counts = [count for _, count in self._parts] if counts is None else list(counts)
        active = [(pmf, count) for (pmf, _), count in zip(self._parts, counts, strict=True) if count > 0]
        low, high = window(active, self.interval, self._tail)
        points = min(high - low + 1, self.points)
        product = np.ones(self.points // 2 + 1, dtype=np.complex128)
        for spectrum, count in zip(self._spectra, counts, strict=True):
            product *= spectrum**count
        dense = fft.irfft(product, self.points)
        index = low + np.arange(points, dtype=np.int64)
        finite = sum(count * math.log1p(-min(pmf.infinity, 1 - 1e-16)) for pmf, count in active)
        allowance = self._tail + round_off(sum(counts), self.points)
        return LossPMF(index, dense[index % self.points], -math.expm1(finite)), allowance


def epsilon_for_delta(pmf: LossPMF, interval: float, delta: float, floor: float = 0.0) -> float:
    """Smallest epsilon >= floor with divergence ``infinity + sum_l (1 - exp(e - l))_+ mass_l`` at most delta.

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
    loss, mass = pmf.index[::-1] * interval, pmf.mass[::-1]
    keep = loss > floor
    loss, mass = loss[keep], mass[keep]
    upper = pmf.infinity + np.cumsum(mass)
    above = np.flatnonzero(upper > delta)
    if above.size == 0:
        return floor
    # Beyond this loss even the whole mass is within delta: the answer is below, so exponents are taken from here.
    reference = loss[above[0]]
    with np.errstate(over="ignore", under="ignore"):
        weight = np.exp(np.clip(reference - loss, -745.0, 700.0))
        lower = np.cumsum(mass * weight)
        at_grid = upper - np.exp(np.minimum(loss - reference, 700.0)) * lower
    crossed = np.flatnonzero(at_grid > delta)
    # at_grid[i] is the divergence at loss[i]; between loss[i] and the next lower loss the same sums apply.
    if crossed.size and crossed[0] == 0:
        # delta equals the mass at infinity up to rounding: above the largest loss is the only safe answer.
        return float(max(floor, loss[0]))
    last = int(crossed[0]) - 1 if crossed.size else loss.size - 1
    if upper[last] <= delta or lower[last] <= 0:
        return float(max(floor, loss[min(last + 1, loss.size - 1)]))
    return float(max(floor, reference + math.log((upper[last] - delta) / lower[last])))
