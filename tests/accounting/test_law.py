"""Laws of the random sensitivity against scipy and against sketches that were really drawn."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from scipy import optimize, special, stats

from dprc_lightning.accounting import envelope_cdf, epsilon
from dprc_lightning.accounting.law import ExactLaw, GaussianConvexLaw, GaussianEnvelopeLaw
from dprc_lightning.errors import InvalidArgumentError


@pytest.mark.parametrize("k", [1, 2, 8, 32, 1000])
def test_gaussian_law_is_chi_square(k: int) -> None:
    w = np.array([0.0, 0.01, 0.3, 0.9, 1.0, 1.2, 4.0])
    np.testing.assert_allclose(GaussianConvexLaw(k).cdf(w), stats.chi2.cdf(k * w, k), rtol=1e-10)
    envelope = GaussianEnvelopeLaw(k).cdf(w)
    np.testing.assert_allclose(envelope[:4], stats.chi2.cdf(k * w[:4], k), rtol=1e-10)
    assert np.all(envelope[4:] == 1.0)
    assert GaussianConvexLaw(k).mass_at_infinity == 0.0
    np.testing.assert_array_equal(ExactLaw().cdf(w), [0, 0, 0, 0, 1, 1, 1])


@pytest.mark.parametrize("k", [1, 3, 32])
def test_bins_have_the_masses_and_means_of_the_law(k: int) -> None:
    edges = np.array([1e-3, 0.2, 0.7, 0.95, 1.0, 1.5, 3.0])
    mass, mean = GaussianConvexLaw(k).bins(edges)
    assert mean is not None
    np.testing.assert_allclose(mass, np.diff(stats.chi2.cdf(k * edges, k)), rtol=1e-9)
    sample = np.random.default_rng(1).chisquare(k, 2_000_000) / k
    for i in range(len(edges) - 1):
        inside = sample[(sample > edges[i]) & (sample <= edges[i + 1])]
        if inside.size > 1000:
            assert abs(inside.mean() - mean[i]) < 5 * inside.std() / np.sqrt(inside.size)


def test_lower_tail_integral_is_the_integral() -> None:
    for k, w in [(1, 0.5), (8, 0.2), (32, 0.3)]:
        grid = np.linspace(0, w, 200_001)
        expected = np.trapezoid(stats.chi2.cdf(k * grid, k), grid)
        assert GaussianConvexLaw(k).lower_tail_integral(w) == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(("rank", "exact"), [(1, 0.0), (1, 0.4), (3, 0.0), (20, 0.0)])
def test_drawn_sketches_are_dominated(rank: int, exact: float) -> None:
    """Norm estimates of real matrices: rank one attains the convex law, all stay below the envelope for t < 1."""
    k, p, n = 8, 24, 40_000
    generator = np.random.default_rng(rank)
    gradient = generator.standard_normal((10, rank)) @ generator.standard_normal((rank, p))
    gradient *= np.sqrt(1 - exact) / np.linalg.norm(gradient)
    sketch = generator.standard_normal((n, p, k)) / np.sqrt(k)
    w = exact + np.einsum("ip,npk->nik", gradient, sketch).reshape(n, -1).__pow__(2).sum(1)
    assert abs(w.mean() - 1) < 5 * w.std() / np.sqrt(n)
    if rank == 1 and exact == 0.0:
        assert stats.kstest(w, GaussianConvexLaw(k).cdf).pvalue > 1e-4
    for t in (0.3, 0.5, 0.7, 0.9, 0.99):
        limit = float(GaussianEnvelopeLaw(k).cdf(t))
        assert np.mean(w <= t) <= limit + 4.5 * np.sqrt(limit * (1 - limit) / n)


@pytest.mark.parametrize("law", [GaussianConvexLaw, GaussianEnvelopeLaw])
@pytest.mark.parametrize("value", [0, -1, 2.5, True, None])
def test_sketch_dim_is_refused_by_name(law: type, value: object) -> None:
    with pytest.raises(InvalidArgumentError, match="sketch_dim"):
        law(value)


@pytest.mark.parametrize("r", [1, 4, 16])
def test_jacobian_vector_products_are_the_case_of_one_eigenvalue(r: int) -> None:
    """DP-SGD-JL (Bu et al., arXiv 2102.03013) estimates ||g||^2 by the mean of <g, v_j>^2 over r Gaussian vectors."""
    generator = np.random.default_rng(r)
    gradient = generator.standard_normal(7) * np.arange(1, 8)
    vectors = generator.standard_normal((20_000, r, 7))
    w = ((vectors @ gradient) ** 2).mean(axis=1) / (gradient @ gradient)
    assert stats.kstest(w, GaussianConvexLaw(r).cdf).pvalue > 1e-3
    assert stats.kstest(w, lambda t: envelope_cdf(t, r, d=1)).pvalue > 1e-3


def _exact_epsilon(divergence: Callable[[float], float], delta: float) -> float:
    return float(optimize.brentq(lambda e: divergence(e) - delta, 0.0, 200.0, xtol=1e-10))


@pytest.mark.parametrize(("r", "sigma", "q"), [(8, 1.5, 0.1), (32, 1.0, 0.02), (16, 2.0, 1.0)])
def test_jacobian_vector_products_cost_the_average_over_their_estimates(r: int, sigma: float, q: float) -> None:
    """One step: the subsampled Gaussian's divergence at sensitivity Z, averaged over Z by quadrature."""
    delta = 1e-5
    w = np.geomspace(stats.chi2.ppf(1e-14, r) / r, stats.chi2.isf(1e-14, r) / r, 40_001)
    weight = stats.chi2.pdf(r * w, r) * r * np.gradient(w)
    mu = 1 / sigma / np.sqrt(w)

    def removed(e: float) -> float:
        order = math.log1p(math.expm1(e) / q)
        gauss = special.ndtr(mu / 2 - order / mu) - np.exp(order + special.log_ndtr(-mu / 2 - order / mu))
        return float(q * weight @ gauss)

    expected = _exact_epsilon(removed, delta)
    found = epsilon(noise_multiplier=sigma, delta=delta, sample_rate=q, steps=1, sketch_dim=r)
    assert found.upper == pytest.approx(expected, rel=5e-3)
    assert found.lower <= expected * (1 + 1e-6)
    assert expected <= found.upper * (1 + 1e-6)


def test_jacobian_vector_products_compose() -> None:
    """Without sampling T steps are one Gaussian whose squared sensitivity is the sum of Z_t^2: averaged by drawing."""
    r, sigma, steps, delta, n = 32, 6.0, 20, 1e-3, 400_000
    z2 = r / np.random.default_rng(0).chisquare(r, (steps, n))
    mu = np.sqrt(z2.sum(axis=0)) / sigma

    def divergence(e: float) -> float:
        return float(np.mean(special.ndtr(mu / 2 - e / mu) - np.exp(e + special.log_ndtr(-mu / 2 - e / mu))))

    expected = _exact_epsilon(divergence, delta)
    found = epsilon(noise_multiplier=sigma, delta=delta, sample_rate=1.0, steps=steps, sketch_dim=r)
    assert found.lower * (1 - 2e-3) <= expected <= found.upper * (1 + 2e-3)
    assert found.upper == pytest.approx(expected, rel=1e-2)
