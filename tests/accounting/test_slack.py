"""The slack of the convex order against brute force over orders and over spectra."""

import math
from typing import Any

import numpy as np
import pytest
from scipy import integrate, optimize, special, stats

from dprc_lightning.accounting.divergence import Divergences
from dprc_lightning.accounting.grid import COARSE, FINE
from dprc_lightning.accounting.law import GaussianConvexLaw, GaussianEnvelopeLaw, Order, SensitivityLaw
from dprc_lightning.accounting.privacy_loss import Step, UpperBound
from dprc_lightning.accounting.slack import (
    CONVEX_ALONE_CHARGE,
    CONVEX_MIN_NOISE_MULTIPLIER,
    divergence_slack,
    law_to_average,
    step_slack,
    tail_limit,
)
from dprc_lightning.errors import InvalidArgumentError


def _density(w: float, a: float, c: float) -> float:
    """-h'(w) for h(w) = delta_a(c / sqrt(w))."""
    return c / 2 * w**-1.5 * stats.norm.pdf(c / (2 * math.sqrt(w)) - a * math.sqrt(w) / c)


def _divergence(w: Any, a: float, c: float) -> Any:
    mu = c / np.sqrt(w)
    return stats.norm.cdf(mu / 2 - a / mu) - np.exp(a + stats.norm.logcdf(-mu / 2 - a / mu))


def test_density_is_the_derivative() -> None:
    for w, a, c in [(0.5, 0.3, 1.0), (1.2, -1.0, 2.0), (0.1, 2.0, 3.0)]:
        numeric = -(_divergence(w + 1e-6, a, c) - _divergence(w - 1e-6, a, c)) / 2e-6
        assert _density(w, a, c) == pytest.approx(numeric, rel=1e-5)


def _grid_supremum(k: int, sigma: float) -> float:
    """sup_a |h'(1)| int_0^{w*(a)} F(w) dw by brute force."""
    c, best = 1 / sigma, 0.0
    for a in np.linspace(-8, 8, 161):
        at_one = _density(1.0, a, c)
        # The mode of -h' lies below c^2/12; w* is left of it.
        result = optimize.minimize_scalar(lambda w, a=a: -_density(w, a, c), bounds=(1e-6, c**2 / 12), method="bounded")
        mode = float(result.x)
        if _density(mode, a, c) <= at_one:
            continue
        root = optimize.brentq(lambda w, a=a, at=at_one: _density(w, a, c) - at, 1e-7 * mode, mode)
        integral = integrate.quad(lambda w: stats.chi2.cdf(k * w, k), 0, root, epsabs=0)[0]
        best = max(best, at_one * integral)
    return best


@pytest.mark.parametrize(("k", "sigma"), [(1, 0.5), (4, 0.6), (8, 0.35), (16, 0.5), (32, 0.4), (2, 1.0)])
def test_closed_bound_covers_the_supremum_and_is_not_wasteful(k: int, sigma: float) -> None:
    supremum = _grid_supremum(k, sigma)
    bound = divergence_slack(GaussianConvexLaw(k), sigma)
    # The bound takes the worst order separately in its two factors, which costs at most exp(c^2 / 8).
    assert supremum <= bound <= supremum * 1.3 * math.exp(sigma**-2 / 8)


def test_root_of_the_tail_limit() -> None:
    for sigma in (0.3, 0.5, 1.0, 3.0):
        w, c2 = tail_limit(sigma), sigma**-2
        assert w < c2 / 12
        assert w**-1.5 * math.exp(-c2 / (8 * w)) == pytest.approx(math.exp(-c2 / 8), rel=1e-6)
    assert tail_limit(CONVEX_MIN_NOISE_MULTIPLIER) == pytest.approx(1.0)


