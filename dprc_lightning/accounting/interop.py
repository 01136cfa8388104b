"""Steps of DP-SGD with randomized clipping in `dp_accounting`: its calibration, its ledger, its other mechanisms.

    >>> from dp_accounting import GaussianDpEvent
    >>> from dprc_lightning.accounting import RandomizedClippingAccountant, RandomizedClippingDpEvent
    >>> accountant = RandomizedClippingAccountant()
    >>> _ = accountant.compose(RandomizedClippingDpEvent(4.215, 64 / 1225, sketch_dim=32), 208)
    >>> round(accountant.get_epsilon(1e-5), 2)
    0.7
    >>> round(accountant.compose(GaussianDpEvent(20.0)).get_epsilon(1e-5), 2)
    0.72

`dprc_lightning.accounting.Accountant` gives three numbers, chooses its grid by itself and needs none of this: use these
classes where the budget is shared with other mechanisms.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import attr
import numpy as np
from dp_accounting import dp_event, privacy_accountant
from dp_accounting.pld import pld_pmf, privacy_loss_distribution
from dp_accounting.pld.pld_privacy_accountant import PLDAccountant

from dprc_lightning.accounting import _validation
from dprc_lightning.accounting.accountant import candidate_steps
from dprc_lightning.accounting.divergence import Divergences
from dprc_lightning.accounting.events import StepEvent
from dprc_lightning.accounting.grid import FINE, IntArray
from dprc_lightning.accounting.law import FloatArray, SensitivityLaw
from dprc_lightning.accounting.privacy_loss import UpperBound
from dprc_lightning.errors import AccountingResourceError

_ADD_OR_REMOVE_ONE = privacy_accountant.NeighboringRelation.ADD_OR_REMOVE_ONE
_Details = privacy_accountant.PrivacyAccountant.CompositionErrorDetails

_NEGLIGIBLE = 1e-4
"""Share of the smallest delta that losses off the grid, and the slack of the convex order, may cost unasked."""
_RANGE_POINTS = 20001
_MAX_POINTS = FINE.max_total_points
"""Memory guard: grid points of everything that one accountant records here."""
_LARGEST_DELTA = 1e-2
"""The convex order is tried wherever it might serve a delta up to here."""


class _Word(str):
    """A string that survives `DpEvent.to_named_tuple`, which rebuilds each sequence from the list of its elements."""

    __slots__ = ()

    def __new__(cls, value: Any) -> "_Word":
        return super().__new__(cls, value if isinstance(value, str) else "".join(value))


def _word(value: Any) -> Any:
    return _Word(value) if isinstance(value, str) else value


@attr.s(frozen=True, slots=True, auto_attribs=True)
class RandomizedClippingDpEvent(dp_event.DpEvent):
    """One step of DP-SGD with randomized clipping; the Poisson sampling is part of it.

    Guarantee: that of `StepEvent`, whose fields these are. As everywhere in `dp_accounting`, no noise at all is an
    event without privacy, not an error. Neighbours are the accountant's affair: it must be one for add or remove.

    Attributes:
        noise_multiplier: sigma >= 0: standard deviation of the noise on the sum over the clipping norm.
        sample_rate: q in (0, 1].
        sketch_dim: k >= 1, the number of columns really drawn; None: every norm is exact.
        projection: As in `StepEvent`.
        bound: As in `StepEvent`.
        estimator: As in `StepEvent`.
        norm_slack: As in `StepEvent`.
        law: As in `StepEvent`.
    """

    noise_multiplier: float
    sample_rate: float
    sketch_dim: int | None = None
    projection: str = attr.ib(default="gaussian", converter=_word)
    bound: str = attr.ib(default="best", converter=_word)
    estimator: str = attr.ib(default="hutchinson", converter=_word)
    norm_slack: float = 0.0
    law: SensitivityLaw | None = None

    def __attrs_post_init__(self) -> None:
        """Validates every field, by name."""
        self.step_event()

    @property
    def is_private(self) -> bool:
        """Whether there is any noise."""
        return isinstance(self.noise_multiplier, bool) or self.noise_multiplier != 0

    def step_event(self) -> StepEvent:
        """The same step for `dprc_lightning.accounting.Accountant`.

        Returns:
            The step; with a noise multiplier of one if this event has none.
        """
        values = {field.name: getattr(self, field.name) for field in attr.fields(type(self))}
        values = {name: str(value) if isinstance(value, str) else value for name, value in values.items()}
        if not self.is_private:
            values["noise_multiplier"] = 1.0
        return StepEvent(**values)

    @classmethod
    def from_step_event(cls, event: StepEvent) -> "RandomizedClippingDpEvent":
        """The event for a step that `dprc_lightning.accounting.Accountant` knows.

        Args:
            event: The step.

        Returns:
            The event for `dp_accounting`.
        """
        names = {field.name for field in attr.fields(cls)}
        return cls(**{f.name: getattr(event, f.name) for f in dataclasses.fields(event) if f.name in names})


class RandomizedClippingAccountant(PLDAccountant):
    """`dp_accounting`'s accountant of privacy loss distributions, which also knows `RandomizedClippingDpEvent`.

    Guarantee: epsilon and delta are upper bounds for the adaptive composition of everything recorded. The steps of one
    call enter together: the certified curve of their composition (`dprc_lightning.accounting.divergence`) is evaluated
    on this accountant's grid of losses, per direction, and its points are connected, which gives a pair of
    distributions that dominates them (arXiv 2207.04380). What was cut off and the rounding of that composition count as
    infinite losses. The target delta is not known when steps are recorded: cuts are shares of ``smallest_delta``, and
    the smaller of the convex order's curve and the envelope's is taken at each order. For a smaller target the numbers
    remain valid, but are loose. What `dp_accounting` then does with the distributions is its own, rounding included.

    Other mechanisms may be interleaved with these steps, adaptively, although the smaller of two curves of T steps is
    no bound on a single one. For one event and direction the supremum over records of the step's curve is convex in
    exp(e), so it is the curve of a pair (A, B), whose reverse is the other direction's. Each law's pair dominates
    (A, B), so the curve of T-fold (A, B) lies below each law's T-fold curve, and below the smaller of them; and
    domination survives products with other mechanisms. This needs that one call holds one event.

    A failure while steps are being recorded leaves an accountant whose epsilon is infinite.

    Args:
        neighboring_relation: Steps with randomized clipping are refused under any other than ADD_OR_REMOVE_ONE.
        value_discretization_interval: The grid of losses of everything recorded.
        smallest_delta: The smallest target that will be asked for; a larger one needs less memory.
    """

    # Of the base class, which is not typed.
    _contains_non_dp_event: bool
    _pld: Any

    def __init__(
        self,
        neighboring_relation: privacy_accountant.NeighboringRelation = _ADD_OR_REMOVE_ONE,
        value_discretization_interval: float = 1e-4,
        smallest_delta: float = 1e-10,
    ) -> None:
        interval = _validation.positive_float("value_discretization_interval", value_discretization_interval)
        self._smallest_delta = _validation.open_unit_float("smallest_delta", smallest_delta)
        self._points = 0
        self._latest: tuple[RandomizedClippingDpEvent, int, _Pair] | None = None
        super().__init__(neighboring_relation, interval)

    @property
    def certified(self) -> bool:
        """Whether the law of each step recorded is proved (see `StepEvent.certified`)."""
        return _certified(self.ledger)

    def _maybe_compose(self, event: dp_event.DpEvent, count: int, do_compose: bool) -> Any:
        if isinstance(event, dp_event.PoissonSampledDpEvent) and isinstance(event.event, RandomizedClippingDpEvent):
            return _Details(event, "RandomizedClippingDpEvent contains its sampling: give it the sample_rate instead.")
        if not isinstance(event, RandomizedClippingDpEvent):
            return super()._maybe_compose(event, count, do_compose)
        if self.neighboring_relation is not _ADD_OR_REMOVE_ONE:
            return _Details(
                event,
                "neighboring_relation must be `ADD_OR_REMOVE_ONE` for RandomizedClippingDpEvent: its proof does not "
                f"cover replace-one. Found {self.neighboring_relation}.",
            )
        if _validation.integer("count", count, 0) == 0:
            return None
        if not event.is_private:
            self._contains_non_dp_event |= do_compose
            return None
        before = self._contains_non_dp_event
        self._contains_non_dp_event |= do_compose  # until everything is in
        # Also when nothing is recorded yet, so that most refusals leave the accountant as it was.
        pair = self._pair(event, count)
        if do_compose:
            pmfs = (
                pld_pmf.create_pmf_pessimistic_connect_dots(self._value_discretization_interval, pair.index, delta)
                for delta in (pair.remove, pair.add)
            )
            steps = privacy_loss_distribution.PrivacyLossDistribution(*(pmf.to_dense_pmf() for pmf in pmfs))
            self._pld = self._pld.compose(steps)
            self._points += pair.index.size
            self._contains_non_dp_event = before
        return None

    def _pair(self, event: RandomizedClippingDpEvent, count: int) -> "_Pair":
        def require_room(points: int) -> None:
            left = _MAX_POINTS - self._points
            if points > left:
                raise AccountingResourceError(
                    f"value_discretization_interval={interval:g}: {count} steps with noise_multiplier="
                    f"{event.noise_multiplier!r} need {points} grid points, more than the {left} that are left; "
                    "choose a larger interval, or a larger smallest_delta"
                )

        interval = self._value_discretization_interval
        # Each event comes twice, to be checked and to be recorded.
        if self._latest is None or self._latest[:2] != (event, count):
            self._latest = event, count, _compose(event, count, interval, self._smallest_delta, require_room)
        require_room(self._latest[2].index.size)
        return self._latest[2]


@dataclasses.dataclass(frozen=True)
class _Pair:
    """Certified curves of composed steps on consecutive grid points, REMOVE and ADD."""

    index: IntArray
    remove: FloatArray
    add: FloatArray


def _compose(
    event: RandomizedClippingDpEvent, count: int, interval: float, delta: float, require_room: Callable[[int], None]
) -> _Pair:
    tight, safe = candidate_steps(event.step_event(), count, count, _LARGEST_DELTA)
    bounds = [UpperBound([tight], delta, FINE)]
    if safe != tight and bounds[0].slack > _NEGLIGIBLE * delta:
        bounds.append(UpperBound([safe], delta, FINE))
    curves = Divergences(bounds)
    low, high = _range(curves, _NEGLIGIBLE * delta)
    first, last = math.floor(low / interval), math.ceil(high / interval)
    require_room(last - first + 1)
    index = np.arange(first, last + 1, dtype=np.int64)
    remove, add = (np.minimum.accumulate(delta) for delta in curves.at(interval * index.astype(np.float64)))
    return _Pair(index, remove, add)


def _range(curves: Divergences, negligible: float) -> tuple[float, float]:
    """Returns orders beyond which the curves are all but constant; what is left out counts as an infinite loss."""
    orders = np.linspace(*curves.losses, _RANGE_POINTS)
    remove, add = curves.at(orders)
    high = np.flatnonzero(np.maximum(remove - remove[-1], add - add[-1]) > negligible)
    # At low orders the divergence of any two distributions is at least 1 - exp(order).
    low = np.flatnonzero(np.maximum(remove, add) + np.expm1(np.minimum(orders, 0.0)) > negligible)
    last = min(int(high[-1]) + 1, orders.size - 1) if high.size else orders.size - 1
    first = max(int(low[0]) - 1, 0) if low.size else 0
    return float(orders[min(first, last)]), float(orders[last])


def _certified(event: dp_event.DpEvent) -> bool:
    if isinstance(event, RandomizedClippingDpEvent):
        return event.step_event().certified
    if isinstance(event, dp_event.SelfComposedDpEvent):
        return _certified(event.event)
    return all(_certified(part) for part in event.events) if isinstance(event, dp_event.ComposedDpEvent) else True
