"""Inside `dp_accounting`: its accountants, ledger, calibration and other mechanisms, against our own numbers."""

import dataclasses
import subprocess
import sys
from typing import Any

import attr
import dp_accounting
import pytest
from dp_accounting.pld import privacy_loss_distribution
from dp_accounting.pld.pld_privacy_accountant import PLDAccountant

from dprc_lightning.accounting import (
    Accountant,
    RandomizedClippingAccountant,
    RandomizedClippingDpEvent,
    StepEvent,
    calibrate_noise_multiplier,
)
from dprc_lightning.accounting.law import ExactLaw
from dprc_lightning.errors import AccountingResourceError, InvalidArgumentError

Event = RandomizedClippingDpEvent
REPLACE_ONE = dp_accounting.NeighboringRelation.REPLACE_ONE


def gaussian_steps(sigma: float, q: float, count: int) -> Any:
    return privacy_loss_distribution.from_gaussian_mechanism(sigma, sampling_prob=q).self_compose(count)


@pytest.mark.parametrize(
    ("sigma", "q", "k", "steps", "delta", "bound"),
    [
        (4.215, 64 / 1225, 32, 208, 1e-5, "best"),
        (4.215, 64 / 1225, 32, 208, 1e-5, "envelope"),
        (1.2, 0.02, 64, 50, 1e-6, "best"),
        (0.8, 0.05, 64, 20, 1e-9, "best"),
        (2.0, 0.3, 16, 10, 1e-5, "convex"),
    ],
)
def test_epsilon_and_delta_agree_with_our_own_accountant(
    sigma: float, q: float, k: int, steps: int, delta: float, bound: str
) -> None:
    event = StepEvent(sigma, q, k, bound=bound)
    ours = Accountant([(event, steps)])
    theirs = RandomizedClippingAccountant().compose(Event.from_step_event(event), steps)
    bounds = ours.epsilon(delta)
    found = theirs.get_epsilon(delta)
    assert bounds.lower <= found
    assert found == pytest.approx(bounds.upper, rel=2e-3)
    assert theirs.get_delta(bounds.lower) >= delta * (1 - 1e-6)
    assert theirs.certified


@pytest.mark.parametrize(("sigma", "q", "steps", "delta"), [(1.0, 0.01, 1000, 1e-5), (0.7, 0.5, 4, 1e-8)])
def test_exact_norms_are_their_own_subsampled_gaussian(sigma: float, q: float, steps: int, delta: float) -> None:
    gaussian = dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(sigma))
    theirs = PLDAccountant().compose(gaussian, steps).get_epsilon(delta)
    ours = RandomizedClippingAccountant().compose(Event(sigma, q), steps).get_epsilon(delta)
    assert ours == pytest.approx(theirs, rel=2e-4)


def test_their_calibration_finds_our_noise_multiplier() -> None:
    setting: dict[str, Any] = {"sample_rate": 0.1, "sketch_dim": 32}
    target = calibrate_noise_multiplier(epsilon=2.0, delta=1e-5, steps=10, **setting)
    found = dp_accounting.calibrate_dp_mechanism(
        lambda: RandomizedClippingAccountant(value_discretization_interval=1e-3, smallest_delta=1e-6),
        lambda sigma: dp_accounting.SelfComposedDpEvent(Event(sigma, **setting), 10),
        target_epsilon=2.0,
        target_delta=1e-5,
        bracket_interval=dp_accounting.ExplicitBracketInterval(0.95 * target, 1.1 * target),
        tol=4e-3,
    )
    assert found == pytest.approx(target, rel=1e-2)
    assert Accountant([(StepEvent(found, **setting), 10)]).epsilon(1e-5).lower <= 2.0


