"""Epsilon of a history of steps: a certified lower bound, an estimate, and the certified upper bound that counts."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from dprc_lightning.accounting.events import StepEvent, validate_delta, validate_steps
from dprc_lightning.accounting.grid import COARSE, FINE, Resolution
from dprc_lightning.accounting.lower_bound import lower_and_estimate
from dprc_lightning.accounting.privacy_loss import Step, UpperBound, slack_per_step
from dprc_lightning.errors import InvalidArgumentError

History = Sequence[tuple[StepEvent, int]]

_MAX_SLACK = 1e-3
"""Share of delta that the convex order's slack may take under bound="best"; above it the envelope is used alone."""
_NEGLIGIBLE_SLACK = 1e-6
"""Share of delta below which the convex order is certainly at least as good: its law is the smaller of the two."""


class EpsilonBounds(NamedTuple):
    """Epsilon at a given delta, bracketed over the worst case of gradients (not this data set's own loss).

    Attributes:
        lower: Certified: some record's gradients really meet this epsilon. 0 where no attained law is known.
        estimate: Best guess at the worst case, between the two.
        upper: Certified (if the event's law is: a law of one's own says so itself);
            the one to report; inf if no finite epsilon can be certified.
    """

    lower: float
    estimate: float
    upper: float


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
    chosen, envelope = [], []
    for event, count in history:
        sigma, q = event.effective_noise_multiplier, event.sample_rate
        tight = Step(event.convex_law(), sigma, q, count)
        safe = Step(event.envelope_law(), sigma, q, count)
        if event.bound == "envelope":
            tight = safe
        elif event.bound == "convex":
            safe = tight
        elif event.sketch_dim is not None and not (
            event.convex_is_proved and total * slack_per_step(tight, delta, total, COARSE) <= _MAX_SLACK * delta
        ):
            tight = safe
        chosen.append(tight)
        envelope.append(safe)
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
    lower, estimate = lower_and_estimate(steps, delta, FINE)
    if len(steps) < len(history):
        estimate = upper
    return min(lower, upper), min(max(lower, estimate), upper)


class Accountant:
    """Composes steps, of one kind or of many, and answers what they cost.

    Guarantee: epsilon's upper bound holds for the adaptive composition of all recorded steps, in any order, as long as
    their number and their mechanisms were not chosen in the light of what they released. Each recorded step needs its
    own fresh sample, noise and projection: noising one and the same batch twice is not two subsampled steps. Getters
    change nothing.

    Args:
        history: Events with their counts, to start from.
    """

    def __init__(self, history: Iterable[tuple[StepEvent, int]] = ()) -> None:
        self._history: list[tuple[StepEvent, int]] = []
        for event, count in history:
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
        return EpsilonBounds(*_lower_and_estimate(self._history, delta, upper), upper)

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
        return min(bound.epsilon() for bound in upper_bounds(self._history, delta, FINE))

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
        remove, add = min((bound.directions() for bound in upper_bounds(self._history, delta, FINE)), key=max)
        return {"remove": remove, "add": add}


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
    InvalidArgumentError that names the argument; a computation beyond the memory guard an AccountingResourceError.

    Args:
        noise_multiplier: sigma > 0.
        delta: In (0, 1).
        sample_rate: q in (0, 1].
        steps: Number of logical steps, >= 0.
        sketch_dim: k >= 1; None: exact clipping.
        projection: Only "gaussian".
        bound: "best", "convex" or "envelope".

    Returns:
        Lower bound, estimate and upper bound.
    """
    event = StepEvent(noise_multiplier, sample_rate, sketch_dim, projection, bound)
    return Accountant([(event, validate_steps(steps))]).epsilon(delta)


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
    counts = [validate_steps(count) for count in steps]
    if not counts or max(counts) == 0:
        return [0.0] * len(counts)
    prepared = [(b, b.composers()) for b in upper_bounds([(event, max(counts))], delta, FINE)]
    known, running = {0: 0.0}, 0.0
    for count in sorted(set(counts) - {0}):
        running = max(running, min(b.fast_epsilon(composers, [count]) for b, composers in prepared))
        known[count] = running
    return [known[count] for count in counts]
