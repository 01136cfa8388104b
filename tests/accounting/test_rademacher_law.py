"""The law of a Rademacher sketch against enumerated signs, drawn sketches and the published noise multipliers."""

import itertools
import math

import numpy as np
import pytest
from scipy import integrate, stats

from dprc_lightning.accounting import Accountant, StepEvent, calibrate_noise_multiplier, epsilon
from dprc_lightning.accounting.accountant import upper_bounds
from dprc_lightning.accounting.grid import FINE
from dprc_lightning.accounting.rademacher import (
    RademacherLaw,
    SignPairLaw,
    cosine_moment,
    integrated_cdf_bound,
    laplace_bound,
)
from dprc_lightning.errors import DPRCError, InvalidArgumentError

Q = 64 / 1225
EDGES = np.concatenate([[1e-9], np.geomspace(1e-5, 1e3, 20_000)])


def _directions() -> list[np.ndarray]:
    """Unit vectors: equal and unequal pairs, one large coordinate beside small ones, and whatever was drawn."""
    generator = np.random.default_rng(5)
    drawn = [generator.standard_normal(d) ** power for d in (2, 3, 5, 9) for power in (1, 3)]
    large = [np.append(math.sqrt(m), np.full(d, math.sqrt((1 - m) / d))) for m in (0.5, 0.6, 0.9) for d in (1, 2, 8)]
    equal = [np.ones(d) for d in (1, 2, 3, 4, 7, 12)]
    return [u / np.linalg.norm(u) for u in (*drawn, *large, *equal)]


def _squares(u: np.ndarray) -> np.ndarray:
    """(r . u)^2 for every vector of signs r, shape [2^d]."""
    return (np.array(list(itertools.product((-1.0, 1.0), repeat=u.size))) @ u) ** 2


def test_laplace_bound_covers_enumerated_signs() -> None:
    h, bound = laplace_bound()
    for u in _directions():
        exact = np.mean(np.exp(-np.outer(h, _squares(u))), axis=1)
        assert np.all(exact <= bound * (1 + 1e-12))
    # Many equal coordinates, of which none is large: the limit is Gaussian.
    count = np.arange(2001)
    many = np.exp(-np.outer(h, (2 * count - 2000) ** 2 / 2000)) @ stats.binom.pmf(count, 2000, 0.5)
    assert np.all(many <= bound)


def test_laplace_bound_is_at_least_the_sharper_one_of_hoelder_and_not_far_above() -> None:
    """Another proof for a coordinate of square m >= 1/2: exponents 1 / u_i^2 >= 1 for all of them."""
    h, bound = laplace_bound()
    attained = np.maximum((1 + 2 * h) ** -0.5, (1 + np.exp(-2 * h)) / 2)
    assert np.all(bound >= attained)
    assert np.all(bound <= attained * 1.06)
    sharper = h < 0.4
    assert np.all(cosine_moment(np.linspace(1.0, 2.0, 101), h[sharper]).max(axis=0) <= attained[sharper])


@pytest.mark.parametrize(("a", "h"), [(2.0, 0.5), (1.0, 0.003), (3.3, 1.0), (50.0, 0.3), (400.0, 0.001), (7.0, 20.0)])
def test_cosine_moment_is_the_integral(a: float, h: float) -> None:
    g = np.linspace(-10, 10, 400_001)
    values = stats.norm.pdf(g) * np.abs(np.cos(math.sqrt(2 * h / a) * g)) ** a
    computed = float(cosine_moment(np.array([a]), np.array([h]))[0, 0])
    # The series for a = 1 ends like the sum of 1/n^2, alternating.
    assert computed == pytest.approx(integrate.trapezoid(values, g), rel=1e-6 if a == 1.0 else 1e-9)


def _integrated(atoms: np.ndarray, mass: np.ndarray, t: np.ndarray) -> np.ndarray:
    return np.maximum(t[:, None] - atoms[None, :], 0.0) @ mass


