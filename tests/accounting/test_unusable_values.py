"""Values that no computation can use: each is refused in one line that names it, never by a traceback of the inside."""

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from dprc_lightning.accounting import (
    Accountant,
    RandomizedClippingAccountant,
    RandomizedClippingDpEvent,
    StepEvent,
    calibrate_noise_multiplier,
    envelope_cdf,
    epsilon,
    epsilon_schedule,
    tradeoff_function,
)
from dprc_lightning.errors import InvalidArgumentError

SETTING: dict[str, Any] = {"noise_multiplier": 1.0, "sample_rate": 0.1, "steps": 3, "delta": 1e-5}
HUGE = 10**400


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, HUGE) for name in ("noise_multiplier", "sample_rate", "steps", "delta", "sketch_dim")),
        ("noise_multiplier", Fraction(HUGE)),
        ("noise_multiplier", 1e-300),
        ("noise_multiplier", 5e-324),
        ("noise_multiplier", 1e308),
        ("sample_rate", 1e-160),
        ("delta", 5e-324),
        ("delta", 1e-160),
        ("steps", np.float64(3)),
        ("sketch_dim", True),
        ("bound", np.array(["best"])),
        ("bound", np.array(["best", "x"])),
        ("projection", np.array(["gaussian"])),
        ("projection", np.array(["gaussian", "x"])),
        ("projection", None),
    ],
)
def test_epsilon(name: str, value: Any) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        epsilon(**SETTING | {name: value})
    assert caught.value.name == name and "\n" not in str(caught.value) and len(str(caught.value)) < 600


@pytest.mark.parametrize("target", [HUGE, math.nan, -1.0, 0.0, "1", True, math.inf])
def test_calibrate(target: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="epsilon"):
        calibrate_noise_multiplier(epsilon=target, delta=1e-5, sample_rate=0.1, steps=3)


NOT_NUMBERS = ["1", b"1", True, [True], ["1"], 1j, [[1.0], [1.0, 2.0]], None, math.nan, [0.5, math.nan]]


@pytest.mark.parametrize("value", NOT_NUMBERS)
def test_arrays_of_numbers(value: Any) -> None:
    accountant = Accountant([(StepEvent(1.0, 0.1), 1)])
    for call, name in [
        (lambda: accountant.delta(value), "epsilon"),
        (lambda: accountant.tradeoff_function(value), "alpha"),
        (lambda: tradeoff_function(value, noise_multiplier=1.0, sample_rate=0.1, steps=1), "alpha"),
        (lambda: envelope_cdf(value, 8, 4), "t"),
    ]:
        with pytest.raises(InvalidArgumentError) as caught:
            call()
        assert caught.value.name == name


def test_numbers_of_any_size_are_answered() -> None:
    accountant = Accountant([(StepEvent(1.0, 0.1), 1)])
    # What was cut off counts as an infinite loss.
    assert np.all(accountant.delta([HUGE // 10**100, math.inf, 1e308]) < 1e-12)
    assert accountant.delta(np.zeros((0, 2))).shape == (0, 2)
    np.testing.assert_array_equal(envelope_cdf([math.inf, -math.inf, 0, 1e308, -1e308], 8, 4), [1, 0, 0, 1, 0])


@pytest.mark.parametrize("history", [None, 5, "ab", [(StepEvent(1.0, 0.1),)], [StepEvent(1.0, 0.1)], [("a", 1)]])
def test_histories(history: Any) -> None:
    with pytest.raises(InvalidArgumentError):
        Accountant(history)


@pytest.mark.parametrize("steps", [None, 5, ["a"], [1.5]])
def test_schedules(steps: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="steps"):
        epsilon_schedule(StepEvent(1.0, 0.1), steps, 1e-5)


def test_a_negative_count_takes_nothing_back() -> None:
    import dp_accounting

    event = RandomizedClippingDpEvent(1.0, 0.1)
    accountant = RandomizedClippingAccountant(value_discretization_interval=1e-2).compose(event, 2)
    before = accountant.get_epsilon(1e-5)
    for wrong in (lambda: accountant.compose(dp_accounting.SelfComposedDpEvent(event, -1)),):
        with pytest.raises((InvalidArgumentError, ValueError)):
            wrong()
    assert accountant.get_epsilon(1e-5) == before
