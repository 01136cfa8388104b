"""Composed epsilon: against dp_accounting, closed forms, simulation, and itself where that says something."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
from scipy import optimize, stats

from dprc_lightning.accounting import Accountant, EpsilonBounds, StepEvent, epsilon, epsilon_schedule
from dprc_lightning.accounting.accountant import upper_bounds
from dprc_lightning.accounting.grid import COARSE, FINE, Resolution
from dprc_lightning.accounting.law import ExactLaw, FloatArray, GaussianConvexLaw, Order, SensitivityLaw
from dprc_lightning.accounting.lower_bound import lower_and_estimate
from dprc_lightning.accounting.privacy_loss import Step, UpperBound
from dprc_lightning.errors import AccountingResourceError, InvalidArgumentError


@pytest.mark.parametrize(
    ("sigma", "steps", "delta"), [(1.0, 1, 1e-5), (5.0, 40, 1e-6), (0.5, 2, 1e-3), (30.0, 7, 1e-5)]
)
def test_full_batches_agree_with_the_closed_form(sigma: float, steps: int, delta: float) -> None:
    """At q = 1 the composition of Gaussians is the Gaussian with mu = sqrt(T) / sigma."""
    mu = math.sqrt(steps) / sigma

    def excess(e: float) -> float:
        return stats.norm.cdf(mu / 2 - e / mu) - math.exp(e + stats.norm.logcdf(-mu / 2 - e / mu)) - delta

    exact = optimize.brentq(excess, 0, 100)
    bounds = epsilon(noise_multiplier=sigma, delta=delta, sample_rate=1.0, steps=steps)
    assert bounds.lower <= exact <= bounds.upper
    assert bounds.upper - bounds.lower < 2e-3 * exact


@pytest.mark.parametrize(
    ("sigma", "q", "steps", "delta", "k", "bound", "reference"),
    [
        (4.35, 0.05224, 208, 1e-5, 32, "envelope", 0.7001),
        (4.2143, 0.05224, 208, 1e-5, 32, "convex", 0.6999),
        (1.2, 0.01, 1000, 1e-6, 32, "envelope", 1.9527),
        (1.2, 0.01, 1000, 1e-6, 32, "convex", 1.9178),
        (2.0, 0.05, 5000, 1e-5, 128, "convex", 9.4995),
    ],
)
def test_randomized_clipping_agrees_with_another_implementation(
    sigma: float, q: float, steps: int, delta: float, k: int, bound: str, reference: float
) -> None:
    bounds = epsilon(noise_multiplier=sigma, delta=delta, sample_rate=q, steps=steps, sketch_dim=k, bound=bound)
    assert bounds.upper == pytest.approx(reference, rel=3e-3)
    assert bounds.upper <= reference * (1 + 1e-4)
    assert bounds.lower <= bounds.estimate <= bounds.upper


@pytest.mark.parametrize("resolution", [FINE, COARSE])
@pytest.mark.parametrize(
    ("sigma", "q", "steps", "delta", "law"),
    [
        (0.6, 1e-6, 10_000_000, 1e-6, ExactLaw()),
        (0.6, 1e-6, 1_000_000, 1e-6, GaussianConvexLaw(32)),
        (1.0, 1e-5, 100_000_000, 1e-5, ExactLaw()),
        (1.0, 0.01, 1000, 1e-5, GaussianConvexLaw(32)),
        (0.5, 0.05, 100, 1e-4, GaussianConvexLaw(100)),
        (30.0, 0.5, 100, 1e-5, GaussianConvexLaw(2)),
    ],
)
def test_the_two_bounds_never_cross_even_on_hopelessly_coarse_grids(
    sigma: float, q: float, steps: int, delta: float, law: SensitivityLaw, resolution: Resolution
) -> None:
    """Computed apart, without the clamp that orders the reported numbers."""
    history = [Step(law, sigma, q, steps)]
    bound = UpperBound(history, delta, resolution)
    lower, _ = lower_and_estimate(history, delta, resolution)
    assert 0 <= lower <= bound.fast_epsilon(bound.composers())


@pytest.mark.parametrize("direction", ["remove", "add"])
@pytest.mark.parametrize(("sigma", "q", "steps", "k", "delta"), [(0.8, 0.3, 3, 6, 5e-3), (1.0, 0.1, 12, 16, 5e-3)])
def test_bounds_hold_in_a_simulation(sigma: float, q: float, steps: int, k: int, delta: float, direction: str) -> None:
    """The worst record's composed loss, simulated: its divergence at the bounds lies on the right side of delta."""
    generator, n = np.random.default_rng(11), 300_000
    loss = np.zeros(n)
    for _ in range(steps):
        mu = np.sqrt(k / generator.chisquare(k, n)) / sigma
        y = generator.standard_normal(n)
        if direction == "remove":
            y += mu * (generator.random(n) < q)
        loss += np.log1p(q * np.expm1(mu * y - mu**2 / 2)) * (1 if direction == "remove" else -1)

    def divergence(e: float) -> tuple[float, float]:
        sample = np.maximum(-np.expm1(e - loss), 0.0)
        return float(sample.mean()), float(sample.std() / math.sqrt(n))

    bounds = epsilon(noise_multiplier=sigma, delta=delta, sample_rate=q, steps=steps, sketch_dim=k, bound="convex")
    mean, error = divergence(bounds.upper)
    assert mean <= delta + 4 * error
    if direction == "remove":  # the worse one, so the lower bound is about it
        mean, error = divergence(bounds.lower)
        assert mean >= delta - 4 * error
        # And the bracket is not vacuous: a tenth less epsilon is refuted by the same simulation.
        mean, error = divergence(0.9 * bounds.upper)
        assert mean > delta + 4 * error


