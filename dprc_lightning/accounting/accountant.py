"""Epsilon of a history of steps: a certified lower bound, an estimate, and the certified upper bound that counts."""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from dprc_lightning.accounting import _validation, tradeoff
from dprc_lightning.accounting.divergence import Divergences
from dprc_lightning.accounting.events import StepEvent, validate_delta, validate_steps
from dprc_lightning.accounting.grid import COARSE, FINE, Resolution, resolution_for
from dprc_lightning.accounting.history import history_from_dict, history_from_json, history_to_dict
from dprc_lightning.accounting.law import Order
from dprc_lightning.accounting.lower_bound import lower_and_estimate
from dprc_lightning.accounting.privacy_loss import Step, UpperBound, slack_per_step
from dprc_lightning.accounting.rademacher import require_enough_columns
from dprc_lightning.errors import InvalidArgumentError

History = Sequence[tuple[StepEvent, int]]

_MAX_SLACK = 1e-3
"""Share of delta that the convex order's slack may take under bound="best"; above it the envelope is used alone."""
_NEGLIGIBLE_SLACK = 1e-6
"""Share of delta below which the convex order is certainly at least as good: its law is the smaller of the two."""
_SMALLEST_DELTA = 1e-13
"""Below it the rounding of the composition is what counts: bounding for a smaller delta gains nothing."""


class _Bounds(NamedTuple):
    lower: float
    estimate: float
    upper: float


class EpsilonBounds(_Bounds):
    """Epsilon at a given delta, bracketed over the worst case of gradients (not this data set's own loss).

    A tuple of exactly three numbers, compared as such; `certified` says what the upper one rests on.

    Attributes:
        lower: Certified: some record's gradients really meet this epsilon. 0 where no attained law is known.
        estimate: Best guess at the worst case, between the two.
        upper: The one to report; inf if no finite epsilon can be given. A guarantee if `certified`.
        certified: Whether every law behind the upper bound is proved: not for a Rademacher sketch, nor for a law of
            one's own that says so.
    """

    certified: bool = False

    def __new__(cls, lower: float, estimate: float, upper: float, certified: bool = True) -> "EpsilonBounds":
        """Returns the three numbers with their flag."""
        self = super().__new__(cls, lower, estimate, upper)
        self.certified = certified
        return self

    def _replace(self, **changes: Any) -> "EpsilonBounds":
        return EpsilonBounds(**{**self._asdict(), "certified": self.certified, **changes})

    def __getnewargs__(self) -> tuple[float, float, float, bool]:
        return (*self, self.certified)

    def __repr__(self) -> str:
        return f"{super().__repr__()[:-1]}, certified={self.certified})"


def candidate_steps(event: StepEvent, count: int, total: int, delta: float) -> tuple[Step, Step]:
    """The laws that bound an event: the tighter one, where its slack is bearable at this delta, and the envelope.

    Guarantee: either is valid for every delta; ``delta`` and ``total`` decide only which is tighter.

    Args:
        event: The mechanism.
        count: How many such steps.
        total: Number of all steps composed.
        delta: The target delta.

    Returns:
        The step under the law that was chosen, and under the one without slack; both the same where ``event.bound``
        names one.
    """
    sigma, q = event.effective_noise_multiplier, event.sample_rate
    tight = Step(event.convex_law(), sigma, q, count)
    safe = Step(event.envelope_law(), sigma, q, count)
    if event.bound == "envelope":
        tight = safe
    elif event.bound == "convex":
        safe = tight
    elif tight.law.order is Order.CONVEX and not (
        event.convex_is_proved and total * slack_per_step(tight, delta, total, COARSE) <= _MAX_SLACK * delta
    ):
        tight = safe
    return tight, safe


def upper_bounds(history: History, delta: float, resolution: Resolution) -> Iterator[UpperBound]:
    """Upper bounds that hold for a history; the smallest epsilon among them is the answer.

    Guarantee: each candidate is valid by itself, so their minimum is. For bound="best" the convex order is used where
    it is proved and its slack over all steps is below delta / 1000, the envelope elsewhere; unless the slack is
    negligible, the envelope for all steps is a second candidate.

    Args:
        history: Events with their counts, at least one.
        delta: The target delta.
        resolution: How fine the computation is.

    Yields:
        One or two bounds.
    """
    total = sum(count for _, count in history)
    pairs = [candidate_steps(event, count, total, delta) for event, count in history]
    chosen, envelope = [tight for tight, _ in pairs], [safe for _, safe in pairs]
    first = UpperBound(chosen, delta, resolution)
    yield first
    if chosen != envelope and first.slack > _NEGLIGIBLE_SLACK * delta:
        yield UpperBound(envelope, delta, resolution)


