"""The trade-off function against closed forms, direct Neyman-Pearson tests and simulated ones; and delta(epsilon)."""

import math
import time
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import optimize, special, stats

from dprc_lightning.accounting import Accountant, StepEvent, tradeoff_function
from dprc_lightning.accounting.tradeoff import _highest_lines
from dprc_lightning.errors import DPRCError, InvalidArgumentError

LEVELS = np.array([0.0, 1e-4, 0.01, 0.05, 0.2, 0.5, 0.9, 0.999, 1.0])
Array = NDArray[np.float64]


def curve(alpha: Any, direction: str | None = None, steps: int = 1, **event: Any) -> Any:
    return Accountant([(StepEvent(**event), steps)]).tradeoff_function(alpha, direction)


def gaussian(alpha: Array, mu: float) -> Array:
    return np.asarray(stats.norm.cdf(stats.norm.isf(alpha) - mu))


@pytest.mark.parametrize(("sigma", "steps"), [(1.0, 1), (3.0, 4), (20.0, 100), (0.5, 1)])
@pytest.mark.parametrize("direction", ["remove", "add", None])
def test_full_batches_give_the_gaussian_trade_off_from_below(sigma: float, steps: int, direction: str | None) -> None:
    exact = gaussian(LEVELS, math.sqrt(steps) / sigma)
    found = curve(LEVELS, direction, steps, noise_multiplier=sigma, sample_rate=1.0)
    assert (found <= exact).all()
    np.testing.assert_allclose(found, exact, atol=1e-4)


def test_a_revealed_scale_gives_the_trade_off_averaged_at_one_threshold() -> None:
    """q = 1, k = 8: the best test compares the likelihood ratio, given Z, with one threshold for all Z."""
    sigma, k = 2.0, 8
    # The trapezoidal rule in log w, w = 1 / Z^2, converges faster than any power for this density.
    log_w = np.linspace(-12.0, 4.0, 2001)
    mu = np.exp(-log_w / 2) / sigma
    weight = k * np.exp(log_w) * stats.chi2.pdf(k * np.exp(log_w), k) * (log_w[1] - log_w[0])
    assert weight.sum() == pytest.approx(1.0, abs=1e-12)

    def rate(log_threshold: float, sign: float) -> float:
        return float(weight @ special.ndtr(sign * log_threshold / mu - mu / 2))

    levels = np.array([0.01, 0.05, 0.2, 0.5, 0.8])
    direct = []
    for level in levels:
        threshold = optimize.brentq(lambda t, level=level: rate(t, -1.0) - level, -30, 30)
        direct.append(rate(threshold, 1.0))
    for direction in ("remove", "add", None):
        found = curve(levels, direction, noise_multiplier=sigma, sample_rate=1.0, sketch_dim=k, bound="convex")
        assert (found <= direct).all()
        np.testing.assert_allclose(found, direct, atol=1e-3)


def subsampled(sigma: float, q: float, level: float, null_present: bool) -> float:
    """Smallest false-negative rate for one subsampled Gaussian step: the likelihood ratio rises with the output."""

    def tails(y: float) -> tuple[float, float]:
        absent, drawn = stats.norm.sf(y / sigma), stats.norm.sf((y - 1) / sigma)
        return float(absent), float((1 - q) * absent + q * drawn)

    if null_present:
        y = optimize.brentq(lambda y: 1 - tails(y)[1] - level, -50, 50)
        return tails(y)[0]
    y = optimize.brentq(lambda y: tails(y)[0] - level, -50, 50)
    return 1 - tails(y)[1]


@pytest.mark.parametrize(("sigma", "q"), [(1.0, 0.1), (0.6, 0.5), (2.0, 0.9)])
def test_a_subsampled_step_is_as_good_as_its_best_test(sigma: float, q: float) -> None:
    levels = np.array([1e-3, 0.01, 0.05, 0.2, 0.5, 0.8, 0.95])
    for direction, null_present in (("remove", False), ("add", True)):
        direct = np.array([subsampled(sigma, q, float(level), null_present) for level in levels])
        found = curve(levels, direction, noise_multiplier=sigma, sample_rate=q)
        assert (found <= direct + 1e-12).all()
        np.testing.assert_allclose(found, direct, atol=1e-4)
    both = curve(levels, None, noise_multiplier=sigma, sample_rate=q)
    for direction in ("remove", "add"):
        assert (both <= curve(levels, direction, noise_multiplier=sigma, sample_rate=q) + 1e-9).all()


