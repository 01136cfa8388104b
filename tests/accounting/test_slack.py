"""The slack of the convex order against brute force over orders and over spectra."""

import math
from typing import Any

import numpy as np
import pytest
from scipy import integrate, optimize, stats

from dprc_lightning.accounting.grid import FINE
from dprc_lightning.accounting.law import GaussianConvexLaw, SensitivityLaw
from dprc_lightning.accounting.privacy_loss import Step, UpperBound
from dprc_lightning.accounting.slack import CONVEX_MIN_NOISE_MULTIPLIER, divergence_slack, tail_limit
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
        assert r * (1 - 1e-3) <= composer.compose()[0].infinity <= r * (1 + 1e-3) + 1e-3 * delta
    # Composed, the charge adds up; an epsilon for a smaller delta is not given.
    many = UpperBound([Step(GaussianConvexLaw(k), sigma, q, 10)], 5 * r, FINE)
    assert many.epsilon() == math.inf


def test_a_convex_law_must_know_its_lower_tail() -> None:
    from dprc_lightning.accounting.law import Order

    class Nameless(SensitivityLaw):
        order = Order.CONVEX

        def cdf(self, w: object) -> np.ndarray:
            return np.asarray(stats.chi2.cdf(8 * np.asarray(w), 8))

    with pytest.raises(InvalidArgumentError, match="lower_tail_integral"):
        divergence_slack(Nameless(), 1.0)
