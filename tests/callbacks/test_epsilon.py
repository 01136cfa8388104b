"""The lookup against the accountant that composes every history anew, by another implementation."""

import math
import time

import pytest

from dprc_lightning.accounting import Accountant, StepEvent
from dprc_lightning.callbacks.epsilon import EpsilonLookup
from dprc_lightning.errors import InvalidArgumentError

DELTA = 1e-5
EXACT = StepEvent(noise_multiplier=1.0, sample_rate=0.02)
SKETCHED = StepEvent(noise_multiplier=1.1, sample_rate=0.02, sketch_dim=16)
# What two compositions of one distribution may differ by.
ROUNDING = 1 - 5e-5


def composed(*history):
    return Accountant(history).upper(DELTA)


@pytest.mark.parametrize("event", [EXACT, StepEvent(2.0, 0.1, 16, bound="envelope")])
def test_a_short_run_has_the_bound_of_each_step(event):
    lookup = EpsilonLookup(event, 4, DELTA)
    for steps in range(1, 5):
        certified = composed((event, steps))
        assert certified * ROUNDING <= lookup.after(steps) <= certified * 1.02, steps
    assert lookup.final == lookup.after(4) == pytest.approx(composed((event, 4)), rel=1e-4)


@pytest.mark.parametrize("event", [EXACT, SKETCHED])
def test_a_long_run_is_bounded_everywhere_and_tightly(event):
    budget = 500
    lookup = EpsilonLookup(event, budget, DELTA)
    values = [lookup.after(steps) for steps in range(budget + 1)]
    assert values == sorted(values) and values[0] == 0.0 < values[1]
    assert len(set(values)) > 20
    for steps in (37, 333, 500):
        certified = composed((event, steps))
        assert certified * ROUNDING <= values[steps] <= certified + 0.05 * lookup.final, steps
    assert lookup.final == pytest.approx(certified, rel=1e-4)


def test_steps_spent_under_another_mechanism_are_composed_too():
    lookup = EpsilonLookup(EXACT, 80, DELTA, [(SKETCHED, 30), (EXACT, 10)])
    before = composed((SKETCHED, 30), (EXACT, 10))
    assert before * ROUNDING <= lookup.after(40) <= before * 1.02
    assert lookup.after(0) == lookup.after(7) == lookup.after(40), "an earlier ledger is not told apart"
    for steps in (60, 80):
        certified = composed((SKETCHED, 30), (EXACT, steps - 30))
        assert certified * ROUNDING <= lookup.after(steps) <= certified * 1.06, steps
    assert lookup.final > EpsilonLookup(EXACT, 50, DELTA).final


@pytest.mark.parametrize("spent", [[(SKETCHED, 30)], [(EXACT, 30)]])
def test_a_spent_budget_has_its_bound(spent):
    lookup = EpsilonLookup(EXACT, 30, DELTA, spent)
    assert lookup.after(30) == lookup.final == pytest.approx(composed(*spent), rel=1e-4)


def test_so_little_noise_that_nothing_finite_is_certified():
    lookup = EpsilonLookup(StepEvent(0.1, 1.0, 1), 1, 1e-6)
    assert lookup.after(1) == lookup.final == math.inf


def test_no_steps_cost_nothing():
    assert EpsilonLookup(EXACT, 0, DELTA).after(0) == EpsilonLookup(EXACT, 0, DELTA).final == 0.0


def test_beyond_the_budget_there_is_no_bound():
    lookup = EpsilonLookup(EXACT, 5, DELTA)
    with pytest.raises(InvalidArgumentError, match="steps=6: the bounds end at the budget of 5 steps"):
        lookup.after(6)
    with pytest.raises(InvalidArgumentError, match="steps=-1"):
        lookup.after(-1)
    with pytest.raises(InvalidArgumentError, match="budget=5: must be at least the 6 steps spent already"):
        EpsilonLookup(EXACT, 5, DELTA, [(SKETCHED, 6)])
    with pytest.raises(InvalidArgumentError, match="delta=2"):
        EpsilonLookup(EXACT, 5, 2)
    with pytest.raises(InvalidArgumentError, match="event="):
        EpsilonLookup("gaussian", 5, DELTA)


def test_a_lookup_costs_nothing_next_to_a_step():
    lookup = EpsilonLookup(EXACT, 200, DELTA)
    started = time.process_time()
    for _ in range(100):
        lookup.after(123)
    assert (time.process_time() - started) / 100 < 1e-3