def test_without_a_direction_it_is_the_convex_hull_of_the_smaller_and_its_own_inverse() -> None:
    event: dict[str, Any] = {"noise_multiplier": 0.6, "sample_rate": 0.3}
    alpha = np.linspace(0, 1, 4001)
    smaller = np.minimum(curve(alpha, "remove", **event), curve(alpha, "add", **event))
    # The convex hull by brute force: the lowest chord above each point.
    both = curve(alpha, None, **event)
    points = np.arange(0, alpha.size, 100)
    hull = []
    for i in points[1:-1]:
        left, right = points[points <= i][:, None], points[points >= i][None, :]
        share = np.where(right > left, (i - left) / np.maximum(right - left, 1), 0.0)
        hull.append(((1 - share) * smaller[left] + share * smaller[right]).min())
    np.testing.assert_allclose(both[points[1:-1]], hull, atol=2e-4)
    inner = (both > 1e-3) & (alpha > 1e-3)
    np.testing.assert_allclose(curve(both[inner], None, **event), alpha[inner], atol=1e-4)


def test_five_steps_agree_with_the_simulated_best_test() -> None:
    """Rank-one records meet Z = sqrt(k / chi2_k): the sum of log-likelihood ratios given Z is the best statistic."""
    sigma, q, k, steps, draws = 1.5, 0.3, 16, 5, 400_000
    rng = np.random.default_rng(5)

    def scores(present: bool) -> Array:
        total = np.zeros(draws)
        for _ in range(steps):
            mu = np.sqrt(k / rng.chisquare(k, draws)) / sigma
            y = rng.standard_normal(draws) + (mu * (rng.random(draws) < q) if present else 0.0)
            total += np.log(1 - q + q * np.exp(mu * y - mu * mu / 2))
        return total

    absent, present = np.sort(scores(False)), np.sort(scores(True))
    levels = np.array([0.01, 0.05, 0.2, 0.5, 0.8])
    event: dict[str, Any] = {"noise_multiplier": sigma, "sample_rate": q, "sketch_dim": k}
    for direction, null, other, sign in (("remove", absent, present, 1.0), ("add", present, absent, -1.0)):
        threshold = np.quantile(null, 1 - levels if sign > 0 else levels)
        below = np.searchsorted(other, threshold) / draws
        simulated = below if sign > 0 else 1 - below
        found = curve(levels, direction, steps, **event)
        # Four standard deviations of each of the two rates; a threshold's error moves the rate by the curve's slope.
        slope = np.abs(np.gradient(found, levels))
        error = 4 * np.sqrt((0.25 + slope**2 * levels * (1 - levels)) / draws)
        assert (found <= simulated + error).all()
        assert (found >= simulated - error - 2e-3).all()


@pytest.mark.parametrize("direction", ["remove", "add", None])
@pytest.mark.parametrize(
    "event",
    [
        {"noise_multiplier": 1.2, "sample_rate": 0.01, "sketch_dim": 32, "steps": 1000},
        {"noise_multiplier": 1.5, "sample_rate": 1.0, "sketch_dim": 64, "steps": 3},
        {"noise_multiplier": 50.0, "sample_rate": 0.001, "steps": 10},
    ],
)
def test_it_is_convex_and_nonincreasing(direction: str | None, event: dict[str, Any]) -> None:
    alpha = np.linspace(0, 1, 1001)
    started = time.perf_counter()
    f = curve(alpha, direction, **event)
    assert time.perf_counter() - started < 10  # a tenth of it on an idle core
    assert ((f >= 0) & (f <= 1 - alpha)).all()
    assert (np.diff(f) <= 0).all()
    assert (np.diff(f, 2) >= -1e-12).all()
    # Any (epsilon, delta) of the same history is one line below it.
    accountant = Accountant([(StepEvent(**{k: v for k, v in event.items() if k != "steps"}), event["steps"])])
    bounds = accountant.directions(1e-3)
    epsilon = max(bounds.values()) if direction is None else bounds[direction]
    assert (f >= 1 - 1e-3 - math.exp(epsilon) * alpha - 1e-5).all()


