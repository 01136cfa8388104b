"""What is refused, what the extremes give, and how much memory and time they may take."""

import json
import math
import subprocess
import sys
import time
from typing import Any

import pytest
from scipy import optimize, stats

from dprc_lightning.accounting import Accountant, StepEvent, calibrate_noise_multiplier, epsilon, epsilon_schedule
from dprc_lightning.accounting.infinite import why_infinite
from dprc_lightning.errors import AccountingResourceError, CalibrationError, DPRCError, InvalidArgumentError

GOOD: dict[str, Any] = dict(noise_multiplier=1.0, sample_rate=0.1, steps=10, delta=1e-5, sketch_dim=32)
NAN, INF = math.nan, math.inf


# ------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("noise_multiplier", value) for value in (0.0, -1.0, NAN, INF, "1", None, True)],
        *[("sample_rate", value) for value in (0.0, -0.1, 1.0 + 1e-9, 2, NAN, INF, "0.1", None)],
        *[("steps", value) for value in (-1, 1.5, NAN, "3", None, True)],
        *[("delta", value) for value in (0.0, 1.0, -1e-5, 1.5, NAN, "1e-5", None)],
        *[("sketch_dim", value) for value in (0, -3, 1.5, NAN, "8", True)],
        *[("bound", value) for value in ("tightest", None)],
        *[("projection", value) for value in ("countsketch", "unheard-of")],
    ],
)
def test_what_cannot_be_used_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"^{name}=") as caught:
        epsilon(**{**GOOD, name: value})
    assert "\n" not in str(caught.value)
    if name != "noise_multiplier":
        setting = {key: kept for key, kept in GOOD.items() if key != "noise_multiplier"}
        with pytest.raises(InvalidArgumentError, match=rf"^{name}="):
            calibrate_noise_multiplier(epsilon=1.0, **{**setting, name: value})


@pytest.mark.parametrize("value", [0.0, -1.0, NAN, INF, "1", None])
def test_a_target_that_cannot_be_met_is_refused_by_name(value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="^epsilon="):
        calibrate_noise_multiplier(epsilon=value, delta=1e-5, sample_rate=0.1, steps=10)


def test_no_steps_cost_nothing_whatever_the_mechanism() -> None:
    for sigma, q, k in ((0.01, 1.0, None), (0.3, 1e-6, 1), (100.0, 0.5, 512)):
        assert epsilon(noise_multiplier=sigma, sample_rate=q, steps=0, delta=1e-10, sketch_dim=k) == (0.0, 0.0, 0.0)
    assert epsilon_schedule(StepEvent(0.3, 1.0, 1), [0, 0], 1e-10) == [0.0, 0.0]


# ------------------------------------------------------------------------------------------------------------ extremes


def _full_batch(sigma: float, steps: int, delta: float) -> float:
    """The closed form at q = 1: the Gaussian with mu = sqrt(T) / sigma."""
    mu = math.sqrt(steps) / sigma

    def excess(e: float) -> float:
        return stats.norm.cdf(mu / 2 - e / mu) - math.exp(e + stats.norm.logcdf(-mu / 2 - e / mu)) - delta

    return float(optimize.brentq(excess, 0, 600, xtol=1e-12))


@pytest.mark.parametrize(
    ("sigma", "steps", "delta"),
    [(100.0, 1, 1e-3), (30.0, 1, 1e-10), (2.0, 500, 1e-10), (1.0, 1, 1e-12), (1.5, 100, 1e-5), (1000.0, 10**6, 1e-10)],
)
def test_full_batches_at_the_ends_of_epsilon_and_delta(sigma: float, steps: int, delta: float) -> None:
    """epsilon from 0.01 to 200, delta down to 1e-12."""
    exact = _full_batch(sigma, steps, delta)
    bounds = epsilon(noise_multiplier=sigma, sample_rate=1.0, steps=steps, delta=delta)
    assert bounds.lower <= exact <= bounds.upper
    assert bounds.upper - bounds.lower < 0.01 * exact


@pytest.mark.parametrize(
    ("sigma", "q", "steps", "delta", "k"),
    [
        (0.6, 1e-6, 1, 1e-10, 32),
        (1.0, 1e-6, 10, 1e-10, None),
        (0.5, 1e-6, 10_000_000, 1e-10, None),
        (0.5, 1.0, 1, 1e-10, 32),
        (1.0, 1.0 - 1e-12, 10, 1e-8, 32),
        (100.0, 0.1, 1_000_000, 1e-10, 512),
    ],
)
def test_extreme_settings_have_finite_bounds_in_order(
    sigma: float, q: float, steps: int, delta: float, k: int | None
) -> None:
    bounds = epsilon(noise_multiplier=sigma, sample_rate=q, steps=steps, delta=delta, sketch_dim=k)
    assert 0 <= bounds.lower <= bounds.estimate <= bounds.upper < math.inf
    assert bounds.upper - bounds.lower < 0.1 * bounds.upper


