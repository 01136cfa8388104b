"""Calibration: certified, smallest, bracketed, and quick to start."""

import math
import subprocess
import sys
import time
from typing import Any

import pytest
from scipy import optimize, stats

from dprc_lightning.accounting import Accountant, StepEvent, calibrate_noise_multiplier, epsilon
from dprc_lightning.errors import CalibrationError

SETTINGS = [
    dict(epsilon=0.7, delta=1e-5, sample_rate=64 / 1225, steps=208, sketch_dim=32),
    dict(epsilon=8.0, delta=1e-6, sample_rate=0.01, steps=2000, sketch_dim=None),
    dict(epsilon=2.0, delta=1e-6, sample_rate=0.001, steps=20_000, sketch_dim=64),
    dict(epsilon=3.0, delta=1e-5, sample_rate=1.0, steps=20, sketch_dim=16, bound="envelope"),
]


@pytest.mark.parametrize("setting", SETTINGS)
def test_calibrated_noise_meets_the_target_and_is_the_smallest(setting: dict[str, Any]) -> None:
    start = time.perf_counter()
    sigma = calibrate_noise_multiplier(**setting)
    elapsed = time.perf_counter() - start
    target = setting["epsilon"]
    rest = {name: value for name, value in setting.items() if name != "epsilon"}
    assert epsilon(noise_multiplier=sigma, **rest).upper <= target
    assert epsilon(noise_multiplier=sigma * (1 - 2e-4), **rest).upper > target
    # 10 s on an idle core; the machine that runs the tests may be shared.
    assert elapsed < 30


@pytest.mark.parametrize("target", [1e-4, 0.01, 0.1])
@pytest.mark.parametrize("sample_rate", [1.0, 0.05])
def test_small_targets_are_met(target: float, sample_rate: float) -> None:
    sigma = calibrate_noise_multiplier(epsilon=target, delta=1e-7, sample_rate=sample_rate, steps=3)
    bounds = epsilon(noise_multiplier=sigma, delta=1e-7, sample_rate=sample_rate, steps=3)
    assert 0.99 * target < bounds.lower <= bounds.upper <= target


def test_full_batch_agrees_with_the_closed_form() -> None:
    """At q = 1 and T = 1, epsilon 1 and delta 1e-5 need sigma = 3.7303 (Balle and Wang's analytic Gaussian)."""
    sigma = calibrate_noise_multiplier(epsilon=1.0, delta=1e-5, sample_rate=1.0, steps=1)
    mu = 1 / sigma
    phi = lambda x: 0.5 * math.erfc(-x / math.sqrt(2))  # noqa: E731
    assert phi(mu / 2 - 1 / mu) - math.e * phi(-mu / 2 - 1 / mu) == pytest.approx(1e-5, rel=3e-3)


def test_more_columns_need_less_noise_down_to_exact_clipping() -> None:
    setting: dict[str, Any] = dict(epsilon=2.0, delta=1e-6, sample_rate=0.02, steps=500)
    sigmas = [calibrate_noise_multiplier(sketch_dim=k, **setting) for k in (16, 32, 128)]
    assert sigmas == sorted(sigmas, reverse=True)
    assert sigmas[-1] > calibrate_noise_multiplier(**setting)


def test_targets_out_of_reach_are_refused_by_name() -> None:
    # A record is hardly ever sampled: no noise at all is needed for (0, 1e-5).
    with pytest.raises(CalibrationError, match=r"epsilon=1\.0: already met"):
        calibrate_noise_multiplier(epsilon=1.0, delta=1e-5, sample_rate=1e-9, steps=1)
    with pytest.raises(CalibrationError, match=r"epsilon=1e-09"):
        calibrate_noise_multiplier(epsilon=1e-9, delta=1e-12, sample_rate=1.0, steps=100)


