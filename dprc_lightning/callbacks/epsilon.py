"""Epsilon after each step of a run: composed at a few step counts before the run begins, looked up afterwards."""

import heapq
from bisect import bisect_left
from collections.abc import Sequence

from dprc_lightning.accounting import Accountant, StepEvent
from dprc_lightning.accounting.accountant import History, upper_bounds
from dprc_lightning.accounting.composition import Composer
from dprc_lightning.accounting.events import validate_delta, validate_steps
from dprc_lightning.accounting.grid import COARSE, FINE, Resolution
from dprc_lightning.accounting.privacy_loss import UpperBound
from dprc_lightning.errors import InvalidArgumentError

_FEWEST, _MOST = 64, 128
"""Limits on the number of step counts that are composed."""
_STEPS_PER_MILESTONE = 8
"""Between the limits, one step count is composed for so many steps: all of it stays below a millisecond a step."""
_POINTS = 1 << 22
"""Grid points of all compositions together: little noise needs long grids, and gets fewer milestones."""


class EpsilonLookup:
    """Upper bounds on epsilon so far, for a run that makes no more than ``budget`` steps.

    Guarantee: `after` returns an upper bound for the adaptive composition of ``spent`` and the steps made since, by
    that of `UpperBound`, and never falls as steps are added. Between two composed step counts (milestones) it is the
    bound of the later one: more steps cost no less, whereas an interpolation would need a proof. The bounds inside of
    the run are computed on a coarser grid than the last one, which is as valid and less tight (below one percent).

    The milestones are where epsilon rises most. All of them together cost about a second for a long run.

    Args:
        event: The mechanism of each further step.
        budget: Most steps in the ledger, those of ``spent`` included.
        delta: The target delta in (0, 1).
        spent: What the ledger holds already of other mechanisms, or of this one.

    Raises:
        InvalidArgumentError: A value cannot be used, or ``spent`` is more than the budget.
    """

    def __init__(
        self, event: StepEvent, budget: int, delta: float, spent: Sequence[tuple[StepEvent, int]] = ()
    ) -> None:
        if not isinstance(event, StepEvent):
            raise InvalidArgumentError("event", event, "must be a StepEvent")
        before = Accountant(spent)
        self.budget, delta = validate_steps(budget, name="budget"), validate_delta(delta)
        if before.steps > self.budget:
            raise InvalidArgumentError("budget", budget, f"must be at least the {before.steps} steps spent already")
        self._start, self._milestones, self._epsilons = before.steps, [0], [0.0]
        if self.budget == 0:
            return
        final = _Composed(before.history, event, self.budget - before.steps, delta, FINE).after(self.budget)
        composed = _Composed(before.history, event, self.budget - before.steps, delta, COARSE)
        known = {self._start: composed.after(self._start), self.budget: final}
        _refine(known, composed)
        running = 0.0
        self._milestones, self._epsilons = sorted(known), []
        for milestone in self._milestones:
            # Both are bounds of what costs no more than the whole run, and no less than fewer steps.
            running = min(max(running, known[milestone]), final)
            self._epsilons.append(running)

    @property
    def final(self) -> float:
        """The bound after the whole budget."""
        return self._epsilons[-1]

    def after(self, steps: int) -> float:
        """Upper bound on epsilon so far; a lookup.

        Args:
            steps: Steps in the ledger, those of ``spent`` included. For fewer than those the bound is that of them all.

        Returns:
            The bound; 0 before the first step.

        Raises:
            InvalidArgumentError: More steps than the budget, or no count at all.
        """
        steps = validate_steps(steps)
        if steps > self.budget:
            raise InvalidArgumentError("steps", steps, f"the bounds end at the budget of {self.budget} steps")
        return self._epsilons[bisect_left(self._milestones, steps)]


class _Composed:
    """Upper bounds for any number of steps, from distributions of one step that are made once."""

    def __init__(self, before: History, event: StepEvent, further: int, delta: float, resolution: Resolution) -> None:
        history = Accountant([*before, (event, further)]).history
        self._counts = [count for _, count in history]
        # With nothing further to come the last event of the history stands in: none of it is left out.
        self._own = next((i for i, (known, _) in enumerate(history) if known == event), len(history) - 1)
        self._total = sum(self._counts)
        self._bounds: list[tuple[UpperBound, tuple[Composer, Composer]]] = [
            (bound, bound.composers()) for bound in upper_bounds(history, delta, resolution)
        ]
        self.points = sum(composer.compose(delta=delta).pmf.index.size for _, pair in self._bounds for composer in pair)

    def after(self, steps: int) -> float:
        if steps == 0:
            return 0.0
        counts = list(self._counts)
        counts[self._own] -= self._total - steps
        return min(bound.fast_epsilon(composers, counts) for bound, composers in self._bounds)


def _refine(known: dict[int, float], composed: _Composed) -> None:
    """Halve again and again the gap between two milestones over which epsilon rises most."""
    first, last = min(known), max(known)
    number = min(max(_FEWEST, (last - first) // _STEPS_PER_MILESTONE), _MOST, max(_FEWEST, _POINTS // composed.points))
    gaps: list[tuple[float, int, int]] = []

    def add(low: int, high: int) -> None:
        if high - low > 1:
            heapq.heappush(gaps, (known[low] - known[high], low, high))

    add(first, last)
    while gaps and number > 0:
        _, low, high = heapq.heappop(gaps)
        middle = (low + high) // 2
        known[middle] = composed.after(middle)
        number -= 1
        add(low, middle)
        add(middle, high)