def _law_atoms(k: int) -> tuple[np.ndarray, np.ndarray]:
    """The law by its bins, whose means are exact where a bin holds one atom; mass at zero included."""
    mass, mean = RademacherLaw(k).bins(EDGES)
    assert mean is not None
    return np.append(0.0, mean), np.append(RademacherLaw(k).mass_at_infinity, mass)


@pytest.mark.parametrize("k", [2, 8, 32, 100])
@pytest.mark.parametrize("d", [2, 3, 4, 8])
def test_integrated_cdf_covers_equal_coordinates_exactly(k: int, d: int) -> None:
    """(r . u)^2 d is the square of a sum of d signs: the law of k such squares by exact convolution."""
    column = np.zeros(d * d + 1)
    np.add.at(column, (2 * np.arange(d + 1) - d) ** 2, stats.binom.pmf(np.arange(d + 1), d, 0.5))
    mass = np.ones(1)
    for _ in range(k):
        mass = np.convolve(mass, column)
    atoms = np.arange(mass.size) / (d * k)
    t = np.concatenate([np.geomspace(1e-4, 1, 60), np.linspace(1.05, 3, 20)])
    expected = _integrated(atoms, mass, t)
    assert np.all(expected <= _integrated(*_law_atoms(k), t) * (1 + 1e-9) + 1e-12)
    assert np.all(expected <= integrated_cdf_bound(t, k) * (1 + 1e-9) + 1e-14)


@pytest.mark.parametrize("k", [8, 32])
def test_integrated_cdf_covers_drawn_sketches(k: int) -> None:
    generator, n = np.random.default_rng(k), 40_000
    t = np.array([0.2, 0.4, 0.6, 0.8, 0.95, 1.0, 1.1, 1.5])
    limit = _integrated(*_law_atoms(k), t)
    for u in _directions():
        squares = _squares(u)
        drawn = squares[generator.integers(squares.size, size=(n, k))].mean(axis=1)
        sample = np.maximum(t[:, None] - drawn, 0.0)
        assert np.all(sample.mean(axis=1) <= limit + 4.5 * sample.std(axis=1) / math.sqrt(n))


@pytest.mark.parametrize("k", [1, 16, 32, 256])
def test_law_is_a_law(k: int) -> None:
    law = RademacherLaw(k)
    cdf = law.cdf(EDGES)
    assert np.all(np.diff(cdf) >= 0)
    assert cdf[-1] == 1.0
    assert 2.0**-k <= law.mass_at_infinity <= 2.0**-k * 1.001
    assert float(law.cdf(-1.0)) == 0.0
    atoms, mass = _law_atoms(k)
    np.testing.assert_allclose(np.cumsum(mass)[1:], cdf[1:], atol=1e-12)
    # Signs have mean one; a law that dominates them for falling functions has at most that.
    assert 0.99 < atoms @ mass <= 1 + 1e-9
    assert not law.certified
    assert not law.attained


@pytest.mark.parametrize("k", [1, 7, 32])
def test_pair_of_signs_is_a_real_sketch(k: int) -> None:
    law = SignPairLaw(k)
    w = np.array([0.0, 0.3, 1.0, 1.2, 2.0])
    np.testing.assert_allclose(law.cdf(w), stats.binom.cdf(np.floor(w * k / 2 + 1e-9), k, 0.5))
    signs = np.random.default_rng(k).choice((-1.0, 1.0), size=(20_000, 2, k)) / math.sqrt(k)
    drawn = (np.einsum("i,nik->nk", np.array([1.0, 1.0]) / math.sqrt(2), signs) ** 2).sum(1)
    for t in (0.0, 0.5, 0.9, 1.3):
        expected = float(law.cdf(t + 1e-9))
        assert abs(np.mean(drawn <= t + 1e-9) - expected) <= 4.5 * math.sqrt(expected / 20_000)
    mass, mean = law.bins(np.array([1e-9, 0.5, 0.99, 1.5, 2.1]))
    assert mean is not None
    assert mass.sum() == pytest.approx(1 - 2.0**-k)
    assert mass @ mean == pytest.approx(1.0)


