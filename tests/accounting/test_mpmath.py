"""The one-step curves, the Gaussian divergence and the inequalities of the proofs, against mpmath at 30 digits."""

import math
import sys
from pathlib import Path

import numpy as np
import pytest
from mpmath import mp, mpf
from scipy import stats

from dprc_lightning.accounting.discretization import Nodes, lower_nodes, upper_nodes
from dprc_lightning.accounting.hockey_stick import add_curve, gaussian_hockey_stick, remove_curve
from dprc_lightning.accounting.law import ExactLaw, GaussianConvexLaw, GaussianEnvelopeLaw
from dprc_lightning.accounting.slack import CONVEX_MIN_NOISE_MULTIPLIER, divergence_slack, tail_limit

sys.path.insert(0, str(Path(__file__).parent))
import reference_mpmath as reference

CURVES = {"remove": remove_curve, "add": add_curve}
SLIVER = 1e-12


@pytest.mark.parametrize("k", [1, 2, 8, 32, 128])
def test_the_reference_averages_a_law_of_mean_one(k: int) -> None:
    assert abs(reference.average(lambda w: mpf(1), k) - 1) < 1e-14
    assert abs(reference.average(lambda w: w, k) - 1) < 1e-14
    assert abs(reference.average(lambda w: w * w, k) - 1 - mpf(2) / k) < 1e-12
    assert abs(reference.average(lambda w: mpf(1), k, envelope=True) - 1) < 1e-14
    assert reference.average(lambda w: 1 / (1 + w), k, envelope=True) > reference.average(lambda w: 1 / (1 + w), k)


@pytest.mark.parametrize("direction", ["remove", "add"])
@pytest.mark.parametrize(("sigma", "q"), [(1.0, 0.01), (0.5, 0.3), (6.0, 1e-4), (0.1, 0.5), (2.0, 1.0)])
def test_exact_clipping(sigma: float, q: float, direction: str) -> None:
    orders = np.array([-3.0, -0.3, -1e-4, 0.0, 1e-4, 0.02, 0.5, 3.0, 8.0])
    nodes = upper_nodes(ExactLaw(), sigma, SLIVER, 256)
    computed = CURVES[direction](orders, nodes, sigma, q)
    expected = [float(reference.step_curve(e, sigma, q, direction)) for e in orders]
    # Deep tails too: exp(3) at sigma = 1, q = .01 has 1e-15.
    np.testing.assert_allclose(computed, expected, rtol=1e-9, atol=1e-18)


@pytest.mark.parametrize("direction", ["remove", "add"])
@pytest.mark.parametrize(
    ("k", "envelope", "sigma", "q", "orders"),
    [
        (8, False, 1.0, 0.1, (-0.08, 0.0, 0.02, 0.5, 3.0)),
        (32, False, 0.6, 0.01, (-0.005, 0.0, 0.005, 0.5, 3.0)),
        (2, False, 1.5, 1.0, (0.0, 1.5)),
        (4, False, 0.35, 0.2, (0.0, 0.1)),
        (16, True, 0.2, 0.2, (0.0, 0.1)),
        (32, True, 1.0, 0.05, (-0.03, 0.04, 2.0)),
    ],
)
def test_discrete_laws_bracket_the_integral_over_the_densities(
    k: int, envelope: bool, sigma: float, q: float, orders: tuple[float, ...], direction: str
) -> None:
    law = GaussianEnvelopeLaw(k) if envelope else GaussianConvexLaw(k)
    points = np.array(orders)
    upper = CURVES[direction](points, upper_nodes(law, sigma, SLIVER, 256), sigma, q)
    lower = CURVES[direction](points, lower_nodes(law, sigma, SLIVER, 256), sigma, q)
    expected = np.array([float(reference.step_curve(e, sigma, q, direction, k, envelope)) for e in orders])
    assert np.all(lower <= expected * (1 + 1e-12) + 1e-14)
    assert np.all(upper >= expected * (1 - 1e-12) - 1e-14)
    # And they are worth something: a few tenths of a percent apart, where the value is not deep in the tail.
    np.testing.assert_allclose(upper, lower, rtol=6e-3, atol=1e-9)