def test_a_large_sketch_converges_to_exact_clipping() -> None:
    setting: dict[str, Any] = dict(noise_multiplier=1.1, delta=1e-5, sample_rate=0.02, steps=300)
    exact = epsilon(**setting)
    gaps = []
    for k in (100, 1000, 10_000, 1_000_000):
        convex = epsilon(**setting, sketch_dim=k, bound="convex")
        envelope = epsilon(**setting, sketch_dim=k, bound="envelope")
        assert exact.upper * (1 - 1e-6) <= convex.upper <= envelope.upper
        gaps.append(envelope.upper / exact.upper - 1)
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[-1] < 2e-3


def test_epsilon_is_monotone_in_every_argument() -> None:
    base: dict[str, Any] = dict(noise_multiplier=1.0, sample_rate=0.02, sketch_dim=32, steps=200, delta=1e-5)

    def upper(name: str, value: float) -> float:
        setting = {**base, name: value}
        steps, delta = setting.pop("steps"), setting.pop("delta")
        return min(b.epsilon() for b in upper_bounds([(StepEvent(**setting), steps)], delta, FINE))

    for name, values in {
        "noise_multiplier": (2.0, 1.3, 1.0, 0.7),
        "delta": (1e-3, 1e-5, 1e-7),
        "sample_rate": (0.005, 0.02, 0.1),
        "steps": (1, 50, 200, 1000),
        "sketch_dim": (256, 64, 32, 24),
    }.items():
        result = [upper(name, value) for value in values]
        assert result == sorted(result), name
        assert len(set(result)) == len(result), name


def test_best_is_the_smaller_of_the_two_and_the_envelope_below_the_proved_range() -> None:
    setting: dict[str, Any] = dict(delta=1e-5, sample_rate=0.02, steps=50, sketch_dim=64)
    both = [epsilon(noise_multiplier=1.0, bound=bound, **setting).upper for bound in ("convex", "envelope")]
    assert epsilon(noise_multiplier=1.0, **setting).upper == pytest.approx(min(both), rel=1e-9)
    small = epsilon(noise_multiplier=0.28, **setting).upper
    assert small == epsilon(noise_multiplier=0.28, bound="envelope", **setting).upper
    with pytest.raises(InvalidArgumentError, match="noise_multiplier"):
        epsilon(noise_multiplier=0.28, bound="convex", **setting)


def test_best_drops_the_convex_order_where_its_slack_is_large() -> None:
    """At k = 4 the slack over all steps is far above delta / 1000: the forced convex bound pays it, best does not."""
    event = StepEvent(0.6, 0.01, 4)
    (only,) = upper_bounds([(event, 10)], 1e-3, COARSE)
    assert only.slack == 0.0
    (forced,) = upper_bounds([(StepEvent(0.6, 0.01, 4, bound="convex"), 10)], 1e-3, COARSE)
    assert forced.slack > 1e-6


