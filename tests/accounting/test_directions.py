"""Epsilon of removing and of adding a record: against numerical integration and dp_accounting's own distributions."""

import math

import numpy as np
import pytest
from scipy import integrate, optimize, stats

from dprc_lightning.accounting import Accountant, StepEvent
from dprc_lightning.accounting.accountant import upper_bounds
from dprc_lightning.accounting.grid import FINE
from dprc_lightning.errors import InvalidArgumentError


def one_step(sigma: float, q: float, delta: float, direction: str) -> float:
    """Epsilon of one exact step by integration of (p - exp(e) r)_+ over the real line."""
    x = np.linspace(-12 * sigma, 1 + 12 * sigma, 200_001)
    without = stats.norm.pdf(x, 0, sigma)
    record = (1 - q) * without + q * stats.norm.pdf(x, 1, sigma)
    first, second = (record, without) if direction == "remove" else (without, record)

    def divergence(e: float) -> float:
        return float(integrate.trapezoid(np.maximum(first - math.exp(e) * second, 0.0), x))

    return optimize.brentq(lambda e: divergence(e) - delta, 0, 20, xtol=1e-6)


@pytest.mark.parametrize(("sigma", "q", "delta"), [(1.0, 0.2, 1e-3), (0.7, 0.5, 1e-4)])
def test_one_step_agrees_with_numerical_integration(sigma: float, q: float, delta: float) -> None:
    directions = Accountant([(StepEvent(sigma, q), 1)]).directions(delta)
    for name, value in directions.items():
        exact = one_step(sigma, q, delta, name)
        assert exact - 1e-6 <= value < exact * 1.002, name
    assert directions["remove"] > 1.2 * directions["add"]


@pytest.mark.parametrize(("sigma", "q", "steps", "delta"), [(1.0, 0.05, 200, 1e-5), (0.8, 0.5, 10, 1e-4)])
def test_composition_agrees_with_dp_accountings_own_subsampled_gaussian(
    sigma: float, q: float, steps: int, delta: float
) -> None:
    from dp_accounting.pld import privacy_loss_distribution

    composed = privacy_loss_distribution.from_gaussian_mechanism(
        sigma, sampling_prob=q, value_discretization_interval=1e-4, use_connect_dots=True
    ).self_compose(steps)
    theirs = {
        "remove": composed._pmf_remove.get_epsilon_for_delta(delta),
        "add": composed._pmf_add.get_epsilon_for_delta(delta),
    }
    assert Accountant([(StepEvent(sigma, q), steps)]).directions(delta) == pytest.approx(theirs, rel=3e-4)


def test_full_batches_cost_the_same_in_both_directions() -> None:
    directions = Accountant([(StepEvent(3.0, 1.0, 32), 5)]).directions(1e-5)
    assert directions["remove"] == pytest.approx(directions["add"], rel=1e-3)


@pytest.mark.parametrize(
    ("history", "candidates"),
    [
        ([(StepEvent(2.0, 0.05), 13), (StepEvent(3.0, 0.1), 20)], 1),
        ([(StepEvent(2.0, 0.05, 32), 13), (StepEvent(3.0, 0.1), 20)], 2),
        ([(StepEvent(1.5, 0.3, 12), 3)], 2),  # the convex order and the envelope
    ],
)
def test_their_maximum_is_the_upper_bound(
    history: list[tuple[StepEvent, int]], candidates: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The second candidate comes with so much slack only that the computation takes long.
    monkeypatch.setattr("dprc_lightning.accounting.accountant._NEGLIGIBLE_SLACK", 0.0)
    bounds = [bound.directions() for bound in upper_bounds(history, 1e-3, FINE)]
    accountant = Accountant(history)
    directions = accountant.directions(1e-3)
    assert list(directions) == ["remove", "add"] and len(bounds) == candidates
    assert tuple(directions.values()) == min(bounds, key=max)
    assert max(directions.values()) == accountant.upper(1e-3) == accountant.epsilon(1e-3).upper


def test_a_loss_that_cannot_be_bounded_is_infinite_in_its_direction_alone() -> None:
    """With one column the tail of Z alone exceeds delta; adding a record at q < 1 loses at most -log(1 - q) a step."""
    directions = Accountant([(StepEvent(1.0, 0.01, 1), 100)]).directions(1e-5)
    assert directions["remove"] == math.inf
    assert 0 < directions["add"] <= -100 * math.log1p(-0.01) + 1e-3


def test_no_steps_cost_nothing_and_delta_is_checked() -> None:
    assert Accountant().directions(1e-5) == {"remove": 0.0, "add": 0.0}
    assert Accountant().upper(1e-5) == 0.0
    for ask in (Accountant().directions, Accountant().upper):
        with pytest.raises(InvalidArgumentError, match="delta"):
            ask(0.0)
