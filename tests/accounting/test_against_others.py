"""Exact clipping against three other accountants, within the error bounds that each of them states for itself."""

import math
from typing import Any

import dp_accounting
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from opacus.accountants import PRVAccountant
from prv_accountant.dpsgd import DPSGDAccountant

from dprc_lightning.accounting import epsilon

# sigma, q, T, delta, and the published bracket.
TABLE = [
    (1.0, 0.01, 1000, 1e-5, 1.8221, 1.8285),
    (4.073, 0.2, 500, 1e-5, 5.0075, 5.0353),
    (0.7, 0.002, 5000, 1e-6, 2.3864, 2.3899),
]
# Their tails are too heavy or their grids too long for the other accountants' own limits.
OTHERS = [*(row[:4] for row in TABLE), (1.5, 0.05, 200, 1e-6), (2.0, 0.3, 20, 1e-4), (8.0, 0.5, 2000, 1e-5)]
EPS_ERROR = 0.02


@pytest.mark.parametrize(("sigma", "q", "steps", "delta", "lower", "upper"), TABLE)
def test_the_published_table(sigma: float, q: float, steps: int, delta: float, lower: float, upper: float) -> None:
    bounds = epsilon(noise_multiplier=sigma, sample_rate=q, steps=steps, delta=delta)
    assert lower <= bounds.lower <= bounds.estimate <= bounds.upper <= upper


@pytest.mark.parametrize(("sigma", "q", "steps", "delta"), OTHERS)
def test_opacus_agrees_within_its_error(sigma: float, q: float, steps: int, delta: float) -> None:
    accountant = PRVAccountant()
    accountant.history = [(sigma, q, steps)]
    lower, _, upper = accountant._get_dprv(eps_error=EPS_ERROR, delta_error=delta / 1000).compute_epsilon(
        delta, delta / 1000, EPS_ERROR
    )
    _assert_intersects(sigma, q, steps, delta, lower, upper)


@pytest.mark.parametrize(("sigma", "q", "steps", "delta"), OTHERS)
def test_prv_accountant_agrees_within_its_error(sigma: float, q: float, steps: int, delta: float) -> None:
    accountant = DPSGDAccountant(sigma, q, steps, eps_error=EPS_ERROR, delta_error=delta / 1000)
    lower, _, upper = accountant.compute_epsilon(delta, steps)
    _assert_intersects(sigma, q, steps, delta, lower, upper)


def _assert_intersects(sigma: float, q: float, steps: int, delta: float, lower: float, upper: float) -> None:
    bounds = epsilon(noise_multiplier=sigma, sample_rate=q, steps=steps, delta=delta)
    assert upper - lower < 3 * EPS_ERROR, "theirs says something"
    assert bounds.lower <= upper
    assert lower <= bounds.upper
    # And ours is the narrower one.
    assert bounds.upper - bounds.lower < upper - lower


@pytest.mark.parametrize(("sigma", "q", "steps", "delta"), [*OTHERS, (0.6, 0.1, 10, 1e-3), (1.0, 1.0, 30, 1e-6)])
def test_dp_accounting_agrees(sigma: float, q: float, steps: int, delta: float) -> None:
    """Its bound is pessimistic too, on a grid of its own: above our lower bound, and next to our upper one."""
    accountant = PLDAccountant(value_discretization_interval=1e-4)
    gaussian: Any = dp_accounting.GaussianDpEvent(sigma)
    accountant.compose(dp_accounting.PoissonSampledDpEvent(q, gaussian), steps)
    theirs = accountant.get_epsilon(delta)
    bounds = epsilon(noise_multiplier=sigma, sample_rate=q, steps=steps, delta=delta)
    assert bounds.lower <= theirs * (1 + 1e-9)
    assert bounds.upper == pytest.approx(theirs, rel=5e-4)


def test_the_others_err_where_delta_is_tiny_and_ours_does_not() -> None:
    """At q = 1 the closed form tells: with delta = 1e-13 plain transforms drown in rounding."""
    from scipy import optimize, stats

    sigma, steps, delta = 20.0, 400, 1e-13
    mu = math.sqrt(steps) / sigma

    def excess(e: float) -> float:
        return stats.norm.cdf(mu / 2 - e / mu) - math.exp(e + stats.norm.logcdf(-mu / 2 - e / mu)) - delta

    exact = optimize.brentq(excess, 0, 100, xtol=1e-10)
    bounds = epsilon(noise_multiplier=sigma, sample_rate=1.0, steps=steps, delta=delta)
    assert bounds.lower <= exact <= bounds.upper
    assert bounds.upper - bounds.lower < 3e-3 * exact
    assert np.isfinite(bounds.upper)
