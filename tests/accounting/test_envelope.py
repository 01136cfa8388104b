"""The envelope of all spectra: published crossovers, scipy, and random spectra that must stay below."""

import math

import numpy as np
import pytest
from scipy import integrate, stats

from dprc_lightning.accounting import envelope_cdf
from dprc_lightning.accounting.envelope import _two_weights, crossover
from dprc_lightning.errors import InvalidArgumentError

CROSSOVERS = {
    2: (1.9998, 1.4999, 1.1250, 1.0312),
    3: (1.6993, 1.3505, 1.0878, 1.0220),
    8: (1.3551, 1.1798, 1.0453, 1.0113),
    32: (1.1591, 1.0813, 1.0206, 1.0052),
}


def test_dimension_free_envelope_is_chi_square_below_one() -> None:
    t = np.array([-1.0, 0.0, 0.2, 0.999, 1.0, 1.5, math.inf])
    result = envelope_cdf(t, 32)
    np.testing.assert_allclose(result[2:4], stats.chi2.cdf(32 * t[2:4], 32), rtol=1e-10)
    np.testing.assert_array_equal(result[[0, 1, 4, 5, 6]], [0, 0, 1, 1, 1])
    assert isinstance(envelope_cdf(0.5, 32), float)
    assert envelope_cdf(0.5, 1) == pytest.approx(stats.chi2.cdf(0.5, 1))
    assert envelope_cdf(np.full((2, 3), 0.5), 4).shape == (2, 3)


@pytest.mark.parametrize("d", sorted(CROSSOVERS))
def test_published_crossovers(d: int) -> None:
    for k, published in zip((1, 2, 8, 32), CROSSOVERS[d], strict=True):
        assert crossover(k, d) == pytest.approx(published, abs=2.5e-4)
        # Below 1 + 2 / (dk) equal weights are not even a local maximum.
        assert crossover(k, d) >= 1 + 2 / (d * k)


@pytest.mark.parametrize(("k", "d"), [(1, 2), (2, 3), (8, 4)])
def test_two_weights_agree_with_simulation(k: int, d: int) -> None:
    generator, n = np.random.default_rng(5), 1_000_000
    x = generator.chisquare(k, n) / k
    rest = generator.chisquare((d - 1) * k, n) / k
    for a in (1 / d, 0.5, 0.9):
        for t in (0.4, 1.1, 1.5):
            probability = _two_weights(t, a, k, d)
            error = math.sqrt(probability * (1 - probability) / n)
            assert abs(np.mean(a * x + (1 - a) / (d - 1) * rest <= t) - probability) < 4.5 * error


@pytest.mark.parametrize(("k", "d"), [(1, 2), (1, 40), (8, 3), (32, 2048)])
@pytest.mark.parametrize("t", [0.5, 0.97, 1.05, 1.7])
def test_equal_weights_are_one_chi_square(k: int, d: int, t: float) -> None:
    """The quadrature at a = 1/d, whose answer is known; it knows nothing of that case."""
    assert _two_weights(t, 1 / d, k, d) == pytest.approx(stats.chi2.cdf(d * k * t, d * k), rel=1e-9, abs=1e-11)


@pytest.mark.parametrize(("k", "d"), [(1, 3), (2, 4), (8, 6)])
def test_no_spectrum_beats_the_envelope(k: int, d: int) -> None:
    generator, n = np.random.default_rng(9), 200_000
    x = generator.chisquare(k, (n, d)) / k
    t = np.array([0.3, 0.8, 1.02, 1.1, 1.3, 1.8, 2.5])
    limit = envelope_cdf(t, k, d)
    error = np.sqrt(limit * (1 - limit) / n)
    spectra = [*np.eye(d)[:1], np.full(d, 1 / d), *generator.dirichlet(np.full(d, 0.3), 12)]
    for spectrum in spectra:
        w = x @ spectrum
        assert np.all((w[:, None] <= t).mean(0) <= limit + 4.5 * error)
    # Attained at both ends: the single weight below one, equal weights beyond the crossover.
    np.testing.assert_allclose(limit[:2], stats.chi2.cdf(k * t[:2], k), rtol=1e-10)
    beyond = t >= crossover(k, d)
    np.testing.assert_allclose(limit[beyond], stats.chi2.cdf(d * k * t[beyond], d * k), rtol=1e-10)


def test_finite_dimension_lies_below_the_limit_and_grows_into_it() -> None:
    t = np.array([0.5, 0.9, 1.001, 1.01, 1.2])
    few, many, free = envelope_cdf(t, 8, 4), envelope_cdf(t, 8, 512), envelope_cdf(t, 8)
    assert np.all(few <= many + 1e-10)
    assert np.all(many <= free)
    assert np.all(np.diff(envelope_cdf(np.linspace(0.2, 2.2, 41), 2, 5)) >= -1e-10)
    assert envelope_cdf(1.3, 4, 1) == pytest.approx(stats.chi2.cdf(4 * 1.3, 4))


