"""Laws of the random sensitivity against scipy and against sketches that were really drawn."""

import numpy as np
import pytest
from scipy import stats

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