def test_composed_with_other_mechanisms_it_lies_between_bounds() -> None:
    """The randomized steps are at least exact ones, and at most Gaussians with the noise divided by a large Z."""
    delta, event = 1e-5, Event(2.0, 0.1, 128)
    others = dp_accounting.ComposedDpEvent([
        dp_accounting.GaussianDpEvent(8.0),
        dp_accounting.LaplaceDpEvent(20.0),
        dp_accounting.PoissonSampledDpEvent(0.2, dp_accounting.GaussianDpEvent(3.0)),
    ])
    found = (
        RandomizedClippingAccountant(value_discretization_interval=1e-3)
        .compose(others)
        .compose(event, 50)
        .get_epsilon(delta)
    )
    swapped = (
        RandomizedClippingAccountant(value_discretization_interval=1e-3)
        .compose(event, 50)
        .compose(others)
        .get_epsilon(delta)
    )
    assert found == pytest.approx(swapped, rel=1e-6)
    for scale, sign in ((1.0, 1), (1.25, -1)):
        gaussians = dp_accounting.PoissonSampledDpEvent(0.1, dp_accounting.GaussianDpEvent(2.0 / scale))
        bound = (
            PLDAccountant(value_discretization_interval=1e-3).compose(others).compose(gaussians, 50).get_epsilon(delta)
        )
        assert sign * (found - bound) > 0
    assert found > RandomizedClippingAccountant(value_discretization_interval=1e-3).compose(event, 50).get_epsilon(
        delta
    )


def test_phases_and_nested_events_compose_like_our_own() -> None:
    phases = [(Event(2.0, 0.05, 32), 30), (Event(3.0, 0.1, 64), 20), (Event(2.5, 0.02), 100)]
    parts = [dp_accounting.SelfComposedDpEvent(event, count) for event, count in phases]
    nested = RandomizedClippingAccountant(value_discretization_interval=3e-4).compose(
        dp_accounting.ComposedDpEvent(parts)
    )
    ours = Accountant([(event.step_event(), count) for event, count in phases]).epsilon(1e-5)
    assert ours.lower <= nested.get_epsilon(1e-5)
    assert nested.get_epsilon(1e-5) == pytest.approx(ours.upper, rel=5e-3)
    twice = RandomizedClippingAccountant(value_discretization_interval=3e-4).compose(
        dp_accounting.SelfComposedDpEvent(parts[0], 2)
    )
    once = RandomizedClippingAccountant(value_discretization_interval=3e-4).compose(phases[0][0], 60)
    assert twice.get_epsilon(1e-5) == once.get_epsilon(1e-5)


def test_their_ledger_and_builder_accept_the_event() -> None:
    event = Event(2.0, 0.05, 32)
    accountant = RandomizedClippingAccountant().compose(event, 3).compose(event, 2)
    assert accountant.ledger == dp_accounting.SelfComposedDpEvent(event, 5)
    builder = dp_accounting.DpEventBuilder()
    builder.compose(event, 5)
    assert builder.build() == accountant.ledger
    assert Event.from_named_tuple(event.to_named_tuple()) == event
    assert accountant.supports(dp_accounting.ComposedDpEvent([event, dp_accounting.GaussianDpEvent(1.0)]))
    assert not PLDAccountant().supports(event)


def test_the_event_has_the_fields_of_the_step() -> None:
    ours = {field.name: field.default for field in dataclasses.fields(StepEvent)}
    theirs = {field.name: field.default for field in attr.fields(Event)}
    assert theirs.keys() == ours.keys() - {"neighboring_relation"}
    step = StepEvent(1.5, 0.2, 16, bound="convex", estimator="hutchpp", norm_slack=0.01)
    assert Event.from_step_event(step).step_event() == step
    own = ExactLaw()
    assert Event(1.0, 0.1, law=own).step_event().law is own


@pytest.mark.parametrize("relation", [REPLACE_ONE, dp_accounting.NeighboringRelation.REPLACE_SPECIAL])
def test_replacing_a_record_is_refused_by_name(relation: Any) -> None:
    accountant = RandomizedClippingAccountant(relation)
    with pytest.raises(dp_accounting.UnsupportedEventError, match=r"ADD_OR_REMOVE_ONE.*replace-one.*Found.*REPLACE"):
        accountant.compose(Event(1.0, 0.1, 32))
    assert not accountant.supports(Event(1.0, 0.1, 32))
    assert accountant.compose(dp_accounting.GaussianDpEvent(1.0)).get_epsilon(1e-5) > 0


