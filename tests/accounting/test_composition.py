"""This package's composition and its reading of epsilon, against brute force and against dp_accounting."""

import math

import numpy as np
import pytest
from dp_accounting.pld import pld_pmf

from dprc_lightning.accounting.composition import Composer, LossPMF, epsilon_for_delta, window
from dprc_lightning.accounting.grid import FINE, orders_between
from dprc_lightning.accounting.law import ExactLaw, GaussianConvexLaw, GaussianEnvelopeLaw, SensitivityLaw
from dprc_lightning.accounting.privacy_loss import Step, UpperBound, connect_dots

H = 0.01


def _random(seed: int, size: int, infinity: float = 0.0) -> LossPMF:
    generator = np.random.default_rng(seed)
    mass = generator.random(size)
    return LossPMF(np.sort(generator.choice(np.arange(-40, 60), size, replace=False)), mass / mass.sum(), infinity)


def _dense(pmf: LossPMF) -> np.ndarray:
    out = np.zeros(2001)
    out[pmf.index + 1000] = pmf.mass
    return out


def test_composition_is_convolution() -> None:
    a, b = _random(1, 9, 1e-3), _random(2, 7)
    composer = Composer([(a, 3), (b, 2)], H, 1e-12)
    result, allowance = composer.compose()
    expected = np.ones(1)
    for part in (a, a, a, b, b):
        expected = np.convolve(expected, _dense(part))
    inside = result.index + 5000
    np.testing.assert_allclose(result.mass, expected[inside], atol=1e-13)
    assert expected.sum() - expected[inside].sum() <= 1e-12
    assert result.infinity == pytest.approx(1 - (1 - 1e-3) ** 3)
    assert 1e-12 <= allowance < 1e-11
    fewer, _ = composer.compose([1, 2])
    single = np.convolve(np.convolve(_dense(a), _dense(b)), _dense(b))
    np.testing.assert_allclose(fewer.mass, single[fewer.index + 3000], atol=1e-13)


def test_window_keeps_all_but_the_tail() -> None:
    pmf = LossPMF(np.array([-1, 1]), np.array([0.5, 0.5]))
    low, high = window([(pmf, 10_000)], H, 1e-9)
    from scipy import stats

    outside = stats.binom.cdf((low - 1 + 10_000) / 2, 10_000, 0.5) + stats.binom.sf((high + 10_000) / 2, 10_000, 0.5)
    assert outside <= 1e-9
    assert high - low < 20 * 100  # a few standard deviations, not the whole range


@pytest.mark.parametrize("delta", [0.3, 0.05, 1e-3, 1e-6])
@pytest.mark.parametrize("seed", [3, 4, 5])
def test_epsilon_inverts_the_divergence(seed: int, delta: float) -> None:
    pmf = _random(seed, 12, 1e-7)

    def divergence(e: float) -> float:
        loss = pmf.index * H
        return pmf.infinity + float(np.sum(np.maximum(-np.expm1(e - loss), 0.0) * pmf.mass))

    result = epsilon_for_delta(pmf, H, delta)
    if result > 0:
        assert divergence(result) == pytest.approx(delta, rel=1e-9)
    else:
        assert divergence(0.0) <= delta
    theirs = pld_pmf.create_pmf(dict(zip(pmf.index.tolist(), pmf.mass, strict=True)), H, pmf.infinity, True)
    assert result == pytest.approx(theirs.get_epsilon_for_delta(delta), abs=1e-9)


def test_epsilon_with_a_floor_and_without_a_solution() -> None:
    pmf = LossPMF(np.array([-30, -20]), np.array([0.5, 0.5]), 1e-3)
    assert epsilon_for_delta(pmf, H, 0.1) == 0.0
    negative = epsilon_for_delta(pmf, H, 0.03, floor=-1.0)
    assert -0.3 < negative < -0.2
    assert 1e-3 + 0.5 * -math.expm1(negative + 0.2) == pytest.approx(0.03)
    assert epsilon_for_delta(pmf, H, 1e-4) == math.inf


def test_connected_dots_are_those_of_dp_accounting_and_lie_above_the_curve() -> None:
    index = np.array([-30, -11, -4, 0, 3, 10, 44])
    curve = np.maximum(0.0, 0.7 - 0.5 * np.exp(index * H)) ** 2 + 0.01
    ours = connect_dots(index, curve, H)
    theirs = pld_pmf.create_pmf_pessimistic_connect_dots(H, index, curve)
    assert ours.mass.sum() + ours.infinity == pytest.approx(1.0)
    for i, value in zip(index, curve, strict=True):
        assert theirs.get_delta_for_epsilon(float(i * H)) == pytest.approx(value, rel=1e-9)
        ours_at = ours.infinity + float(np.sum(np.maximum(-np.expm1((i - ours.index) * H), 0.0) * ours.mass))
        assert ours_at == pytest.approx(value, rel=1e-9)


@pytest.mark.parametrize(
    ("law", "sigma", "q", "steps"),
    [(ExactLaw(), 1.0, 0.01, 1000), (GaussianConvexLaw(32), 2.0, 0.1, 100), (GaussianEnvelopeLaw(64), 0.8, 0.02, 300)],
)
def test_the_two_compositions_agree(law: SensitivityLaw, sigma: float, q: float, steps: int) -> None:
    bound = UpperBound([Step(law, sigma, q, steps)], 1e-5, FINE)
    assert bound.fast_epsilon(bound.composers()) == pytest.approx(bound.epsilon(), rel=1e-5)


@pytest.mark.parametrize(("bottom", "top"), [(-0.01, 3.0), (-5.0, 0.02), (-0.004, 0.003), (-1.0, 1.0)])
def test_grid_covers_its_range_with_relative_spacing(bottom: float, top: float) -> None:
    points = orders_between(bottom, top, 1e-3, 100)
    assert points[0] * 1e-3 <= bottom + 1e-12
    assert points[-1] * 1e-3 >= top - 1e-12
    gaps = np.diff(points)
    assert np.all(gaps >= 1)
    assert np.all(gaps <= 1 + np.abs(points).astype(float)[:-1] / 50 + np.abs(points).astype(float)[1:] / 50)


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("extra", [0.0, 1.4e-17])
def test_a_delta_equal_to_the_infinite_mass_is_not_read_too_small(seed: int, extra: float) -> None:
    """Only losses above the largest one are left to delta then: any smaller epsilon fails by the whole finite mass."""
    infinity = 10.0 ** -(1 + seed % 8)
    pmf = _random(seed, 20, infinity)
    pmf = LossPMF(pmf.index, pmf.mass * (1.0 - infinity), infinity)
    assert epsilon_for_delta(pmf, H, infinity + extra) >= pmf.index.max() * H - 1e-9