@pytest.mark.parametrize("mu", [1e-6, 1e-3, 0.03, 0.5, 1.0, 4.0, 20.0, 200.0])
def test_gaussian_divergence_in_extreme_ranges(mu: float) -> None:
    ratios = [-60.0, -9.0, -1.0, 0.0, 1e-3, 0.5, 2.0, 5.0, 9.0]
    orders = sorted({mu * ratio + shift * mu * mu / 2 for ratio in ratios for shift in (-1, 0, 1)} | {-50.0, 50.0})
    orders = [a for a in orders if abs(a) <= 599]
    for a, value in zip(orders, gaussian_hockey_stick(np.array(orders), mu), strict=True):
        expected = reference.gaussian_divergence(a, mu)
        # Two tails are subtracted: the error is relative to the larger one, plus what a and mu lose by being doubles.
        near = abs(a / mu - mu / 2)
        tail = float(mp.ncdf(-(mpf(a) / mu - mpf(mu) / 2)))
        assert abs(value - expected) <= 4e-16 * (4 + near**2) * tail + 1e-300, (a, mu)
        if mu >= 0.03 and expected > 1e-280:
            assert abs(value - expected) <= 1e-11 * expected + 2.3e-16 * (expected > 1e-3), (a, mu)


@pytest.mark.parametrize(("a", "mu"), [(10.0, 1.0), (4.5, 0.5), (50.0, 4.0), (-50.0, 4.0), (0.3, 0.03), (100.0, 8.0)])
def test_deep_tails_keep_their_relative_accuracy(a: float, mu: float) -> None:
    expected = float(reference.gaussian_divergence(a, mu))
    assert gaussian_hockey_stick(np.array([a]), mu)[0] == pytest.approx(expected, rel=1e-11)
    assert expected < 1e-15 or a < 0


@pytest.mark.parametrize("k", [1, 2, 8, 33, 256])
@pytest.mark.parametrize("w", [1e-3, 0.05, 0.3, 1.0, 2.0])
def test_lower_tail_integral_is_an_upper_bound_and_close(k: int, w: float) -> None:
    # Integral of the distribution function from 0 to w, which is E (w - X)_+, over the density of log X once more.
    density, top = reference.law_of_w(k), mp.log(mpf(w))
    panels = [top - mpf(x) for x in np.geomspace(0.02 / k, 160 / k + 3, 60)[::-1]] + [top]
    expected = reference.integral(lambda x: (mpf(w) - mp.exp(x)) * density(x), panels)
    value = GaussianConvexLaw(k).lower_tail_integral(w)
    assert expected * (1 - mpf(10) ** -12) - 1e-300 <= value <= expected * (1 + mpf(10) ** -8)


def _slope(w: mpf, a: mpf, c: mpf) -> mpf:
    """-h'(w), by the chain rule from d delta / d mu = phi(mu / 2 - a / mu)."""
    mu = c / mp.sqrt(w)
    return c / 2 * w ** mpf("-1.5") * mp.npdf(mu / 2 - a / mu)


def test_the_slope_is_the_derivative_and_falls_beyond_c_squared_over_12() -> None:
    generator = np.random.default_rng(0)
    for _ in range(60):
        c = mpf(float(np.exp(generator.uniform(-3, 2))))
        a = mpf(float(generator.normal() * 3))
        w = c**2 / 12 * mpf(float(1 + generator.exponential(2)))
        step = w * mpf(10) ** -9

        def h(x: mpf, a: mpf = a, c: mpf = c) -> mpf:
            return reference.gaussian_divergence(a, c / mp.sqrt(x), 50)

        with mp.workdps(50):
            assert abs((h(w - step) - h(w + step)) / (2 * step) / _slope(w, a, c) - 1) < mpf(10) ** -7
            # h'' >= 0 by a second difference of h itself, which knows nothing of the slope.
            wide = w * mpf(10) ** -5
            assert h(w + wide) + h(w - wide) >= 2 * h(w)
        assert _slope(w * mpf("1.001"), a, c) < _slope(w, a, c)


def test_below_c_squared_over_12_convexity_fails_at_order_one() -> None:
    """So the constant 1/12 cannot be improved: -h' rises there at a = 0, and has a single mode for every a."""
    for sigma in (0.3, 1.0, 3.0):
        c = 1 / mpf(sigma)
        assert _slope(c**2 / 12 * mpf("0.999"), mpf(0), c) < _slope(c**2 / 12, mpf(0), c)
        for a in (-4, -1, 0, 1, 4):
            values = [_slope(c**2 * mpf(10) ** (mpf(i) / 20 - 3), mpf(a), c) for i in range(80)]
            rises = [second > first for first, second in zip(values[:-1], values[1:], strict=True)]
            assert rises == sorted(rises, reverse=True)