def test_sampling_twice_is_refused_with_what_to_write_instead() -> None:
    doubled = dp_accounting.PoissonSampledDpEvent(0.1, Event(1.0, 0.1, 32))
    with pytest.raises(dp_accounting.UnsupportedEventError, match="give it the sample_rate"):
        RandomizedClippingAccountant().compose(doubled)


def test_without_noise_there_is_no_privacy() -> None:
    accountant = RandomizedClippingAccountant().compose(Event(0.0, 0.1, 32))
    assert accountant.get_epsilon(1e-5) == float("inf")
    assert accountant.get_delta(1.0) == 1


@pytest.mark.parametrize(
    ("event", "name"),
    [({"noise_multiplier": -1.0}, "noise_multiplier"), ({"sample_rate": 0.0}, "sample_rate")]
    + [({"noise_multiplier": False}, "noise_multiplier"), ({"sketch_dim": 0}, "sketch_dim"), ({"bound": "x"}, "bound")],
)
def test_unusable_events_are_refused_by_name(event: dict[str, Any], name: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"^{name}="):
        Event(**{"noise_multiplier": 1.0, "sample_rate": 0.1, **event})


@pytest.mark.parametrize(("setting", "value"), [("value_discretization_interval", 0.0), ("smallest_delta", 1.0)])
def test_unusable_settings_are_refused_by_name(setting: str, value: float) -> None:
    with pytest.raises(InvalidArgumentError, match=f"^{setting}="):
        RandomizedClippingAccountant(**{setting: value})


def test_a_grid_beyond_memory_is_a_typed_error_that_leaves_the_accountant_as_it_was() -> None:
    accountant = RandomizedClippingAccountant(value_discretization_interval=2e-7).compose(Event(1000.0, 0.1), 5)
    before = accountant.get_epsilon(1e-5)
    with pytest.raises(AccountingResourceError, match="^value_discretization_interval=2e-07: .*larger interval"):
        accountant.compose(Event(2.0, 0.1), 10)
    assert accountant.get_epsilon(1e-5) == before
    assert accountant.ledger == dp_accounting.SelfComposedDpEvent(Event(1000.0, 0.1), 5)


def test_running_out_of_room_between_events_leaves_no_privacy_rather_than_too_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    accountant = RandomizedClippingAccountant(value_discretization_interval=1e-3)
    event, other = Event(2.0, 0.1), Event(2.0, 0.1, bound="envelope")
    monkeypatch.setattr("dprc_lightning.accounting.interop._MAX_POINTS", accountant._pair(event, 10).index.size + 5)
    for second in (event, other):
        both = dp_accounting.ComposedDpEvent([dp_accounting.SelfComposedDpEvent(e, 10) for e in (event, second)])
        accountant = RandomizedClippingAccountant(value_discretization_interval=1e-3)
        with pytest.raises(AccountingResourceError):
            accountant.compose(both)
        assert accountant.get_epsilon(0.1) == float("inf")


def test_importing_the_accountant_imports_nothing_slow() -> None:
    slow = ("dp_accounting", "scipy.signal", "scipy.stats", "torch")
    program = f"import sys, dprc_lightning.accounting; print([m for m in {slow!r} if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_an_uncertified_law_shows() -> None:
    class Guess(ExactLaw):
        certified = False

    event = Event(2.0, 0.1, law=Guess())
    accountant = RandomizedClippingAccountant(value_discretization_interval=1e-3)
    assert accountant.certified
    accountant.compose(dp_accounting.ComposedDpEvent([dp_accounting.GaussianDpEvent(9.0), Event(2.0, 0.1)]))
    assert accountant.certified
    assert not accountant.compose(event, 4).certified
