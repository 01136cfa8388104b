"""Epsilon moves the right way in each argument, over the whole supported range: drawn by hypothesis.

Upper bounds of two settings come from two grids, so that they may be out of order by what the grids cost. That is below
a part in a thousand on the fine grid, and two in a hundred on the coarse one, which is used here to draw many cases.
"""

import math
from functools import cache

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from dprc_lightning.accounting import Accountant, StepEvent
from dprc_lightning.accounting.accountant import upper_bounds
from dprc_lightning.accounting.grid import COARSE
from dprc_lightning.errors import AccountingResourceError

TOLERANCE = 0.02
LARGEST = 200.0

few = settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))

sigmas = st.floats(math.log(0.5), math.log(50)).map(math.exp)
rates = st.floats(math.log(1e-6), 0.0).map(lambda x: min(1.0, math.exp(x)))
steps = st.floats(0, math.log(1e5)).map(lambda x: round(math.exp(x)))
deltas = st.floats(math.log(1e-10), math.log(1e-3)).map(math.exp)
dims = st.sampled_from([16, 32, 64, 128, 512])
factors = st.floats(1.05, 4.0)


@cache
def upper(sigma: float, q: float, count: int, k: int | None, delta: float, bound: str = "best") -> float:
    event = StepEvent(sigma, q, k, bound=bound)
    try:
        return min(b.fast_epsilon(b.composers()) for b in upper_bounds([(event, count)], delta, COARSE))
    except AccountingResourceError:
        return math.inf


def ordered(less: float, more: float) -> bool:
    """Compared where it is promised: not both infinite or beyond the supported range."""
    assume(less <= LARGEST)
    return less <= more * (1 + TOLERANCE) + 1e-9


@few
@given(sigmas, rates, steps, dims, deltas, factors)
def test_more_noise_is_more_private(sigma: float, q: float, count: int, k: int, delta: float, factor: float) -> None:
    assert ordered(upper(sigma * factor, q, count, k, delta), upper(sigma, q, count, k, delta))


@few
@given(sigmas, rates, steps, dims, deltas, factors)
def test_sampling_less_is_more_private(sigma: float, q: float, count: int, k: int, delta: float, factor: float) -> None:
    assert ordered(upper(sigma, q / factor, count, k, delta), upper(sigma, q, count, k, delta))


@few
@given(sigmas, rates, steps, dims, deltas, st.integers(2, 9))
def test_fewer_steps_are_more_private(sigma: float, q: float, count: int, k: int, delta: float, factor: int) -> None:
    assert ordered(upper(sigma, q, count, k, delta), upper(sigma, q, count * factor, k, delta))


@few
@given(sigmas, rates, steps, dims, deltas, factors)
def test_a_larger_delta_needs_less(sigma: float, q: float, count: int, k: int, delta: float, factor: float) -> None:
    assert ordered(upper(sigma, q, count, k, delta * factor), upper(sigma, q, count, k, delta))


@few
@given(sigmas, rates, steps, dims, deltas, st.sampled_from([2, 4, 16]))
def test_a_larger_sketch_is_more_private(sigma: float, q: float, count: int, k: int, delta: float, factor: int) -> None:
    assert ordered(upper(sigma, q, count, k * factor, delta), upper(sigma, q, count, k, delta))


@settings(few, max_examples=15)
@given(sigmas, rates, steps, dims, deltas)
def test_the_envelope_costs_most_and_exact_norms_least(
    sigma: float, q: float, count: int, k: int, delta: float
) -> None:
    best = upper(sigma, q, count, k, delta)
    assert ordered(best, upper(sigma, q, count, k, delta, "envelope"))
    assert ordered(upper(sigma, q, count, None, delta), best)


@settings(few, max_examples=8)
@given(sigmas, rates, steps, st.sampled_from([None, 32, 128]), deltas)
def test_the_three_numbers_are_in_order(sigma: float, q: float, count: int, k: int | None, delta: float) -> None:
    assume(upper(sigma, q, count, k, delta) <= LARGEST)
    bounds = Accountant([(StepEvent(sigma, q, k), count)]).epsilon(delta)
    assert 0 <= bounds.lower <= bounds.estimate <= bounds.upper
    # The coarse bound is a bound too, so it lies above the fine one's lower bound.
    assert bounds.lower <= upper(sigma, q, count, k, delta)
    assert bounds.upper <= upper(sigma, q, count, k, delta) * (1 + 1e-3) + 1e-9
