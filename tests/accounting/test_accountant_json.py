"""An accountant written to JSON and read again; damage is refused by name."""

import json
import math
from typing import Any

import pytest

from dprc_lightning.accounting import Accountant, StepEvent
from dprc_lightning.accounting.law import ExactLaw
from dprc_lightning.errors import InvalidArgumentError


def accountant() -> Accountant:
    return Accountant([
        (StepEvent(1.1, 64 / 1225, 32), 208),
        (StepEvent(math.pi, 1.0, bound="envelope"), 3),
        (StepEvent(0.9, 1e-6, 64, estimator="hutchpp", norm_slack=1e-3), 10**7),
    ])


def test_reading_gives_what_was_written_bit_for_bit() -> None:
    before = accountant()
    for after in (Accountant.from_dict(before.to_dict()), Accountant.from_json(before.to_json())):
        assert after.history == before.history
        assert after.to_json() == before.to_json()
    assert Accountant.from_json(Accountant().to_json()).steps == 0
    assert Accountant.from_json(before.to_json().encode()).history == before.history
    assert json.loads(before.to_json())["version"] == 1


def test_reading_gives_the_same_epsilon_and_goes_on() -> None:
    before = Accountant([(StepEvent(4.2, 0.05, 32), 10)])
    after = Accountant.from_json(before.to_json())
    assert after.upper(1e-5) == before.upper(1e-5)
    assert after.compose(StepEvent(4.2, 0.05, 32), 5).history == ((StepEvent(4.2, 0.05, 32), 15),)


def test_equal_events_of_a_file_are_merged() -> None:
    values = Accountant([(StepEvent(1.0, 0.1), 2)]).to_dict()
    values["history"] = values["history"] * 3
    assert Accountant.from_dict(values).history == ((StepEvent(1.0, 0.1), 6),)


def damaged(**change: Any) -> dict[str, Any]:
    values = Accountant([(StepEvent(1.0, 0.1, 8), 2), (StepEvent(2.0, 0.1), 3)]).to_dict()
    return {**values, **change}


def with_event(**change: Any) -> dict[str, Any]:
    values = damaged()
    values["history"][1]["event"].update(change)
    return values


def without(name: str) -> dict[str, Any]:
    values = with_event()
    del values["history"][1]["event"][name]
    return values


def with_entry(**change: Any) -> dict[str, Any]:
    values = damaged()
    values["history"][1].update(change)
    return values


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (damaged(version=2), r"^version=2: only version 1"),
        (damaged(version=True), r"^version=True: "),
        (damaged(extra=1), r"^accountant.extra=1: unknown field"),
        (damaged(history={}), r"^history=\{\}: must be a list"),
        ({"version": 1}, r"^accountant.history=None: is missing"),
        ([], r"^accountant=\[\]: must be an object"),
        (None, r"^accountant=None: must be an object"),
        (with_entry(count=0), r"^history\[1\].count=0: must be an integer >= 1"),
        (with_entry(count=2.5), r"^history\[1\].count=2.5: "),
        (with_entry(count=True), r"^history\[1\].count=True: "),
        (with_entry(event=None), r"^history\[1\].event=None: must be an object"),
        (with_entry(note="x"), r"^history\[1\].note='x': unknown field"),
        (with_event(noise_multiplier=-1), r"^history\[1\].event.noise_multiplier=-1: "),
        (with_event(noise_multiplier=math.nan), r"^history\[1\].event.noise_multiplier=nan: "),
        (with_event(sample_rate="0.1"), r"^history\[1\].event.sample_rate='0.1': "),
        (with_event(seed=3), r"^history\[1\].event.seed=3: unknown field"),
        (
            with_event(neighboring_relation="replace_one"),
            r"^history\[1\].event.neighboring_relation='replace_one': only",
        ),
        (without("sample_rate"), r"^history\[1\].event.sample_rate=None: is missing"),
    ],
)
def test_unusable_values_are_refused_with_their_place(values: Any, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        Accountant.from_dict(values)
    if values is not None:
        with pytest.raises(InvalidArgumentError):
            Accountant.from_json(json.dumps(values))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "damaged"),
        (accountant().to_json()[:-5], "damaged"),
        ('{"version": 1, "version": 1, "history": []}', "a field occurs twice"),
        ('{"version": NaN, "history": []}', "NaN is no number"),
        (b"\xff\xfe\xfa", "damaged"),
        ("[" * 100_000, "damaged"),
        (7, "must be the text"),
    ],
)
def test_a_damaged_text_is_one_line_naming_the_text(text: Any, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=f"^text=.*{message}") as caught:
        Accountant.from_json(text)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


def test_a_law_of_ones_own_cannot_be_written() -> None:
    with pytest.raises(InvalidArgumentError, match="^law="):
        Accountant([(StepEvent(1.0, 0.1, law=ExactLaw()), 1)]).to_json()