def test_no_steps_cost_nothing_and_getters_change_nothing() -> None:
    event = StepEvent(1.0, 0.1)
    assert epsilon(noise_multiplier=1.0, delta=1e-5, sample_rate=0.1, steps=0) == EpsilonBounds(0.0, 0.0, 0.0)
    accountant = Accountant().compose(event, 0)
    assert accountant.epsilon(1e-5) == (0.0, 0.0, 0.0)
    accountant.compose(event, 3)
    before = accountant.history
    first = accountant.epsilon(1e-5)
    assert accountant.epsilon(1e-5) == first
    assert accountant.history == before == ((event, 3),)
    assert accountant.steps == 3


def test_equal_steps_may_be_recorded_in_any_portions() -> None:
    event = StepEvent(1.0, 0.05, 32)
    one, many = Accountant().compose(event, 60), Accountant([(event, 10), (event, 20)])
    for _ in range(30):
        many.compose(StepEvent(1.0, 0.05, 32))
    assert one.epsilon(1e-5) == many.epsilon(1e-5)


def test_different_steps_compose() -> None:
    """Steps that differ by nothing that matters cost what equal ones do; others lie between the two extremes."""
    a, b = StepEvent(1.0, 0.05, 32), StepEvent(1.0 + 1e-12, 0.05, 32)
    same = Accountant([(a, 100)]).epsilon(1e-5)
    split = Accountant([(a, 60), (b, 40)]).epsilon(1e-5)
    assert split.upper == pytest.approx(same.upper, rel=1e-4)
    assert split.lower == pytest.approx(same.lower, rel=1e-3)
    events = [StepEvent(1.0, 0.05, 32), StepEvent(1.4, 0.02, None), StepEvent(0.9, 0.1, 64)]
    mixed = [
        Accountant([(e, 30) for e in order]).epsilon(1e-5)
        for order in itertools.islice(itertools.permutations(events), 3)
    ]
    assert max(m.upper for m in mixed) == pytest.approx(min(m.upper for m in mixed), rel=1e-6)
    cheap, dear = (Accountant([(e, 90)]).epsilon(1e-5).upper for e in (events[1], events[2]))
    assert cheap < mixed[0].lower <= mixed[0].upper < dear


def test_heterogeneous_full_batches_agree_with_the_closed_form() -> None:
    """At q = 1: mu^2 adds up."""
    parts, delta = [(2.0, 3), (4.0, 10), (1.5, 1)], 1e-5
    mu = math.sqrt(sum(count / sigma**2 for sigma, count in parts))

    def excess(e: float) -> float:
        return stats.norm.cdf(mu / 2 - e / mu) - math.exp(e + stats.norm.logcdf(-mu / 2 - e / mu)) - delta

    exact = optimize.brentq(excess, 0, 100)
    bounds = Accountant([(StepEvent(sigma, 1.0), count) for sigma, count in parts]).epsilon(delta)
    assert bounds.lower <= exact <= bounds.upper
    assert bounds.upper - bounds.lower < 3e-3 * exact


@pytest.mark.parametrize("event", [StepEvent(4.2, 0.05224, 32), StepEvent(0.7, 0.01), StepEvent(0.9, 0.02, 16)])
def test_schedule_agrees_with_single_computations(event: StepEvent) -> None:
    counts = [208, 0, 1, 10, 100, 207]
    schedule = epsilon_schedule(event, counts, 1e-5)
    assert schedule[1] == 0.0
    for count, value in zip(counts, schedule, strict=True):
        bounds = Accountant([(event, count)]).epsilon(1e-5)
        assert bounds.lower <= value
        # Built for the largest count, hence a little pessimistic for a single step.
        assert value == pytest.approx(bounds.upper, rel=1e-3)
    assert schedule[0] == pytest.approx(Accountant([(event, 208)]).epsilon(1e-5).upper, rel=1e-5)