def _lower_and_estimate(history: History, delta: float, upper: float) -> tuple[float, float]:
    steps = []
    for event, count in history:
        law = event.attained_law()
        if law is None:
            # Leaving steps out keeps the lower bound valid: it is post-processing.
            continue
        steps.append(Step(law, event.noise_multiplier, event.sample_rate, count))
    if not steps:
        return 0.0, upper
    lower, estimate = lower_and_estimate(steps, delta, resolution_for(len(steps)))
    if len(steps) < len(history):
        estimate = upper
    return min(lower, upper), min(max(lower, estimate), upper)


def _delta_to_bound_for(history: History, order: float) -> float:
    """Returns about the history's delta at an order, at which to bound it: what is cut off is a share of it."""
    target = 1e-3
    while True:
        curves = Divergences(upper_bounds(history, target, COARSE))
        found = max(float(curve[0]) for curve in curves.at(np.array([order])))
        if found >= target / 10 or target <= _SMALLEST_DELTA:
            return min(max(found, _SMALLEST_DELTA), 0.5)
        target = max(found, _SMALLEST_DELTA)


class Accountant:
    """Composes steps, of one kind or of many, and answers what they cost.

    Guarantee: epsilon's upper bound holds for the adaptive composition of all recorded steps, in any order, as long as
    their number and their mechanisms were not chosen in the light of what they released. Each recorded step needs its
    own fresh sample, noise and projection: noising one and the same batch twice is not two subsampled steps. Getters
    change nothing.

    Args:
        history: Events with their counts, to start from.

    Raises:
        InvalidArgumentError: If it holds anything else.
    """

    def __init__(self, history: Iterable[tuple[StepEvent, int]] = ()) -> None:
        self._history: list[tuple[StepEvent, int]] = []
        try:
            entries = [(event, count) for event, count in history]
        except InvalidArgumentError:
            # What makes the history has told what is wrong.
            raise
        except (TypeError, ValueError):
            raise InvalidArgumentError("history", history, "must be pairs of a StepEvent and a count") from None
        for event, count in entries:
            self.compose(event, count)

    def compose(self, event: StepEvent, count: int = 1) -> "Accountant":
        """Records steps.

        Args:
            event: The mechanism of each.
            count: How many, >= 0.

        Returns:
            The accountant itself.

        Raises:
            InvalidArgumentError: If ``event`` is no StepEvent or ``count`` no integer >= 0.
        """
        if not isinstance(event, StepEvent):
            raise InvalidArgumentError("event", event, "must be a StepEvent")
        count = validate_steps(count, name="count")
        if count == 0:
            return self
        for i, (known, before) in enumerate(self._history):
            if known == event:
                self._history[i] = (known, before + count)
                return self
        self._history.append((event, count))
        return self

    @property
    def history(self) -> tuple[tuple[StepEvent, int], ...]:
        """The recorded events with their counts, equal events merged."""
        return tuple(self._history)

    @property
    def steps(self) -> int:
        """Number of recorded steps."""
        return sum(count for _, count in self._history)

    @property
    def _resolution(self) -> Resolution:
        return resolution_for(len(self._history))

    def __repr__(self) -> str:
        kinds = "".join(f", {count} x {event}" for event, count in self._history)
        return f"Accountant({self.steps} steps{kinds})"

    @property
    def certified(self) -> bool:
        """Whether the law of every recorded step is proved; True before the first step."""
        return all(event.certified for event, _ in self._history)

    def epsilon(self, delta: float) -> EpsilonBounds:
        """What the recorded steps cost.

        A delta outside (0, 1) is an InvalidArgumentError; a history that no grid within the memory guard (2 GB) holds
        is an AccountingResourceError.

        Args:
            delta: The target delta in (0, 1).

        Returns:
            Lower bound, estimate and upper bound; zeros before the first step.
        """
        delta = validate_delta(delta)
        if not self._history:
            return EpsilonBounds(0.0, 0.0, 0.0)
        upper = self.upper(delta)
        return EpsilonBounds(*_lower_and_estimate(self._history, delta, upper), upper, self.certified)

    def upper(self, delta: float) -> float:
        """The certified upper bound of `epsilon`, without the work for the other two numbers.

        Args:
            delta: The target delta in (0, 1).

        Returns:
            Upper bound on epsilon; 0 before the first step.
        """
        delta = validate_delta(delta)
        if not self._history:
            return 0.0
        return min(bound.epsilon() for bound in upper_bounds(self._history, delta, self._resolution))

    def directions(self, delta: float) -> dict[str, float]:
        """What the recorded steps cost a record that is removed, and one that is added.

        Guarantee: each number is a certified upper bound for its direction alone; add/remove-one privacy is their
        maximum, which is the upper bound of `epsilon`. Where several laws bound the steps, both numbers come from the
        one law that gives that upper bound, so that they fit each other; another law may bound the better direction
        more tightly.

        Args:
            delta: The target delta in (0, 1).

        Returns:
            Upper bounds on epsilon under "remove" and "add"; zeros before the first step.
        """
        delta = validate_delta(delta)
        if not self._history:
            return {"remove": 0.0, "add": 0.0}
        remove, add = min(
            (bound.directions() for bound in upper_bounds(self._history, delta, self._resolution)), key=max
        )
        return {"remove": remove, "add": add}

    def delta(self, epsilon: ArrayLike) -> Any:
        """The certified upper bound on delta at given epsilons.

        Guarantee: the recorded steps are (epsilon, delta)-differentially private at each epsilon >= 0 that is asked
        for. A negative epsilon is answered too: the divergence at that order, at least 1 - exp(epsilon), of which the
        trade-off function is made. Consistent with `epsilon`: at its upper bound for d this is at most d, up to the
        rounding of two compositions.

        Args:
            epsilon: Values, not NaN, any shape.

        Returns:
            Upper bounds on delta in [0, 1]: a float for a scalar, an array of the same shape otherwise.

        """
        # Anything else is an InvalidArgumentError.
        remedy = "must be a number or an array of numbers, not NaN"
        orders = _validation.numbers("epsilon", epsilon, remedy)
        if not self._history or not orders.size:
            values = -np.expm1(np.minimum(orders, 0.0))
        else:
            target = _delta_to_bound_for(self._history, float(orders.max()))
            remove, add = Divergences(upper_bounds(self._history, target, self._resolution)).at(orders.ravel())
            values = np.maximum(remove, add).reshape(orders.shape)
        return tradeoff.shaped_like(values, epsilon)

    def tradeoff_function(self, alpha: ArrayLike, direction: str | None = None) -> Any:
        """How small the error rates of any test for one record's presence can be, given all that the steps released.

        Guarantee: a test with false-positive rate at most alpha has false-negative rate at least f(alpha): with
        direction "remove" where the null hypothesis is that the record was absent, with "add" where it is that it was
        present, and by default in either case. f is convex, nonincreasing and at most 1 - alpha. It comes from the same
        certified curves as `epsilon` (`dprc_lightning.accounting.tradeoff`).

        Args:
            alpha: False-positive rates in [0, 1], any shape; anything else is an InvalidArgumentError.
            direction: "remove", "add" or None.

        Returns:
            Lower bounds on the false-negative rate: a float for a scalar, an array of the same shape otherwise.
        """
        levels = tradeoff.validate_levels(alpha)
        if direction is not None:
            _validation.choice("direction", direction, tradeoff.DIRECTIONS)
        if not self._history:
            values = tradeoff.without_steps(levels)
        else:
            curves = Divergences(upper_bounds(self._history, tradeoff.target_delta(levels), self._resolution))
            values = tradeoff.smallest_false_negative_rate(levels, curves, direction)
        return tradeoff.shaped_like(values, alpha)

    def to_dict(self) -> dict[str, Any]:
        """The history as plain JSON values; an event with a law of one's own is an InvalidArgumentError.

        Returns:
            A version and the events with their counts.
        """
        return history_to_dict(self._history)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Accountant":
        """The accountant that `to_dict` wrote.

        Args:
            values: The plain values; anything unknown, missing or unusable is an InvalidArgumentError.

        Returns:
            An accountant with the same history.
        """
        return cls(history_from_dict(values))

    def to_json(self) -> str:
        """The history as a JSON text.

        Returns:
            One line; numbers are written so that they are read back exactly.
        """
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, text: str | bytes) -> "Accountant":
        """The accountant whose history a JSON text holds.

        Args:
            text: What `to_json` wrote; damage is an InvalidArgumentError.

        Returns:
            An accountant with the same history.
        """
        return cls(history_from_json(text))


