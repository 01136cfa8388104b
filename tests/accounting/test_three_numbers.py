"""Lower bound, estimate and upper bound against quadrature, simulation, the limit of a large sketch, and each other."""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from scipy import optimize, stats

from dprc_lightning.accounting import StepEvent, epsilon
from dprc_lightning.accounting.accountant import upper_bounds
from dprc_lightning.accounting.divergence import Divergences
from dprc_lightning.accounting.grid import FINE
from dprc_lightning.accounting.law import FloatArray

ORDERS = np.array([-2.0, -0.5, -0.05, -1e-3, 0.0, 1e-3, 0.05, 0.5, 2.0, 5.0])


# ---------------------------------------------------------------------------------------------------- one step, exactly


def _gaussian(e: float, mu: FloatArray, q: float, direction: str) -> FloatArray:
    """The subsampled Gaussian's divergence, written with scipy's distributions."""
    if direction == "remove":
        if math.exp(e) <= 1 - q:
            return np.full_like(mu, 1 - math.exp(e))
        a, scale = math.log1p(math.expm1(e) / q), q
    else:
        scale = 1 - math.exp(e) * (1 - q)
        if scale <= 0:
            return np.zeros_like(mu)
        a = e + math.log(q / scale)
    return scale * (stats.norm.cdf(mu / 2 - a / mu) - np.exp(a + stats.norm.logcdf(-mu / 2 - a / mu)))


def _exact(e: float, sigma: float, q: float, k: int | None, direction: str) -> float:
    """The average over Z by the trapezoidal rule in log w, over the density of w = chi2_k / k."""
    if k is None:
        return float(_gaussian(e, np.array([1 / sigma]), q, direction)[0])
    log_w = np.linspace(math.log(stats.chi2.ppf(1e-18, k) / k), math.log(stats.chi2.isf(1e-18, k) / k), 10_001)
    w = np.exp(log_w)
    return float(np.trapezoid(stats.chi2.pdf(k * w, k) * k * w * _gaussian(e, w**-0.5 / sigma, q, direction), log_w))


ONE_STEP = [(1.0, 0.01, None), (1.0, 0.01, 32), (0.6, 0.3, 32), (4.0, 0.1, 8), (2.0, 1.0, 16), (0.8, 1e-3, 128)]
ONE_STEP += [(0.5, 0.05, 64), (30.0, 0.5, 4)]


@pytest.mark.parametrize(("sigma", "q", "k"), ONE_STEP)
def test_epsilon_of_one_step_brackets_the_exact_one(sigma: float, q: float, k: int | None) -> None:
    for delta in (1e-3 * q, 1e-5 * q):
        curve = lambda e, delta=delta: max(_exact(e, sigma, q, k, d) for d in ("remove", "add")) - delta  # noqa: E731
        exact = optimize.brentq(curve, 0.0, 100.0, rtol=1e-9)
        bounds = epsilon(noise_multiplier=sigma, sample_rate=q, steps=1, delta=delta, sketch_dim=k)
        assert bounds.lower <= exact * (1 + 1e-9) and exact <= bounds.upper * (1 + 1e-9)
        assert bounds.upper - bounds.lower < 0.01 * exact


@pytest.mark.parametrize(("sigma", "q", "k"), ONE_STEP[:-1])
def test_delta_of_one_step_lies_above_the_exact_one_at_every_order(sigma: float, q: float, k: int | None) -> None:
    """Both directions, negative orders too, through the distributions that are composed."""
    event = StepEvent(sigma, q, k, bound="convex")
    (bound,) = upper_bounds([(event, 1)], 1e-6 * q, FINE)
    for direction, found in zip(("remove", "add"), Divergences([bound]).at(ORDERS), strict=True):
        exact = np.array([_exact(float(e), sigma, q, k, direction) for e in ORDERS])
        assert np.all(found >= exact * (1 - 1e-9) - 1e-15), direction
        np.testing.assert_allclose(found, exact, rtol=0.01, atol=1e-5 * q)


# ------------------------------------------------------------------------------------------- five steps, by simulation


@cache
def _losses(sigma: float, q: float, k: int, direction: str, steps: int = 5, n: int = 1_000_000) -> tuple[Any, Any]:
    """Composed losses of the worst record and their weights.

    Importance sampling: the record is drawn more often than it should, its norm is sometimes estimated too small, and
    half of the runs have more shift than they should; the other half keeps the weights bounded.
    """
    generator = np.random.default_rng(5)
    loss, weight, often, small = np.zeros(n), np.zeros(n), max(q, 0.4), 0.4
    shifts = (1.0, 1.5) if direction == "remove" else (0.0, -0.5)
    drawn = [np.zeros(n) for _ in shifts]
    shift = np.where(generator.random(n) < 0.5, *shifts)
    for _ in range(steps):
        w = generator.chisquare(k, n) / k * np.where(generator.random(n) < 0.25, small, 1.0)
        weight -= np.log(
            0.75 + 0.25 * np.exp(stats.chi2.logpdf(k * w / small, k) - stats.chi2.logpdf(k * w, k)) / small
        )
        mu = w**-0.5 / sigma
        y = generator.standard_normal(n) + np.where(generator.random(n) < often, shift * mu, 0.0)
        for total, s in zip(drawn, shifts, strict=True):
            total += np.log1p(often * np.expm1(s * mu * y - (s * mu) ** 2 / 2))
        likelihood = np.log1p(q * np.expm1(mu * y - mu**2 / 2))
        weight += likelihood if direction == "remove" else 0.0
        loss += likelihood if direction == "remove" else -likelihood
    return loss, np.exp(weight - np.logaddexp(*drawn) + math.log(2))


