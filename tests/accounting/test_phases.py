"""Runs whose noise, sampling rate or sketch changes: against closed forms and compositions made by other means."""

import math
from typing import Any

import numpy as np
import pytest
from dp_accounting.pld import privacy_loss_distribution
from scipy import optimize, stats

from dprc_lightning.accounting import Accountant, StepEvent
from dprc_lightning.accounting.grid import FINE, resolution_for
from dprc_lightning.errors import InvalidArgumentError


def gaussian_epsilon(mu: float, delta: float) -> float:
    def excess(e: float) -> float:
        return float(stats.norm.cdf(mu / 2 - e / mu) - math.exp(e + stats.norm.logcdf(-mu / 2 - e / mu))) - delta

    return float(optimize.brentq(excess, 0, 200, xtol=1e-13))


@pytest.mark.parametrize(
    "phases", [[(1.0, 1), (2.0, 3), (5.0, 10)], [(20.0, 100), (10.0, 7)], [(0.7, 1), (50.0, 400), (3.0, 2), (9.0, 1)]]
)
def test_full_batches_add_up_their_squares(phases: list[tuple[float, int]]) -> None:
    """mu^2 of a composition of Gaussians is the sum of theirs (arXiv 1905.02383, corollary 2)."""
    mu = math.sqrt(sum(count / sigma**2 for sigma, count in phases))
    accountant = Accountant([(StepEvent(sigma, 1.0), count) for sigma, count in phases])
    bounds = accountant.epsilon(1e-6)
    exact = gaussian_epsilon(mu, 1e-6)
    assert bounds.lower <= exact <= bounds.upper
    assert bounds.upper == pytest.approx(exact, rel=1e-3)
    alpha = np.array([0.01, 0.1, 0.5])
    trade_off = stats.norm.cdf(stats.norm.isf(alpha) - mu)
    found = accountant.tradeoff_function(alpha)
    assert (found <= trade_off).all()
    np.testing.assert_allclose(found, trade_off, atol=1e-3)


def test_exact_clipping_agrees_with_distributions_composed_by_hand() -> None:
    phases = [(2.0, 0.05, 100), (3.0, 0.1, 40), (8.0, 1.0, 5)]
    pieces = [
        privacy_loss_distribution.from_gaussian_mechanism(sigma, sampling_prob=q).self_compose(count)
        for sigma, q, count in phases
    ]
    theirs = pieces[0].compose(pieces[1]).compose(pieces[2]).get_epsilon_for_delta(1e-5)
    bounds = Accountant([(StepEvent(sigma, q), count) for sigma, q, count in phases]).epsilon(1e-5)
    assert bounds.upper == pytest.approx(theirs, rel=5e-4)
    assert bounds.lower <= theirs


def simulated_delta(phases: list[tuple[float, float, int, int]], epsilon: float, draws: int) -> tuple[float, float]:
    """delta(epsilon) of rank-one records for removal, and its standard error, from the loss's definition."""
    rng = np.random.default_rng(11)
    loss = np.zeros(draws)
    for sigma, q, k, count in phases:
        for _ in range(count):
            mu = np.sqrt(k / rng.chisquare(k, draws)) / sigma
            y = rng.standard_normal(draws) + mu * (rng.random(draws) < q)
            loss += np.log1p(q * np.expm1(mu * y - mu * mu / 2))
    values = -np.expm1(np.minimum(epsilon - loss, 0.0))
    return float(values.mean()), float(values.std() / math.sqrt(draws))


def test_randomized_clipping_agrees_with_simulation_when_everything_changes() -> None:
    phases = [(1.5, 0.3, 32, 2), (1.2, 0.1, 64, 2), (2.0, 0.6, 32, 1)]
    accountant = Accountant([(StepEvent(sigma, q, k), count) for sigma, q, k, count in phases])
    for delta in (3e-2, 1e-3):
        epsilon = accountant.directions(delta)["remove"]
        mean, error = simulated_delta(phases, epsilon, 500_000)
        assert abs(mean - delta) < 4 * error + 0.01 * delta


def test_order_does_not_matter() -> None:
    phases: list[tuple[StepEvent, int]] = [
        (StepEvent(2.0, 0.1, 32), 20),
        (StepEvent(3.0, 0.2, 64), 10),
        (StepEvent(2.5, 0.1), 15),
    ]
    found = [Accountant(order).upper(1e-5) for order in (phases, phases[::-1], phases[1:] + phases[:1])]
    assert max(found) - min(found) < 1e-6 * max(found)


def test_composing_one_by_one_in_turns_is_composing_in_blocks() -> None:
    a, b = StepEvent(2.0, 0.1, 32), StepEvent(3.0, 0.2, 64)
    turns = Accountant()
    for _ in range(4):
        assert turns.compose(a).compose(b, 2) is turns
    assert turns.history == ((a, 4), (b, 8))
    assert turns.steps == 12
    assert turns.upper(1e-5) == Accountant([(a, 4), (b, 8)]).upper(1e-5)
    assert turns.compose(a, 0).steps == 12


def test_a_phase_that_changes_only_its_name_changes_nothing() -> None:
    """A phase split in two by a difference too small to matter costs what it costs in one piece."""
    whole = Accountant([(StepEvent(2.0, 0.1, 32), 40)]).upper(1e-5)
    split = Accountant([(StepEvent(2.0, 0.1, 32), 25), (StepEvent(2.0 + 1e-9, 0.1, 32), 15)]).upper(1e-5)
    assert split == pytest.approx(whole, rel=1e-6)


def test_more_phases_cost_more_and_more_noise_less() -> None:
    first = (StepEvent(2.0, 0.1, 32), 20)
    alone = Accountant([first]).upper(1e-5)
    loud, quiet = (Accountant([first, (StepEvent(sigma, 0.1, 32), 20)]).upper(1e-5) for sigma in (4.0, 1.5))
    same = Accountant([(first[0], 40)]).upper(1e-5)
    assert alone < loud < same < quiet


@pytest.mark.parametrize(("event", "count", "name"), [("step", 1, "event"), (StepEvent(1.0, 0.1), -1, "count")])
def test_what_cannot_be_composed_is_refused_by_name(event: Any, count: int, name: str) -> None:
    accountant = Accountant([(StepEvent(2.0, 0.1), 1)])
    with pytest.raises(InvalidArgumentError, match=f"^{name}="):
        accountant.compose(event, count)
    assert accountant.steps == 1


def test_replace_one_is_refused_by_name() -> None:
    with pytest.raises(InvalidArgumentError, match="^neighboring_relation='replace_one'"):
        Accountant().compose(StepEvent(1.0, 0.1, neighboring_relation="replace_one"))


def test_many_kinds_of_steps_are_made_coarser_and_stay_in_order() -> None:
    """Kinds that differ in nothing that matters cost what one kind does, though each is made coarser."""
    kinds = [(StepEvent(1.0 + 1e-9 * i, 0.05, 32), 20) for i in range(6)]
    assert resolution_for(6).bins < resolution_for(4).bins == FINE.bins
    many, one = Accountant(kinds).epsilon(1e-6), Accountant([(StepEvent(1.0, 0.05, 32), 120)]).epsilon(1e-6)
    assert many.lower <= one.upper and one.lower <= many.upper
    assert one.upper <= many.upper * (1 + 1e-4) and many.upper < 1.01 * one.upper