def epsilon(
    *,
    noise_multiplier: float,
    delta: float,
    sample_rate: float,
    steps: int,
    sketch_dim: int | None = None,
    projection: str = "gaussian",
    bound: str = "best",
) -> EpsilonBounds:
    """Epsilon of DP-SGD with Poisson sampling and exact or randomized clipping.

    Guarantee: that of `StepEvent` and `Accountant`, for ``steps`` equal steps. A value that cannot be used is an
    InvalidArgumentError that names the argument; a computation beyond the memory guard an AccountingResourceError. So
    is a Rademacher sketch with too few columns for any finite epsilon: the InvalidArgumentError names ``sketch_dim``.

    Args:
        noise_multiplier: sigma > 0.
        delta: In (0, 1).
        sample_rate: q in (0, 1].
        steps: Number of logical steps, >= 0.
        sketch_dim: k >= 1; None: exact clipping.
        projection: "gaussian", or "rademacher", which is not certified.
        bound: "best", "convex" or "envelope".

    Returns:
        Lower bound, estimate and upper bound, and whether they are certified.
    """
    event = StepEvent(noise_multiplier, sample_rate, sketch_dim, projection, bound)
    bounds = Accountant([(event, validate_steps(steps))]).epsilon(delta)
    if math.isinf(bounds.upper) and event.projection == "rademacher" and event.sketch_dim is not None:
        require_enough_columns(event.sketch_dim, event.noise_multiplier, event.sample_rate, steps, delta)
    return bounds