@pytest.mark.parametrize(("k", "published"), [(1, 7.8e-3), (4, 3.4e-3)])
def test_slack_is_needed_at_the_edge_and_enough(k: int, published: float) -> None:
    """At sigma = 12^(-1/2) a rank-one layer beside exact ones is worse than rank one alone, by less than the slack."""
    sigma = CONVEX_MIN_NOISE_MULTIPLIER
    c, worst = 1 / sigma, 0.0
    root = np.linspace(1e-5, 7, 20_001)
    weight = stats.chi.pdf(root, k)
    weight /= integrate.trapezoid(weight, root)
    x = root**2 / k
    for a in np.linspace(-1, 4, 21):
        rank_one = integrate.trapezoid(weight * _divergence(x, a, c), root)
        for exact in (0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0):
            mixed = integrate.trapezoid(weight * _divergence(exact + (1 - exact) * x, a, c), root)
            worst = max(worst, mixed - rank_one)
    assert 0.9 * published < worst < 1.1 * published
    assert worst <= divergence_slack(GaussianConvexLaw(k), sigma)


@pytest.mark.parametrize(("k", "sigma"), [(8, 0.8), (32, 2.0)])
@pytest.mark.parametrize("spectrum", [(0.0, 0.5, 0.5), (0.5, 0.5), (0.0, 0.9, 0.1), (0.2, 0.4, 0.2, 0.2)])
def test_no_spectrum_beats_rank_one_by_more_than_the_slack(k: int, sigma: float, spectrum: tuple[float, ...]) -> None:
    """The first weight is the share of layers whose norm is exact."""
    generator, n = np.random.default_rng(3), 200_000
    exact, weights = spectrum[0], np.array(spectrum[1:])
    w = exact + (generator.chisquare(k, (n, weights.size)) / k) @ weights
    x = generator.chisquare(k, n) / k
    slack = divergence_slack(GaussianConvexLaw(k), sigma)
    for a in (-2.0, -0.3, 0.0, 0.3, 1.0, 3.0):
        first, second = _divergence(w, a, 1 / sigma), _divergence(x, a, 1 / sigma)
        error = math.hypot(first.std(), second.std()) / math.sqrt(n)
        assert first.mean() - second.mean() <= slack + 4.5 * error


@pytest.mark.parametrize(("k", "sigma", "q"), [(8, 0.4, 0.2), (8, 0.5, 1.0), (16, 0.4, 0.05)])
def test_the_slack_is_charged_as_an_infinite_loss_in_both_directions(k: int, sigma: float, q: float) -> None:
    """r = q B / (1 - delta(0)), every factor from scipy and from the root's own equation."""
    c = 1 / sigma
    root = optimize.brentq(lambda w: -1.5 * math.log(w) - c**2 / (8 * w) + c**2 / 8, 1e-3 * c**2 / 12, c**2 / 12)
    bound = c / (2 * math.sqrt(2 * math.pi)) * integrate.quad(lambda w: stats.chi2.cdf(k * w, k), 0, root, epsabs=0)[0]
    w = np.linspace(1e-6, stats.chi2.isf(1e-15, k) / k, 400_001)
    total_variation = 2 * stats.norm.cdf(c / 2 / np.sqrt(w)) - 1
    at_zero = q * integrate.trapezoid(stats.chi2.pdf(k * w, k) * k * total_variation, w)
    r, delta = q * bound / (1 - at_zero), 1e-6
    upper = UpperBound([Step(GaussianConvexLaw(k), sigma, q, 1)], delta, FINE)
    assert upper.slack == pytest.approx(r, rel=1e-3)
    for composer in upper.composers():
        assert r * (1 - 1e-3) <= composer.compose().pmf.infinity <= r * (1 + 1e-3) + 1e-3 * delta
    # Composed, the charge adds up; an epsilon for a smaller delta is not given.
    many = UpperBound([Step(GaussianConvexLaw(k), sigma, q, 10)], 5 * r, FINE)
    assert many.epsilon() == math.inf


