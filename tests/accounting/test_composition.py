"""This package's composition and its reading of epsilon, against brute force and against dp_accounting."""

import math
from functools import cache

import mpmath
import numpy as np
import pytest
from dp_accounting.pld import pld_pmf

from dprc_lightning.accounting.composition import Composer, LossPMF, divergence, epsilon_for_delta, round_off, window
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
    composer = Composer([(a, 3), (b, 2)], H)
    composed = composer.compose()
    result, allowance = composed.pmf, composed.error(0.0)
    expected = np.ones(1)
    for part in (a, a, a, b, b):
        expected = np.convolve(expected, _dense(part))
    inside = result.index + 5000
    np.testing.assert_allclose(result.mass, expected[inside], atol=1e-13)
    assert expected.sum() - expected[inside].sum() <= 1e-12
    assert result.infinity == pytest.approx(1 - (1 - 1e-3) ** 3)
    assert np.abs(result.mass - expected[inside]).max() < allowance < 1e-11
    fewer = composer.compose([1, 2]).pmf
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


# ------------------------------------------------------------------------------------------------- tilted compositions

STEPS = 64


def _integers(seed: int) -> tuple[LossPMF, np.ndarray]:
    """A distribution whose masses are integers over their sum, so that Python composes it without any rounding."""
    generator = np.random.default_rng(seed)
    weights = (generator.integers(1, 1000, 16) ** 2).astype(object)
    weights[12:] = 1  # large losses are rare
    return LossPMF(np.arange(-7, 9), np.array([int(v) / int(weights.sum()) for v in weights])), weights


@cache
def _exact(seed: int) -> tuple[list[mpmath.mpf], list[mpmath.mpf]]:
    """Losses and probabilities of 64 steps, in 60 digits."""
    mpmath.mp.dps = 60
    _, weights = _integers(seed)
    total = np.array([1], dtype=object)
    for _ in range(STEPS):
        total = np.convolve(total, weights)
    whole = int(weights.sum()) ** STEPS
    return [(i - 7 * STEPS) * mpmath.mpf(H) for i in range(total.size)], [mpmath.mpf(int(v)) / whole for v in total]


def _exact_divergence(seed: int, order: float) -> mpmath.mpf:
    return mpmath.fsum((1 - mpmath.exp(order - x)) * m for x, m in zip(*_exact(seed), strict=True) if x > order)


@pytest.mark.parametrize("delta", [1e-6, 1e-9, 1e-13, 1e-20, 1e-40])
@pytest.mark.parametrize("seed", [1, 2])
def test_tilted_composition_is_right_at_every_delta_and_its_error_is_covered(seed: int, delta: float) -> None:
    pmf, _ = _integers(seed)
    composed = Composer([(pmf, STEPS)], H).compose(delta=delta)
    upper, lower = composed.upper_epsilon(delta), composed.lower_epsilon(delta, 0.0)
    assert _exact_divergence(seed, upper) <= delta <= _exact_divergence(seed, lower)
    assert lower <= upper <= lower + 1e-4 * (1 + upper)
    # From epsilon on, the divergence is wrong by no more than is charged for; and the charge is next to nothing.
    for order in (upper, upper + 0.05, upper + 0.2):
        exact = _exact_divergence(seed, order)
        wrong = abs(mpmath.mpf(divergence(composed.pmf, H, order)) - exact)
        assert wrong <= composed.error(order) + composed.drift * exact
    assert composed.error(upper) < 1e-3 * delta


@pytest.mark.parametrize("seed", [1, 2])
def test_without_a_tilt_the_same_charge_holds_and_a_small_delta_drowns_in_it(seed: int) -> None:
    pmf, _ = _integers(seed)
    composed = Composer([(pmf, STEPS)], H).compose()
    for order in (-0.3, 0.0, 0.3, 1.0):
        wrong = abs(mpmath.mpf(divergence(composed.pmf, H, order)) - _exact_divergence(seed, order))
        assert wrong <= composed.error(order) + composed.drift
    # What is left is that no loss is above the largest.
    assert composed.upper_epsilon(1e-16) == pytest.approx(composed.top, rel=1e-12)


def test_a_tilted_schedule_uses_transforms_again() -> None:
    """Any order of the counts gives the same bounds, those of composers made for each."""
    pmf, _ = _integers(1)
    composer = Composer([(pmf, STEPS)], H)
    for count in (3, 64, 2, 30, 31, 1, 63):
        fresh = Composer([(pmf, count)], H).compose(delta=1e-12).upper_epsilon(1e-12)
        assert composer.compose([count], 1e-12).upper_epsilon(1e-12) == pytest.approx(fresh, rel=1e-5)


@pytest.mark.parametrize(("steps", "points"), [(1000, 1 << 16), (100_000, 1 << 20)])
def test_round_off_covers_what_dp_accountings_transform_does(steps: int, points: int) -> None:
    """Against the tilted composition, whose errors are relative to delta."""
    bound = UpperBound([Step(ExactLaw(), 2.0, 0.01, steps)], 1e-9, FINE)
    pmf = bound.composed()[0]
    norm = float(np.linalg.norm(bound.composers()[0].parts[0][0].mass))
    for delta in (1e-3, 1e-6, 1e-9, 1e-11):
        tilted = bound.composers()[0].compose(delta=delta)
        order = tilted.upper_epsilon(delta)
        assert (
            abs(pmf.get_delta_for_epsilon(order) - delta) <= round_off(steps + 2, points, norm) + 1e-4 * delta + 1e-15
        )