def tradeoff_function(
    alpha: ArrayLike,
    *,
    noise_multiplier: float,
    sample_rate: float,
    steps: int,
    sketch_dim: int | None = None,
    projection: str = "gaussian",
    bound: str = "best",
) -> Any:
    """Smallest false-negative rate of any test for one record's presence, at given false-positive rates.

    Guarantee: that of `Accountant.tradeoff_function` for ``steps`` equal steps, whichever hypothesis is the null.

    Args:
        alpha: False-positive rates in [0, 1], any shape.
        noise_multiplier: sigma > 0.
        sample_rate: q in (0, 1].
        steps: Number of logical steps, >= 0.
        sketch_dim: k >= 1; None: exact clipping.
        projection: As in `StepEvent`.
        bound: "best", "convex" or "envelope".

    Returns:
        Lower bounds on the false-negative rate: a float for a scalar, an array of the same shape otherwise.
    """
    event = StepEvent(noise_multiplier, sample_rate, sketch_dim, projection, bound)
    return Accountant([(event, validate_steps(steps))]).tradeoff_function(alpha)


def epsilon_schedule(event: StepEvent, steps: Sequence[int], delta: float) -> list[float]:
    """Upper bounds on epsilon after each of many step counts, at little more than the cost of one.

    Guarantee: each entry is an upper bound for that many steps; entries never fall with the number of steps. The
    one-step distribution is built once, for the largest count, which is pessimistic for the smaller ones.

    Args:
        event: The mechanism of each step.
        steps: Step counts >= 0, in any order, shape [n].
        delta: The target delta in (0, 1).

    Returns:
        Upper bounds in the order of ``steps``, shape [n].

    Raises:
        InvalidArgumentError: If a value cannot be used.
    """
    if not isinstance(event, StepEvent):
        raise InvalidArgumentError("event", event, "must be a StepEvent")
    delta = validate_delta(delta)
    if not isinstance(steps, Iterable):
        raise InvalidArgumentError("steps", steps, "must be a sequence of integers >= 0")
    counts = [validate_steps(count) for count in steps]
    if not counts or max(counts) == 0:
        return [0.0] * len(counts)
    prepared = [(b, b.composers()) for b in upper_bounds([(event, max(counts))], delta, FINE)]
    known, running = {0: 0.0}, 0.0
    for count in sorted(set(counts) - {0}):
        running = max(running, min(b.fast_epsilon(composers, [count]) for b, composers in prepared))
        known[count] = running
    return [known[count] for count in counts]