def test_scalars_and_shapes_are_kept() -> None:
    event: dict[str, Any] = {"noise_multiplier": 1.0, "sample_rate": 0.1, "steps": 10}
    assert isinstance(curve(0.05, **event), float)
    assert curve([[0.1, 0.2, 0.3]], **event).shape == (1, 3)
    assert curve(np.zeros((0,)), **event).shape == (0,)
    assert curve(0.05, **event) == pytest.approx(curve([0.05, 0.2], **event)[0], abs=1e-6)
    assert tradeoff_function(0.05, **event) == curve(0.05, **event)
    np.testing.assert_array_equal(Accountant().tradeoff_function([0.25, 1.0]), [0.75, 0.0])


@pytest.mark.parametrize("alpha", [-0.1, 1.1, math.nan, [0.5, math.inf], "often", [[0.1], [0.1, 0.2]]])
def test_levels_outside_zero_to_one_are_refused_by_name(alpha: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="^alpha="):
        curve(alpha, noise_multiplier=1.0, sample_rate=0.1)
    with pytest.raises(InvalidArgumentError, match="^alpha="):
        Accountant().tradeoff_function(alpha)


def test_an_unknown_direction_is_refused_by_name() -> None:
    with pytest.raises(InvalidArgumentError, match="^direction='up'"):
        curve(0.1, "up", noise_multiplier=1.0, sample_rate=0.1)


def test_the_highest_lines_are_those_of_brute_force() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        slope = np.sort(np.exp(rng.normal(0, 3, 40)))
        intercept = rng.random(40)
        kept_slope, kept_intercept = _highest_lines(slope, intercept)
        alpha = np.concatenate([[0.0], np.exp(rng.normal(-1, 3, 200))])
        everyone = (intercept - slope * alpha[:, None]).max(axis=1)
        kept = (kept_intercept - kept_slope * alpha[:, None]).max(axis=1)
        np.testing.assert_array_equal(kept, everyone)
        crossings = np.diff(kept_intercept) / np.diff(kept_slope)
        assert (np.diff(crossings) < 0).all()


@pytest.mark.parametrize(
    ("sigma", "q", "k", "steps"), [(1.2, 0.01, 32, 300), (4.2, 0.05, 32, 208), (1.0, 1.0, None, 1)]
)
def test_delta_is_consistent_with_epsilon(sigma: float, q: float, k: int | None, steps: int) -> None:
    accountant = Accountant([(StepEvent(sigma, q, k), steps)])
    for delta in (1e-2, 1e-8):
        bounds = accountant.epsilon(delta)
        assert accountant.delta(bounds.upper) <= delta * (1 + 2e-3)
        assert accountant.delta(bounds.lower) >= delta * (1 - 2e-3)


@pytest.mark.parametrize("mu", [0.05, 1.0, 3.0])
def test_delta_of_full_batches_is_the_closed_form_from_above_at_every_order(mu: float) -> None:
    accountant = Accountant([(StepEvent(4 / mu, 1.0), 16)])
    orders = mu * np.linspace(-8, 8, 33) + np.array([-mu, 0.0, mu])[:, None] ** 2 / 2
    exact = stats.norm.cdf(mu / 2 - orders / mu) - np.exp(orders) * stats.norm.cdf(-mu / 2 - orders / mu)
    found = accountant.delta(orders)
    assert found.shape == orders.shape
    assert (found >= exact * (1 - 1e-9)).all()
    np.testing.assert_allclose(found, exact, rtol=2e-2, atol=1e-9)
    one = float(orders[0, -4])
    assert accountant.delta(one) == pytest.approx(exact[0, -4], rel=2e-2)
    assert accountant.delta(one) >= exact[0, -4]


def test_delta_at_its_edges() -> None:
    accountant = Accountant([(StepEvent(1.0, 0.01, 32), 100)])
    assert isinstance(accountant.delta(1.0), float)
    assert accountant.delta(math.inf) < 1e-10
    assert accountant.delta(-math.inf) == 1.0
    values = accountant.delta([0.0, 0.5, 1.0])
    assert (np.diff(values) < 0).all()
    assert Accountant().delta(0.3) == 0.0
    assert Accountant().delta(-1.0) == pytest.approx(1 - math.exp(-1))
    for wrong in (math.nan, "much", [0.1, math.nan]):
        with pytest.raises(DPRCError, match="^epsilon="):
            accountant.delta(wrong)