@pytest.mark.parametrize("sigma", [CONVEX_MIN_NOISE_MULTIPLIER * 1.01, 0.35, 0.6, 1.0, 4.0])
def test_root_and_closed_bound_of_the_slack(sigma: float) -> None:
    c = 1 / mpf(sigma)
    root = mp.findroot(
        lambda w: -mpf("1.5") * mp.log(w) - c**2 / (8 * w) + c**2 / 8,
        (c**2 / mpf(400), c**2 / 12),
        solver="anderson",
        tol=1e-25,
    )
    limit = tail_limit(sigma)
    assert abs(limit - root) <= mpf(10) ** -14 * root
    for k in (1, 8, 32):
        half = mpf(k) / 2
        mass = mp.quad(lambda w, half=half: mp.gammainc(half, 0, half * w, regularized=True), mp.linspace(0, root, 5))
        bound = c / (2 * mp.sqrt(2 * mp.pi)) * mass
        value = divergence_slack(GaussianConvexLaw(k), sigma)
        # Rounding included it is an upper bound.
        assert bound <= value <= bound * (1 + mpf(10) ** -8)


def _mixed(k: int, first: float, second: float, exact: float) -> Nodes:
    """Z for w = exact + first X_1 + second X_2 as nodes: a two-dimensional quadrature rule for the two chi-squares."""
    parts = []
    for weight in (first, second):
        # Trapezoidal rule in the square root of the quantile's normal score: smooth at both ends for every k.
        score = np.linspace(-8.5, 8.5, 241)
        x = np.where(score < 0, stats.chi2.ppf(stats.norm.cdf(score), k), stats.chi2.isf(stats.norm.sf(score), k)) / k
        parts.append((weight * x, stats.norm.pdf(score) * (score[1] - score[0])))
        if second == 0:
            return Nodes(1 / np.sqrt(exact + parts[0][0]), parts[0][1])
    w = exact + parts[0][0][:, None] + parts[1][0][None, :]
    return Nodes(1 / np.sqrt(w.ravel()), np.outer(parts[0][1], parts[1][1]).ravel())


SPECTRA = [(0.5, 0.5, 0.0), (0.8, 0.2, 0.0), (0.95, 0.05, 0.0), (0.7, 0.0, 0.3), (0.9, 0.0, 0.1), (0.6, 0.2, 0.2)]


@pytest.mark.parametrize(("k", "published"), [(1, 7.8e-3), (4, 3.4e-3), (8, None)])
def test_spectra_exceed_rank_one_at_the_edge_and_stay_within_the_slack(k: int, published: float | None) -> None:
    """At sigma = 12^(-1/2), where w = 1 is the end of the convex region, the slack is really needed."""
    sigma, orders = CONVEX_MIN_NOISE_MULTIPLIER, np.linspace(-1.0, 4.0, 26)
    rank_one = gaussian_hockey_stick(orders[:, None], (nodes := _mixed(k, 1.0, 0.0, 0.0)).z / sigma) @ nodes.mass
    worst = -math.inf
    for spectrum in [*SPECTRA, *((1 - exact, 0.0, exact) for exact in (0.2, 0.4, 0.5, 0.7, 0.99))]:
        nodes = _mixed(k, *spectrum)
        assert nodes.mass.sum() == pytest.approx(1.0, abs=1e-12)
        assert nodes.mass @ nodes.z**-2 == pytest.approx(1.0, rel=1e-9)
        curve = gaussian_hockey_stick(orders[:, None], nodes.z / sigma) @ nodes.mass
        worst = max(worst, float(np.max(curve - rank_one)))
    assert 0 < worst <= divergence_slack(GaussianConvexLaw(k), sigma)
    if published is not None:
        assert 0.9 * published < worst < 1.1 * published


@pytest.mark.parametrize("sigma", [0.5, 0.7, 1.0, 2.0])
@pytest.mark.parametrize("k", [1, 4, 8, 32])
def test_no_spectrum_exceeds_rank_one_from_sigma_one_half_on(k: int, sigma: float) -> None:
    orders = np.linspace(-4.0, 8.0, 25)
    rank_one = gaussian_hockey_stick(orders[:, None], (nodes := _mixed(k, 1.0, 0.0, 0.0)).z / sigma) @ nodes.mass
    for spectrum in SPECTRA[:2] + SPECTRA[3:]:
        nodes = _mixed(k, *spectrum)
        curve = gaussian_hockey_stick(orders[:, None], nodes.z / sigma) @ nodes.mass
        assert np.all(curve <= rank_one + 1e-11), (spectrum, sigma)