@pytest.mark.parametrize(
    ("k", "d", "t", "a"), [(2, 2, 1.25, 0.82), (1, 2, 1.53, 0.83), (1, 6, 1.295, 0.62), (8, 3, 1.043, 0.74)]
)
def test_between_one_and_the_crossover_neither_end_is_the_worst(k: int, d: int, t: float, a: float) -> None:
    """The old claim was that for every t a single eigenvalue or equal ones attain the supremum."""
    single, equal = stats.chi2.cdf(k * t, k), stats.chi2.cdf(d * k * t, d * k)
    # Quadrature of scipy's own: the distribution function of the equal ones over the density of the large one.
    b = (1 - a) / (d - 1)
    mixed = integrate.quad(
        # In the square root of the large one: smooth for one degree of freedom too.
        lambda root: stats.chi.pdf(root, k) * stats.chi2.cdf((k * t - a * root**2) / b, (d - 1) * k),
        0,
        math.sqrt(k * t / a),
        epsabs=1e-11,
    )[0]
    margin = mixed - max(single, equal)
    assert margin > 4e-3
    generator, n = np.random.default_rng(11), 2_000_000
    w = a * generator.chisquare(k, n) / k + b * generator.chisquare((d - 1) * k, n) / k
    error = math.sqrt(mixed * (1 - mixed) / n)
    assert np.mean(w <= t) - max(single, equal) > margin - 4.5 * error > 2e-3
    assert envelope_cdf(t, k, d) >= mixed - 1e-10
    # Strictly between the two ends, and better than either of them by a margin.
    assert 1 / d < a < 1 and 1 < t < crossover(k, d)


def test_the_counter_example_with_a_pencil() -> None:
    """k = 2 has exponentials: every number is elementary."""
    a, b, t = 0.8, 0.2, 1.25
    mixed = 1 - (a * math.exp(-t / a) - b * math.exp(-t / b)) / (a - b)
    assert 1 - math.exp(-t) == pytest.approx(0.7135, abs=5e-5)
    assert 1 - math.exp(-2 * t) * (1 + 2 * t) == pytest.approx(0.7127, abs=5e-5)
    assert mixed == pytest.approx(0.7212, abs=5e-5)
    assert _two_weights(t, a, 2, 2) == pytest.approx(mixed, abs=1e-12)


@pytest.mark.parametrize("k", [2, 4])
def test_random_search_over_the_simplex_by_exact_probabilities(k: int) -> None:
    """For even k the sum's law is a mixture of Gammas; by partial fractions for k = 2, by convolution else."""
    generator = np.random.default_rng(21)
    t = np.array([0.2, 0.6, 0.95, 1.0, 1.05, 1.15, 1.3, 1.6])
    for d in (2, 3, 4, 6):
        limit = envelope_cdf(t, k, d)
        free = envelope_cdf(t, k)
        for concentration in (0.2, 1.0, 5.0):
            for spectrum in generator.dirichlet(np.full(d, concentration), 12):
                probability = _by_transform(t, spectrum, k)
                assert np.all(probability <= limit + 2e-9), (spectrum, t[probability > limit])
        # With a share of exact layers too, below one, where the limit on the dimension does not matter.
        for exact in (0.05, 0.3, 0.7):
            spectrum = (1 - exact) * generator.dirichlet(np.full(d, 0.5))
            inside = (t > exact) & (t < 1)
            assert np.all(_by_transform(t[inside] - exact, spectrum, k) <= free[inside] + 2e-9)


def _by_transform(t: np.ndarray, weights: np.ndarray, k: int) -> np.ndarray:
    """P(sum_i w_i chi2_k / k <= t) by inverting its Laplace transform along Talbot's contour; no density is needed."""
    # The contour of Weideman and Trefethen (2007), its upper half: the other half is its conjugate.
    points = 40
    angle = (np.arange(points) + 0.5) * math.pi / points
    shape = angle * (0.5017 / np.tan(0.6407 * angle) + 0.2645j) - 0.6122
    slope = 0.5017 / np.tan(0.6407 * angle) - 0.5017 * 0.6407 * angle / np.sin(0.6407 * angle) ** 2 + 0.2645j
    s = points * shape[None, :] * 2 / t[:, None]
    log_transform = -k / 2 * np.log1p(2 / k * weights[None, None, :] * s[:, :, None]).sum(-1) - np.log(s)
    # Points come in conjugate pairs: the imaginary part is kept.
    integrand = np.exp(s * t[:, None] + log_transform) * slope * points * 2 / t[:, None]
    return np.imag(integrand).sum(1) / points


@pytest.mark.parametrize(("k", "weights"), [(1, [1.0]), (2, [0.25] * 4), (8, [0.5, 0.5]), (32, [1.0])])
def test_the_inverted_transform_knows_chi_squares(k: int, weights: list[float]) -> None:
    t = np.array([0.3, 0.9, 1.2])
    d = len(weights)
    np.testing.assert_allclose(_by_transform(t, np.array(weights), k), stats.chi2.cdf(d * k * t, d * k), atol=1e-9)


@pytest.mark.parametrize(
    ("name", "args"), [("k", (0.5, 0)), ("k", (0.5, 2.0)), ("d", (0.5, 2, 0)), ("t", (math.nan, 2))]
)
def test_bad_arguments_are_refused_by_name(name: str, args: tuple) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        envelope_cdf(*args)
    assert caught.value.name == name