EXACT = {0.7: (208, 4.065), 2.0: (200, 1.730), 9.0: (200, 0.7619)}
PUBLISHED = {
    (0.7, 32): 1.081,
    (0.7, 64): 1.044,
    (0.7, 128): 1.022,
    (0.7, 256): 1.011,
    (2.0, 32): 1.115,
    (2.0, 64): 1.065,
    (2.0, 128): 1.032,
    (2.0, 256): 1.015,
    (9.0, 64): 1.115,
    (9.0, 128): 1.060,
    (9.0, 256): 1.027,
}


def _upper(sigma: float, k: int, steps: int) -> float:
    history = [(StepEvent(sigma, Q, k, "rademacher"), steps)]
    return min(bound.fast_epsilon(bound.composers()) for bound in upper_bounds(history, 1e-5, FINE))


@pytest.mark.parametrize(("target", "k"), PUBLISHED)
def test_published_ratios_to_exact_clipping(target: float, k: int) -> None:
    """Within half a per cent, at noise multipliers: the target lies between the epsilons at the two ends."""
    steps, exact = EXACT[target]
    sigma = exact * PUBLISHED[target, k]
    assert _upper(sigma * 1.005, k, steps) < target < _upper(sigma * 0.995, k, steps)


def test_three_numbers_and_their_flag() -> None:
    setting = dict(delta=1e-5, sample_rate=Q, steps=200, sketch_dim=64)
    signs = epsilon(noise_multiplier=1.8415, projection="rademacher", **setting)
    assert not signs.certified
    assert not Accountant([(StepEvent(1.8, Q, 64, "rademacher"), 1)]).certified
    gauss = epsilon(noise_multiplier=1.8415, **setting)
    assert gauss.certified
    exact = epsilon(noise_multiplier=1.8415, **{**setting, "sketch_dim": None})
    # Many equal coordinates come as near to a Gaussian sketch as one likes; a pair is worse than exact norms.
    assert exact.lower < signs.lower <= signs.estimate <= signs.upper < 2.001
    assert gauss.lower < signs.upper


def test_calibration_meets_the_target() -> None:
    setting = dict(delta=1e-5, sample_rate=Q, steps=200, sketch_dim=64, projection="rademacher")
    sigma = calibrate_noise_multiplier(epsilon=2.0, **setting)
    assert sigma == pytest.approx(1.065 * 1.730, rel=0.005)
    assert 1.999 < epsilon(noise_multiplier=sigma, **setting).upper <= 2.0


def test_too_few_columns_are_refused_with_the_remedy() -> None:
    setting = dict(delta=1e-5, sample_rate=Q, steps=200, projection="rademacher")
    for k, sigma in ((32, 0.5), (16, 5.0)):
        with pytest.raises(
            InvalidArgumentError, match=f"sketch_dim={k}: .*raise sketch_dim, or .*'gaussian'"
        ) as caught:
            epsilon(noise_multiplier=sigma, sketch_dim=k, **setting)
        assert "\n" not in str(caught.value)
        assert isinstance(caught.value, DPRCError)
    # 2^-16 q T is more than delta: no noise helps.
    with pytest.raises(InvalidArgumentError, match="sketch_dim=16: .*raise sketch_dim, or"):
        calibrate_noise_multiplier(epsilon=9.0, sketch_dim=16, **setting)
    # An accountant answers with a number: its history may have other parts.
    assert Accountant([(StepEvent(0.5, Q, 32, "rademacher"), 200)]).epsilon(1e-5).upper == math.inf


@pytest.mark.parametrize("value", [0, -1, 2.5, True, None])
def test_sketch_dim_is_refused_by_name(value: object) -> None:
    for law in (RademacherLaw, SignPairLaw):
        with pytest.raises(InvalidArgumentError, match="sketch_dim"):
            law(value)