def test_import_is_quick_and_light() -> None:
    code = (
        "import sys, time; start = time.perf_counter(); import dprc_lightning.accounting; "
        "print(time.perf_counter() - start); "
        "print(sorted(m for m in ('torch', 'lightning', 'dp_accounting') if m in sys.modules))"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split("\n")
    assert float(output[0]) < 2.0
    assert output[1] == "[]"


# ------------------------------------------------------------------------------------ further steps after spent ones


def test_spent_and_further_steps_meet_the_target_together() -> None:
    setting: dict[str, Any] = dict(delta=1e-5, sample_rate=0.085, sketch_dim=32)
    spent = [(StepEvent(1.5, 0.085, 32), 10), (StepEvent(2.0, 0.05, None), 7), (StepEvent(1.5, 0.085, 32), 3)]
    sigma = calibrate_noise_multiplier(epsilon=2.0, steps=13, spent=spent, **setting)

    def together(noise_multiplier: float) -> float:
        return Accountant([*spent, (StepEvent(noise_multiplier, 0.085, 32), 13)]).upper(1e-5)

    assert 2.0 * (1 - 1e-3) < together(sigma) <= 2.0 < together(sigma * (1 - 2e-4))


@pytest.mark.parametrize("done", [1, 20])
def test_a_calibration_in_two_parts_agrees_with_one(done: int) -> None:
    setting: dict[str, Any] = dict(epsilon=2.0, delta=1e-6, sample_rate=0.05)
    sigma = calibrate_noise_multiplier(steps=40, **setting)
    again = calibrate_noise_multiplier(steps=40 - done, spent=[(StepEvent(sigma, 0.05), done)], **setting)
    assert again == pytest.approx(sigma, rel=1e-4)


def test_further_full_batches_agree_with_the_closed_form() -> None:
    """At q = 1 what is left is the Gaussian with mu^2 = mu_target^2 - mu_spent^2."""
    target, delta, steps = 2.0, 1e-5, 6
    spent = [(StepEvent(5.0, 1.0), 3), (StepEvent(8.0, 1.0), 2)]

    def excess(mu: float) -> float:
        return (
            stats.norm.cdf(mu / 2 - target / mu) - math.exp(target + stats.norm.logcdf(-mu / 2 - target / mu)) - delta
        )

    left = optimize.brentq(excess, 0.1, 5) ** 2 - sum(count / event.noise_multiplier**2 for event, count in spent)
    sigma = calibrate_noise_multiplier(epsilon=target, delta=delta, sample_rate=1.0, steps=steps, spent=spent)
    assert math.sqrt(steps / left) <= sigma == pytest.approx(math.sqrt(steps / left), rel=3e-3)


def test_nothing_spent_changes_nothing() -> None:
    setting: dict[str, Any] = dict(epsilon=2.0, delta=1e-6, sample_rate=0.05, steps=40)
    sigma = calibrate_noise_multiplier(**setting)
    assert (
        sigma
        == calibrate_noise_multiplier(**setting, spent=())
        == calibrate_noise_multiplier(**setting, spent=[(StepEvent(1.0, 0.5), 0)])
    )


def test_the_last_of_the_budget_needs_much_noise_and_a_spent_budget_is_refused() -> None:
    spent = [(StepEvent(1.0, 0.05), 30)]
    cost = Accountant(spent).upper(1e-5)
    setting: dict[str, Any] = dict(delta=1e-5, sample_rate=0.05, steps=5, spent=spent)
    sigmas = [calibrate_noise_multiplier(epsilon=cost * share, **setting) for share in (1.02, 1.001)]
    assert 1.2 * sigmas[0] < sigmas[1]
    for sigma, share in zip(sigmas, (1.02, 1.001), strict=True):
        together = Accountant([*spent, (StepEvent(sigma, 0.05), 5)]).upper(1e-5)
        assert cost * share * (1 - 1e-4) < together <= cost * share
    for target in (cost, cost / 2, cost * (1 + 1e-9)):
        with pytest.raises(
            CalibrationError, match=rf"^epsilon={target}: 30 spent steps .* epsilon {cost:.4f} at delta"
        ):
            calibrate_noise_multiplier(epsilon=target, **setting)
    with pytest.raises(CalibrationError, match=rf"already met .* after 30 spent steps of epsilon {cost:.4f}"):
        calibrate_noise_multiplier(epsilon=2 * cost, **(setting | {"sample_rate": 1e-9}))