def test_schedule_is_monotone_and_cheap() -> None:
    import time

    epsilon_schedule(StepEvent(4.2, 0.05224, 32), [208], 1e-5)
    start = time.perf_counter()
    one = epsilon_schedule(StepEvent(4.2, 0.05224, 32), [208], 1e-5)
    single = time.perf_counter() - start
    start = time.perf_counter()
    schedule = epsilon_schedule(StepEvent(4.2, 0.05224, 32), range(209), 1e-5)
    every = time.perf_counter() - start
    assert schedule == sorted(schedule)
    assert schedule[-1] == pytest.approx(one[0], rel=1e-9)
    assert every < 209 * single / 2


def test_norm_slack_is_less_noise() -> None:
    loose = Accountant([(StepEvent(1.0, 0.05, 32, norm_slack=0.02), 50)]).epsilon(1e-5)
    tight = Accountant([(StepEvent(0.98, 0.05, 32), 50)]).epsilon(1e-5)
    plain = Accountant([(StepEvent(1.0, 0.05, 32), 50)]).epsilon(1e-5)
    assert loose.upper == tight.upper > plain.upper
    assert loose.lower == plain.lower


def test_hutchpp_has_the_upper_bound_of_the_sketch_and_the_lower_bound_of_exact_norms() -> None:
    plain = Accountant([(StepEvent(1.0, 0.05, 16), 50)]).epsilon(1e-5)
    better = Accountant([(StepEvent(1.0, 0.05, 16, estimator="hutchpp"), 50)]).epsilon(1e-5)
    exact = Accountant([(StepEvent(1.0, 0.05), 50)]).epsilon(1e-5)
    assert better.upper == plain.upper
    assert better.lower == exact.lower < plain.lower


def test_a_law_of_ones_own() -> None:
    """A two-valued Z written from outside costs the average of what its two values cost, in one step."""

    class TwoValued(SensitivityLaw):
        order = Order.STOCHASTIC
        certified = True
        atoms = (0.25, 1.0)

        def cdf(self, w: object) -> FloatArray:
            w = np.asarray(w, dtype=np.float64)
            return np.where(w >= 1, 1.0, np.where(w >= 0.25, 0.1, 0.0))

    event = StepEvent(1.0, 1.0, law=TwoValued())
    bounds = Accountant([(event, 1)]).epsilon(1e-3)
    assert bounds.lower == 0.0  # nobody said that a record attains it

    def divergence(e: float, mu: float) -> float:
        return stats.norm.cdf(mu / 2 - e / mu) - math.exp(e) * stats.norm.cdf(-mu / 2 - e / mu)

    exact = optimize.brentq(lambda e: 0.9 * divergence(e, 1.0) + 0.1 * divergence(e, 2.0) - 1e-3, 0, 50)
    assert exact <= bounds.upper < 1.001 * exact
    with pytest.raises(InvalidArgumentError, match="law"):
        event.to_dict()


def test_a_projection_that_can_miss_a_record_costs_q_times_its_mass() -> None:
    class Holed(SensitivityLaw):
        atoms = (1.0,)

        def cdf(self, w: object) -> FloatArray:
            return np.where(np.asarray(w) >= 1, 1.0, 1e-4)

    history = [(StepEvent(1.0, 0.1, law=Holed()), 10)]
    assert Accountant(history).epsilon(0.9e-4).upper == math.inf
    assert Accountant(history).epsilon(2e-4).upper < 10


def test_a_grid_that_no_coarsening_helps_is_refused() -> None:
    from dataclasses import replace

    from dprc_lightning.accounting.composition import Composer, LossPMF

    pmf = LossPMF(np.array([-5, 0, 5]), np.array([0.3, 0.4, 0.3]))
    with pytest.raises(AccountingResourceError, match="grid"):
        Composer([(pmf, 10**9)], 0.1, max_points=1000).compose()
    tiny = replace(FINE, max_total_points=1)
    with pytest.raises(AccountingResourceError, match="noise_multiplier"):
        UpperBound([Step(ExactLaw(), 1.0, 0.5, 10)], 1e-5, tiny)


def test_a_very_small_sketch_has_no_finite_upper_bound_rather_than_a_wrong_one() -> None:
    bounds = epsilon(noise_multiplier=1.0, delta=1e-5, sample_rate=0.01, steps=100, sketch_dim=1)
    assert bounds.upper == math.inf
    assert 10 < bounds.lower <= bounds.estimate < math.inf
