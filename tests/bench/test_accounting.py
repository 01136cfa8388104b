"""The benchmark's own arithmetic, and what it is there to show: epsilon costs less than a millisecond a step."""

import json

import pytest

from dprc_lightning.accounting import Accountant, StepEvent
from dprc_lightning.bench.accounting import measure_accounting
from dprc_lightning.cli import main

EVENT = StepEvent(noise_multiplier=2.0, sample_rate=0.01)


def test_figures_fit_each_other():
    seen = []
    found = measure_accounting(EVENT, 300, 1e-5, rounds=3, progress=seen.append)
    assert seen == ["round 1 of 3", "round 2 of 3", "round 3 of 3"]
    for name in ("build_seconds", "lookup_seconds", "amortised_ms_per_step", "compose_ms"):
        assert 0 < found[f"{name}_min"] <= found[f"{name}_median"], name
    least = 1000 * (found["build_seconds_min"] / 300 + found["lookup_seconds_min"])
    assert found["amortised_ms_per_step_min"] == pytest.approx(least, rel=0.2)
    assert found["epsilon_composed"] == Accountant([(EVENT, 300)]).epsilon(1e-5).upper
    assert found["epsilon"] == pytest.approx(found["epsilon_composed"], rel=1e-4)
    assert found["event"] == EVENT.to_dict() and (found["steps"], found["delta"], found["rounds"]) == (300, 1e-5, 3)


def test_less_than_a_millisecond_a_step_by_the_command(capsys):
    arguments = ["--steps", "1000", "--sample_rate", ".01", "--noise_multiplier", "1", "--rounds", "2"]
    assert main(["bench", "accounting", *arguments, "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["amortised_ms_per_step_min"] < 1.0
    assert found["lookup_seconds_median"] < 1e-4
    assert found["compose_ms_min"] > 10 * found["amortised_ms_per_step_min"], "composing each time would cost more"


def test_the_table_and_the_errors(capsys):
    arguments = ["bench", "accounting", "--sample_rate", ".1", "--noise_multiplier", "3", "--rounds", "1"]
    assert main([*arguments, "--steps", "3"]) == 0
    assert "amortised_ms_per_step_min" in capsys.readouterr().out
    assert main([*arguments, "--steps", "0"]) == 2
    assert "--steps=0: expected an integer >= 1" in capsys.readouterr().err
    assert main([*arguments, "--steps", "3", "--delta", "2"]) == 2
    assert "delta=2.0" in capsys.readouterr().err
