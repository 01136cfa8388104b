"""What the accountant refuses, and that each refusal names the argument."""

import json
import math
from typing import Any

import numpy as np
import pytest

from dprc_lightning.accounting import Accountant, StepEvent, calibrate_noise_multiplier, epsilon, epsilon_schedule
from dprc_lightning.accounting.rademacher import RademacherLaw, SignPairLaw
from dprc_lightning.errors import DPRCError, InvalidArgumentError

GOOD: dict[str, Any] = dict(noise_multiplier=1.0, delta=1e-5, sample_rate=0.1, steps=10, sketch_dim=32)

BAD = {
    "noise_multiplier": [0.0, -1.0, math.nan, math.inf, "1", None, True],
    "delta": [0.0, 1.0, -1e-5, 2.0, math.nan, None],
    "sample_rate": [0.0, -0.1, 1.0000001, math.nan, "all", None],
    "steps": [-1, 1.0, 2.5, math.nan, "10", True],
    "sketch_dim": [0, -3, 32.0, math.nan, "32", True],
    "projection": ["countsketch", "haar", "", None],
    "bound": ["tight", None],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in BAD.items() for value in values])
def test_epsilon_refuses_by_name(name: str, value: Any) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        epsilon(**{**GOOD, name: value})
    assert caught.value.name == name
    assert str(caught.value).startswith(f"{name}=")
    assert isinstance(caught.value, DPRCError)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, values in BAD.items() if name != "noise_multiplier" for value in values]
    + [("epsilon", value) for value in (0.0, -1.0, math.nan, math.inf, "2", None)]
    + [("steps", 0)],
)
def test_calibration_refuses_by_name(name: str, value: Any) -> None:
    setting = {**GOOD, "epsilon": 2.0, name: value}
    del setting["noise_multiplier"]
    with pytest.raises(InvalidArgumentError) as caught:
        calibrate_noise_multiplier(**setting)
    assert caught.value.name == name


@pytest.mark.parametrize("name", ["countsketch", "sparse"])
def test_sparse_projections_are_refused_with_their_reason(name: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"projection='{name}': .*to zero with probability"):
        StepEvent(1.0, 0.1, 32, projection=name)


def test_rademacher_is_accepted_where_it_has_a_law() -> None:
    event = StepEvent(1.0, 0.1, 32, projection="rademacher")
    assert event.convex_law() == event.envelope_law() == RademacherLaw(32)
    assert event.attained_law() == SignPairLaw(32)
    assert not event.certified
    # Small noise is no matter of a proof here, only of the charge.
    StepEvent(0.1, 0.1, 32, projection="rademacher", bound="convex")
    with pytest.raises(InvalidArgumentError, match="bound='envelope': .*has no envelope"):
        StepEvent(1.0, 0.1, 32, projection="rademacher", bound="envelope")
    with pytest.raises(InvalidArgumentError, match="estimator='hutchpp': "):
        StepEvent(1.0, 0.1, 32, projection="rademacher", estimator="hutchpp")
    with pytest.raises(InvalidArgumentError, match="projection='rademacher': .*give sketch_dim"):
        StepEvent(1.0, 0.1, projection="rademacher")


def test_certified_is_what_the_law_says() -> None:
    assert StepEvent(1.0, 0.1).certified
    assert StepEvent(1.0, 0.1, 32).certified
    assert StepEvent(1.0, 0.1, 32, estimator="hutchpp").certified
    assert not StepEvent(1.0, 0.1, law=RademacherLaw(32)).certified


def test_replace_one_is_refused_by_name() -> None:
    with pytest.raises(InvalidArgumentError, match="neighboring_relation='replace_one'"):
        StepEvent(1.0, 0.1, neighboring_relation="replace_one")


@pytest.mark.parametrize("value", [-0.1, 1.0, math.nan, "0", None])
def test_norm_slack_is_a_share(value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="norm_slack"):
        StepEvent(1.0, 0.1, norm_slack=value)


def test_norm_slack_counts_where_the_convex_order_ends() -> None:
    StepEvent(0.29, 0.1, 32, bound="convex")
    with pytest.raises(InvalidArgumentError, match="noise_multiplier"):
        StepEvent(0.29, 0.1, 32, bound="convex", norm_slack=0.01)


def test_events_are_values() -> None:
    event = StepEvent(np.float64(1.5), np.float32(0.5), np.int64(32))  # type: ignore[arg-type]
    assert event == StepEvent(1.5, 0.5, 32)
    assert type(event.noise_multiplier) is type(event.sample_rate) is float
    assert type(event.sketch_dim) is int
    with pytest.raises(AttributeError):
        event.noise_multiplier = 2.0  # type: ignore[misc]


@pytest.mark.parametrize(
    "event",
    [
        StepEvent(1.25, 64 / 1225, 32),
        StepEvent(0.1, 1.0, None, bound="envelope", norm_slack=0.01),
        StepEvent(3.0, 0.1, 8, estimator="hutchpp"),
        StepEvent(3.0, 0.1, 64, "rademacher"),
    ],
)
def test_events_survive_a_file(event: StepEvent) -> None:
    assert StepEvent.from_dict(json.loads(json.dumps(event.to_dict()))) == event


def test_a_file_is_validated() -> None:
    values = StepEvent(1.0, 0.1, 32).to_dict()
    with pytest.raises(InvalidArgumentError, match="sigma=1.0: unknown field"):
        StepEvent.from_dict({**values, "sigma": 1.0})
    with pytest.raises(InvalidArgumentError, match="sample_rate"):
        StepEvent.from_dict({"noise_multiplier": 1.0})
    with pytest.raises(InvalidArgumentError, match="sample_rate"):
        StepEvent.from_dict({**values, "sample_rate": 2.0})
    with pytest.raises(InvalidArgumentError, match="neighboring_relation"):
        StepEvent.from_dict({**values, "neighboring_relation": "replace_one"})


def test_accountant_and_schedule_refuse_by_name() -> None:
    event = StepEvent(1.0, 0.1)
    with pytest.raises(InvalidArgumentError, match="count"):
        Accountant().compose(event, -1)
    with pytest.raises(InvalidArgumentError, match="count"):
        Accountant().compose(event, 1.5)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="event"):
        Accountant().compose({"noise_multiplier": 1.0})  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="delta"):
        Accountant().epsilon(0.0)
    with pytest.raises(InvalidArgumentError, match="steps"):
        epsilon_schedule(event, [1, -1], 1e-5)
    with pytest.raises(InvalidArgumentError, match="event"):
        epsilon_schedule(None, [1], 1e-5)  # type: ignore[arg-type]
    assert epsilon_schedule(event, [], 1e-5) == []