@pytest.mark.parametrize("target", [0.05, 200.0])
@pytest.mark.parametrize(("q", "steps"), [(1.0, 10), (0.01, 1000)])
def test_calibration_reaches_the_ends_of_epsilon(target: float, q: float, steps: int) -> None:
    setting: dict[str, Any] = dict(delta=1e-10, sample_rate=q, steps=steps)
    sigma = calibrate_noise_multiplier(epsilon=target, **setting)
    bounds = epsilon(noise_multiplier=sigma, **setting)
    assert 0.98 * target < bounds.lower <= bounds.upper <= target


# ----------------------------------------------------------------------------------------------------------- no answer


def test_an_infinite_bound_says_why() -> None:
    small_sketch = [(StepEvent(1.0, 0.01, 1), 100)]
    assert Accountant(small_sketch).upper(1e-5) == math.inf
    assert why_infinite(small_sketch, 1e-5).startswith("losses above 600 in a single step have probability")
    assert "raise sketch_dim (now 1), noise_multiplier (now 1) or delta" in why_infinite(small_sketch, 1e-5)
    slack = [(StepEvent(0.5, 0.1, 8, bound="convex"), 1000)]
    assert Accountant(slack).upper(1e-9) == math.inf
    assert "slack" in why_infinite(slack, 1e-9) and "bound='best'" in why_infinite(slack, 1e-9)
    hardly_noised = [(StepEvent(0.02, 1.0), 1)]
    assert Accountant(hardly_noised).upper(1e-9) == math.inf
    assert "raise noise_multiplier (now 0.02) or delta" in why_infinite(hardly_noised, 1e-9)
    too_long = [(StepEvent(1.0, 1.0), 10**9)]
    assert "steps=1000000000" in why_infinite(too_long, 1e-5)


def test_a_calibration_without_a_finite_epsilon_says_why() -> None:
    with pytest.raises(
        CalibrationError, match=r"^epsilon=1\.0: no finite epsilon can be certified: .*raise sketch_dim \(now 1\)"
    ) as caught:
        calibrate_noise_multiplier(epsilon=1.0, delta=1e-10, sample_rate=0.5, steps=10**6, sketch_dim=1)
    assert "\n" not in str(caught.value)


def test_what_no_grid_can_hold_is_a_typed_error_of_one_line() -> None:
    with pytest.raises(AccountingResourceError, match="^steps=1000000000: .*raise noise_multiplier") as caught:
        epsilon(noise_multiplier=1.0, delta=1e-5, sample_rate=1.0, steps=10**9)
    assert isinstance(caught.value, DPRCError) and isinstance(caught.value, MemoryError)
    assert "\n" not in str(caught.value)


# ----------------------------------------------------------------------------------------------------- memory and time

WORST = [
    dict(noise_multiplier=0.05, delta=1e-5, sample_rate=1.0, steps=10**6),
    dict(noise_multiplier=20.0, delta=1e-3, sample_rate=0.5, steps=10**6, sketch_dim=4),
    dict(noise_multiplier=0.6, delta=1e-10, sample_rate=1e-4, steps=10**6, sketch_dim=32),
]


def test_memory_stays_below_two_gigabytes() -> None:
    """The settings with the longest grids, in a process of their own, to see its peak."""
    code = (
        "import json, resource, sys\n"
        "from dprc_lightning.accounting import epsilon\n"
        "found = [epsilon(**setting) for setting in json.loads(sys.argv[1])]\n"
        "print(json.dumps([found, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss]))"
    )
    output = subprocess.run([sys.executable, "-c", code, json.dumps(WORST)], capture_output=True, text=True, check=True)
    found, kilobytes = json.loads(output.stdout)
    assert kilobytes < 2e6
    for lower, estimate, upper in found:
        assert 0 < lower <= estimate <= upper
    # At q = 1 the loss of a million steps is about T / (2 sigma^2).
    assert 10**6 / (2 * 0.05**2) < found[0][0] < found[0][2] < 1.001 * found[0][0]


@pytest.mark.parametrize(
    "setting",
    [
        dict(noise_multiplier=0.6, delta=1e-10, sample_rate=1e-4, steps=20_000, sketch_dim=32),
        dict(noise_multiplier=0.5, delta=1e-6, sample_rate=0.1, steps=1000, sketch_dim=32),
        dict(noise_multiplier=1.0, delta=1e-8, sample_rate=0.01, steps=10**6, sketch_dim=32),
    ],
)
def test_an_epsilon_takes_less_than_ten_seconds(setting: dict[str, Any]) -> None:
    """In units of a loop that takes an eighth of a second where the machine is idle: others may share it."""

    def loop() -> float:
        start, total = time.process_time(), 0
        for i in range(3_000_000):
            total += i
        return time.process_time() - start

    before = loop()
    start = time.process_time()
    epsilon(**setting)
    assert time.process_time() - start < 80 * max(before, loop())
