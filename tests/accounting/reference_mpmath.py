"""One step's curves a second time, in mpmath at 30 digits: from densities and a quadrature rule, and nothing else.

The package works with closed forms: a Gaussian divergence at a transformed order, a law of Z put on finitely many
nodes. Here the two densities of the output are written down as they are and ``(p - exp(e) r)_+`` is integrated over the
output y and over the sketch's law. The only thing that is found rather than integrated is where the integrand's kink
lies, by bisection on the densities; a kink misplaced by x costs the integral x^2.
"""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
from mpmath import mp, mpf

mp.dps = 30
_REACH = 10
"""Standard deviations after which a Gaussian's density is cut: what is left is below 1e-22."""
_INNER, _OUTER = 14, 12
"""Points per panel in y, three standard deviations wide, and in log w."""


@lru_cache(maxsize=8)
def gauss(points: int) -> tuple[tuple[mpf, mpf], ...]:
    """Nodes and weights of Gauss and Legendre on [0, 1], by Newton's iteration on the recurrence."""
    out = []
    for guess in np.polynomial.legendre.leggauss(points)[0]:
        x = mpf(float(guess))
        for _ in range(3):
            before, value = mpf(1), x
            for n in range(2, points + 1):
                before, value = value, ((2 * n - 1) * x * value - (n - 1) * before) / n
            slope = points * (x * value - before) / (x * x - 1)
            x -= value / slope
        out.append(((x + 1) / 2, 1 / ((1 - x * x) * slope**2)))
    return tuple(out)


def integral(f: Callable[[mpf], mpf], edges: Sequence[float | mpf], points: int = 20) -> mpf:
    """Composite Gauss-Legendre rule between consecutive edges."""
    total = mpf(0)
    for low, high in zip(edges[:-1], edges[1:], strict=True):
        low, width = mpf(low), mpf(high) - mpf(low)
        total += width * sum(weight * f(low + width * node) for node, weight in gauss(points))
    return total


def _log_ratio(y: float, mu: float, q: float) -> float:
    """log of the density with the record over the density without it: increasing in y."""
    exponent = mu * y - mu * mu / 2
    if q == 1:
        return exponent
    rest = math.log1p(-q)
    top = max(rest, math.log(q) + exponent)
    return top + math.log(math.exp(rest - top) + math.exp(math.log(q) + exponent - top))


def _kink(order: float, mu: float, q: float) -> float | None:
    """y with log ratio = order; None if the ratio exceeds exp(order) everywhere."""
    low, high = -1e4 - mu, 1e4 + mu
    if _log_ratio(low, mu, q) >= order:
        return None
    for _ in range(90):
        middle = (low + high) / 2
        low, high = (low, middle) if _log_ratio(middle, mu, q) >= order else (middle, high)
    return high


def _panels(low: float, high: float, mu: float) -> list[list[float]]:
    """Panels over the part of [low, high] where either bell, around 0 and around mu, has any weight."""
    if low > mu or high < 0:  # one tail of both bells, falling like exp(-distance^2 / 2) or faster
        pieces = [(low, low + _REACH) if low > mu else (high - _REACH, high)]
    else:
        bells = [(-_REACH, mu + _REACH)] if mu <= 2 * _REACH else [(-_REACH, _REACH), (mu - _REACH, mu + _REACH)]
        pieces = [(max(low, left), min(high, right)) for left, right in bells]
    return [list(np.linspace(a, b, math.ceil((b - a) / 3) + 1)) for a, b in pieces if b > a]


def divergence(order: float, mu: mpf, q: float, direction: str) -> mpf:
    """Integral over y of (p - exp(order) r)_+, p and r the output's densities with and without the record.

    The output is scaled to unit noise; "add" has p and r exchanged.
    """
    bend = _kink(order if direction == "remove" else -order, float(mu), q)
    norm, rate, factor = 1 / mp.sqrt(2 * mp.pi), mpf(q), mp.exp(mpf(order))

    def gap(y: mpf) -> mpf:
        without = norm * mp.exp(-y * y / 2)
        with_record = (1 - rate) * without + rate * norm * mp.exp(-((y - mu) ** 2) / 2)
        return with_record - factor * without if direction == "remove" else without - factor * with_record

    if direction == "remove":
        ranges = _panels(-math.inf if bend is None else bend, math.inf, float(mu))
    else:
        ranges = [] if bend is None else _panels(-math.inf, bend, float(mu))
    return sum((integral(gap, edges, _INNER) for edges in ranges), mpf(0))


def law_of_w(k: int) -> Callable[[mpf], mpf]:
    """The density of log w, w = chi2_k / k, from the density of a sum of k squared Gaussians."""
    half = mpf(k) / 2
    log_norm = half * mp.log(half) - mp.loggamma(half)
    return lambda x: mp.exp(log_norm + half * (x - mp.exp(x)))


def log_w_range(k: int, tail: float = 1e-15) -> tuple[float, float]:
    """Values of log w outside of which there is less mass than about the tail."""
    half = k / 2
    # w^(k/2) exp(-k w / 2) (k/2)^(k/2) / Gamma(k/2 + 1): the lower tail, and the upper one up to a factor.
    log_norm = half * math.log(half) - math.lgamma(half + 1)
    high = 0.5
    while log_norm + half * (high - math.exp(high)) > math.log(tail) - 5:
        high += 0.25
    return min(-0.5, (math.log(tail) - log_norm) / half), high


def average(inner: Callable[[mpf], mpf], k: int, envelope: bool = False) -> mpf:
    """E inner(w) under w = chi2_k / k, or under w = min(1, chi2_k / k): an atom at one for what lies above."""
    density, (low, high) = law_of_w(k), log_w_range(k)
    if not envelope:
        # The trapezoidal rule: the integrand is analytic and dies at both ends, so the error is exp(-const / spacing).
        spacing = mpf(1) / (3 + math.isqrt(k))
        points = range(math.floor(low / spacing), math.ceil(high / spacing) + 1)
        return spacing * sum(density(spacing * i) * inner(mp.exp(spacing * i)) for i in points)
    width = 1.2 / math.sqrt(k / 2) + 0.2
    below = list(np.linspace(low, 0.0, math.ceil(-low / width) + 1))
    atom = integral(density, list(np.linspace(0.0, high, 9)))
    return integral(lambda x: density(x) * inner(mp.exp(x)), below, _OUTER) + atom * inner(mpf(1))


def step_curve(
    order: float, sigma: float, q: float, direction: str, k: int | None = None, envelope: bool = False
) -> mpf:
    """delta(order) of one step: exact clipping for k = None, else averaged over the public sketch."""
    if k is None:
        return divergence(order, 1 / mpf(sigma), q, direction)
    return average(lambda w: divergence(order, 1 / (mpf(sigma) * mp.sqrt(w)), q, direction), k, envelope)


def gaussian_divergence(a: float, mu: float, digits: int = 60) -> mpf:
    """Phi(mu/2 - a/mu) - exp(a) Phi(-mu/2 - a/mu) with so many digits that no cancellation is left."""
    with mp.workdps(digits):
        a_, mu_ = mpf(a), mpf(mu)
        return mp.ncdf(mu_ / 2 - a_ / mu_) - mp.exp(a_) * mp.ncdf(-mu_ / 2 - a_ / mu_)