def _divergence(e: float, *setting: Any) -> tuple[float, float]:
    """Returns the simulated divergence and its standard error."""
    loss, weight = _losses(*setting)
    sample = np.maximum(-np.expm1(e - loss), 0.0) * weight
    return float(sample.mean()), float(sample.std() / math.sqrt(sample.size))


@pytest.mark.parametrize(
    ("sigma", "q", "k", "delta"), [(1.0, 0.05, 8, 1e-4), (0.8, 0.3, 32, 1e-5), (2.0, 1.0, 16, 1e-5)]
)
def test_five_steps_agree_with_simulation(sigma: float, q: float, k: int, delta: float) -> None:
    bounds = epsilon(noise_multiplier=sigma, sample_rate=q, steps=5, delta=delta, sketch_dim=k, bound="convex")
    for direction in ("remove", "add"):
        found, error = _divergence(bounds.upper, sigma, q, k, direction)
        assert found <= delta + 4.5 * error, direction
    found, error = _divergence(bounds.lower, sigma, q, k, "remove")
    assert found >= delta - 4.5 * error
    # The simulation can tell: five percent more, or less, is refuted.
    assert error < 0.06 * delta
    found, error = _divergence(0.95 * bounds.upper, sigma, q, k, "remove")
    assert found > delta + 3 * error
    found, error = _divergence(1.05 * bounds.lower, sigma, q, k, "remove")
    assert found < delta - 3 * error


# --------------------------------------------------------------------------------------------- sketches without an end


@pytest.mark.parametrize(("sigma", "q", "steps", "delta"), [(1.1, 0.02, 300, 1e-5), (0.8, 0.2, 20, 1e-6)])
def test_a_sketch_of_a_million_columns_is_dp_accountings_exact_gaussian(
    sigma: float, q: float, steps: int, delta: float
) -> None:
    theirs = (
        privacy_loss_distribution
        .from_gaussian_mechanism(sigma, sampling_prob=q, value_discretization_interval=1e-4, use_connect_dots=True)
        .self_compose(steps)
        .get_epsilon_for_delta(delta)
    )
    bounds = epsilon(noise_multiplier=sigma, sample_rate=q, steps=steps, delta=delta, sketch_dim=1_000_000)
    assert bounds.upper == pytest.approx(theirs, rel=2e-4)
    assert bounds.lower <= theirs <= bounds.upper * (1 + 2e-4)


# ------------------------------------------------------------------------------------------------------- their distance

GAPS = [
    (0.6, 1e-4, 20_000, 1e-5, 32),
    (0.6, 0.5, 10, 1e-5, 32),
    (0.6, 0.01, 300, 1e-8, 64),
    (0.7, 1e-3, 5000, 1e-6, None),
    (1.0, 1e-4, 100_000, 1e-10, 32),
    (1.0, 0.01, 1000, 1e-10, 32),
    (1.3, 1.0, 5, 1e-5, 32),
    (2.0, 1e-3, 1_000_000, 1e-8, 512),
    (2.0, 0.1, 1000, 1e-3, 128),
    (5.0, 0.5, 2000, 1e-6, 48),
    (20.0, 1e-2, 100_000, 1e-5, 32),
    (100.0, 1.0, 1000, 1e-8, 256),
    (1.0, 0.05, 3000, 1e-6, 32),
    (1.0, 0.001, 20_000, 1e-6, 64),
    (0.8, 0.02, 300, 1e-6, 256),
    (8.0, 0.2, 2000, 1e-8, 48),
]


@pytest.mark.parametrize(("sigma", "q", "steps", "delta", "k"), GAPS)
def test_the_gap_is_below_one_percent(sigma: float, q: float, steps: int, delta: float, k: int | None) -> None:
    bounds = epsilon(noise_multiplier=sigma, sample_rate=q, steps=steps, delta=delta, sketch_dim=k)
    assert bounds.lower <= bounds.estimate <= bounds.upper
    assert bounds.upper - bounds.lower < 0.01 * bounds.upper


def test_where_nothing_attains_the_law_the_gap_is_what_the_sketch_costs() -> None:
    """Hutch++: the upper bound is the sketch's, the lower one that of exact norms."""
    from dprc_lightning.accounting import Accountant

    history: Callable[..., list[tuple[StepEvent, int]]] = lambda **more: [(StepEvent(1.0, 0.05, **more), 50)]  # noqa: E731
    better = Accountant(history(sketch_dim=16, estimator="hutchpp")).epsilon(1e-5)
    assert better.upper == Accountant(history(sketch_dim=16)).epsilon(1e-5).upper
    assert better.lower == Accountant(history()).epsilon(1e-5).lower