def test_a_convex_law_must_know_its_lower_tail() -> None:
    class Nameless(SensitivityLaw):
        order = Order.CONVEX

        def cdf(self, w: object) -> np.ndarray:
            return np.asarray(stats.chi2.cdf(8 * np.asarray(w), 8))

    with pytest.raises(InvalidArgumentError, match="lower_tail_integral"):
        divergence_slack(Nameless(), 1.0)


def _rest(a: Any, mu: Any) -> Any:
    """1 - delta_a(mu), without cancellation."""
    return special.ndtr(a / mu - mu / 2) + np.exp(a + special.log_ndtr(-mu / 2 - a / mu))


def _box_bounds(a1: Any, a2: Any, t1: Any, t2: Any) -> Any:
    """Upper bounds on (t G(sqrt 12) - G(sqrt(12 / t))) / (1 - t), G = 1 - delta_a, over boxes of a and t."""
    # G rises in a and falls in mu.
    corners = (t2 * _rest(a2, math.sqrt(12)) - _rest(a1, np.sqrt(12 / t1))) / np.maximum(1 - t2, 1e-300)
    # Towards t = 1: the largest slope of s -> G(sqrt(12 / s)) on [t, 1], less G at one. The slope is
    # sqrt(3) s^(-3/2) phi(x) with x = sqrt(3 / s) - a sqrt(s / 12), which falls in s and in a.
    least, most = math.sqrt(3) - a2 / math.sqrt(12), np.sqrt(3 / t1) - a1 * np.sqrt(t1 / 12)
    nearest = np.where((least < 0) & (most > 0), 0.0, np.minimum(np.abs(least), np.abs(most)))
    slope = math.sqrt(3) * t1**-1.5 * stats.norm.pdf(nearest) - _rest(a1, math.sqrt(12))
    return np.minimum(np.where(t2 < 1, corners, np.inf), slope)


def test_charge_of_the_convex_order_alone_is_proved_by_subdivision() -> None:
    """sup over a >= 0 and 0 < t < 1 of the excess is below the constant: a bound on each box of a cover."""
    limit = CONVEX_ALONE_CHARGE - 1e-9
    # t <= 0.23: the excess is at most t / (1 - t), because 0 <= G <= 1.
    assert 0.23 / 0.77 < limit
    a, t = np.linspace(0.0, 60.0, 61), np.linspace(0.23, 1.0, 41)
    # a >= 60: G(sqrt 12) <= 1 in the first bound; in the second x < 0 for all larger a as well.
    top = (t[1:] - _rest(60.0, np.sqrt(12 / t[:-1]))) / np.maximum(1 - t[1:], 1e-300)
    x = np.sqrt(3 / t[:-1]) - 60.0 * np.sqrt(t[:-1] / 12)
    assert np.all(x < 0)
    top_slope = math.sqrt(3) * t[:-1] ** -1.5 * stats.norm.pdf(x) - _rest(60.0, math.sqrt(12))
    assert np.all(np.minimum(np.where(t[1:] < 1, top, np.inf), top_slope) < limit)
    boxes = [part.ravel() for part in (*np.meshgrid(a[:-1], t[:-1]), *np.meshgrid(a[1:], t[1:]))]
    a1, t1, a2, t2 = boxes
    while True:
        open_ = _box_bounds(a1, a2, t1, t2) >= limit
        if not open_.any():
            break
        assert open_.sum() < 100_000, "a region that no subdivision closes"
        a1, a2, t1, t2 = a1[open_], a2[open_], t1[open_], t2[open_]
        am, tm = (a1 + a2) / 2, (t1 + t2) / 2
        a1, a2 = np.concatenate([a1, am, a1, am]), np.concatenate([am, a2, am, a2])
        t1, t2 = np.concatenate([t1, t1, tm, tm]), np.concatenate([tm, tm, t2, t2])


class _TwoAtoms(SensitivityLaw):
    """Mass 1 - t at ``low``, mass t at ``high``."""

    order, certified = Order.CONVEX_ALONE, True

    def __init__(self, low: float, high: float, t: float) -> None:
        self.atoms = tuple(atom for atom in (low, high) if atom > 0)
        self._low, self._high, self._t = low, high, t

    def cdf(self, w: object) -> np.ndarray:
        w = np.asarray(w, dtype=np.float64)
        return np.where(w >= self._low, 1 - self._t, 0.0) + np.where(w >= self._high, self._t, 0.0)


@pytest.mark.parametrize("sigma", [0.2, 1.0, 3.0])
def test_charge_of_the_convex_order_alone_is_needed(sigma: float) -> None:
    """The fusion of two atoms into one, which the convex order allows, needs the charge up to two parts in 300."""
    limit, t, a = 1 / (12 * sigma**2), 0.399, 7.43
    fused = float(_divergence(t * limit, a, 1 / sigma))
    law = _TwoAtoms(0.0, limit * (1 + 1e-9), t)
    moved = (1 - t) + t * float(_divergence(limit, a, 1 / sigma))
    slack = step_slack(law, sigma, 1.0, 0.0)
    assert slack == pytest.approx(0.303 * (1 - t))
    assert moved + (0.3005 / 0.303) * slack < fused <= moved + slack


@pytest.mark.parametrize("q", [0.1, 1.0])
@pytest.mark.parametrize("t", [0.2, 0.399, 0.7, 0.95])
def test_charged_curves_cover_what_the_order_allows(t: float, q: float) -> None:
    """A record whose w is the mean of the law, in both directions and for orders of either sign."""
    sigma = 1.0
    limit = 1 / (12 * sigma**2)
    law = _TwoAtoms(0.0, limit * (1 + 1e-9), t)
    upper = UpperBound([Step(law, sigma, q, 1)], 1e-3, COARSE)
    assert upper.slack > 0
    orders = np.concatenate([np.linspace(-12, 12, 97), np.linspace(-0.2, 0.2, 41)])
    remove, add = Divergences([upper]).at(orders)
    mu = 1 / sigma / math.sqrt(t * limit)
    for delta, direction in ((remove, "remove"), (add, "add")):
        # The sampled Gaussian's own definition, by the two densities' masses above the threshold.
        if direction == "remove":
            inside = np.exp(orders) > 1 - q
            order = np.log1p(np.expm1(np.where(inside, orders, 0.0)) / q)
            expected = np.where(inside, q * _divergence(mu**-2.0, order, 1.0), -np.expm1(orders))
        else:
            share = -np.expm1(orders + (math.log1p(-q) if q < 1 else -math.inf))
            inside = share > 0
            safe = np.where(inside, share, 1.0)
            expected = np.where(inside, safe * _divergence(mu**-2.0, orders + np.log(q / safe), 1.0), 0.0)
        assert np.all(delta >= expected - 1e-12)


def test_the_order_decides_what_is_charged() -> None:
    class Alone(GaussianConvexLaw):
        order = Order.CONVEX_ALONE

    q, sigma, at_zero = 0.1, 0.6, 0.03
    missed = stats.chi2.cdf(8 / (12 * sigma**2), 8)
    assert step_slack(Alone(8), sigma, q, at_zero) == pytest.approx(0.303 * q * missed / (1 - at_zero))
    assert step_slack(GaussianEnvelopeLaw(8), sigma, q, at_zero) == 0.0
    assert step_slack(Alone(8), 0.01, 1.0, 1.0) == 1.0
    # Its own mass below the limit is at Z = infinity, the rest where it was.
    moved = law_to_average(Alone(8), sigma)
    assert moved.mass_at_infinity == pytest.approx(missed)
    assert float(moved.cdf(1.0)) == pytest.approx(stats.chi2.cdf(8, 8))
    assert law_to_average(GaussianConvexLaw(8), sigma) == GaussianConvexLaw(8)
    with pytest.raises(InvalidArgumentError, match="noise_multiplier"):
        step_slack(GaussianConvexLaw(8), 0.28, q, at_zero)
