"""What the instrumented layers share: the mode of the pass, the anchor, and one tracker per trainable parameter."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

import torch
from torch import Tensor, nn

from dprc_lightning.errors import LossShapeError, StepOrderError
from dprc_lightning.sketch import Factors, Projections, sketch, squared_norms
from dprc_lightning.sketch.hutchinson import Side


class Mode(Enum):
    """Which pass is running. ``ctx.needs_input_grad`` cannot tell: it stays True in a restricted `autograd.grad`."""

    IDLE = "idle"
    """Outside of both passes: forwards count uses, backwards are none of ours."""
    NORM = "norm"
    """First backward: layers add norms and compute no weight gradient."""
    CLIP = "clip"
    """Second backward: layers compute weight gradients of the rescaled losses."""


Kind = Literal["matrix", "vector"]
ParameterEstimator = Literal["exact", "hutchinson"]


@dataclass(eq=False)
class ParameterTracker:
    """One trainable parameter: how its per-record gradient norm is had, and what arrived for it in this pass.

    Attributes:
        name: First name in ``model.named_parameters()``: part of the key of P.
        parameter: The parameter itself.
        kind: ``matrix`` (two factors) or ``vector`` (its per-record gradient is small and summed as it is).
        estimator: ``exact`` or ``hutchinson``.
        side: The axis that P contracts; unused where exact.
        modules: Names of the modules that own it; more than one where tied.
        forward_uses: Uses seen in forwards since the last norm pass.
        contributions: Uses that reached the loss in the last norm pass.
    """

    name: str
    parameter: nn.Parameter
    kind: Kind
    estimator: ParameterEstimator
    side: Side
    modules: list[str] = field(default_factory=list)
    forward_uses: int = 0
    contributions: int = 0
    _expected: int = 0
    _sum: Tensor | None = None
    _uses: list[Factors] = field(default_factory=list)

    def start(self) -> None:
        """Begin a norm pass: uses counted in the forward are now expected, and counting starts anew."""
        self._expected, self.forward_uses = self.forward_uses, 0
        self.clear()
        self.contributions = 0

    def clear(self) -> None:
        """Drop everything that was kept for the squared norm."""
        self._sum = None
        self._uses = []

    def _arrived(self) -> bool:
        """Count one contribution.

        Returns:
            Whether it may be squared at once: only a parameter with exactly one counted use can.

        Raises:
            StepOrderError: A second contribution to a parameter whose first was squared already.
        """
        self.contributions += 1
        if self._expected == 1 and self.contributions > 1:
            raise StepOrderError(
                f"parameter {self.name!r}: its forward was counted once but reaches the loss {self.contributions} "
                "times; call norms(losses) right after the forward that made the losses"
            )
        return self._expected == 1

    def add_factors(self, use: Factors, projections: Projections) -> Tensor | None:
        """Add one use of a matrix.

        Args:
            use: Its factors.
            projections: Where P comes from.

        Returns:
            Squared norms [B], float32, if they are complete already, else None.
        """
        complete = self._arrived()
        if self.estimator == "exact":
            if complete:
                return squared_norms([use])
            self._uses.append(use)
            return None
        projection = projections.matrix(self.name, self.parameter.shape[self.side], use.right.device)
        return self._add(sketch(use, projection, self.side), complete)

    def add_vector(self, per_record: Tensor) -> Tensor | None:
        """Add one use of a vector.

        Args:
            per_record: Its per-record gradients [B, ...], float32.

        Returns:
            Squared norms [B], float32, if they are complete already, else None.
        """
        return self._add(per_record, self._arrived())

    def _add(self, value: Tensor, complete: bool) -> Tensor | None:
        if complete:
            return value.square().flatten(1).sum(1)
        self._sum = value if self._sum is None else self._sum + value
        return None

    def finish(self) -> Tensor | None:
        """Square what was kept over several uses.

        Returns:
            Squared norms [B], float32, or None if nothing was kept.
        """
        squared = None
        if self._uses:
            squared = squared_norms(self._uses)
        elif self._sum is not None:
            squared = self._sum.square().flatten(1).sum(1)
        self.clear()
        return squared


class PassState:
    """One per attached model, shared by all its instrumented modules.

    Args:
        trackers: Parameter name -> tracker.
        projections: Where P comes from.
    """

    def __init__(self, trackers: Mapping[str, ParameterTracker], projections: Projections) -> None:
        self.trackers = dict(trackers)
        self.projections = projections
        self.mode = Mode.IDLE
        self.anchors: dict[torch.device, Tensor] = {}
        self._squared: Tensor | None = None
        self._records = 0

    def anchor(self, device: torch.device) -> Tensor:
        """A scalar that every instrumented op takes, and the only input asked of `autograd.grad` in the norm pass.

        So the pass runs exactly the trainable ops and what lies above them, and no parameter's `.grad` is touched: no
        reduction hook of any engine fires.

        Args:
            device: Where the op runs.

        Returns:
            A leaf scalar, float32, that requires grad.
        """
        if device not in self.anchors:
            self.anchors[device] = torch.zeros((), device=device, requires_grad=True)
        return self.anchors[device]

    def count_use(self, tracker: ParameterTracker) -> None:
        """Called by a forward. A checkpoint's recomputation happens inside a pass and is not a second use."""
        if self.mode is Mode.IDLE:
            tracker.forward_uses += 1

    def start_norms(self, records: int) -> None:
        """Begin the norm pass of a micro-batch of ``records`` records."""
        for tracker in self.trackers.values():
            tracker.start()
        self._squared, self._records = None, records
        self.mode = Mode.NORM

    @torch.no_grad()  # the kept factors are part of the user's graph; the norms are not
    def finish_norms(self) -> Tensor | None:
        """End the norm pass.

        Returns:
            Squared norms of the whole gradient [B], float32; None if no parameter contributed.
        """
        for tracker in self.trackers.values():
            self._accumulate(tracker.finish())
        squared, self._squared = self._squared, None
        return squared

    def abort(self) -> None:
        """Back to idle, with nothing kept; right after either pass, also after an exception."""
        self.mode = Mode.IDLE
        self._squared = None
        for tracker in self.trackers.values():
            tracker.clear()

    def add_factors(self, tracker: ParameterTracker, left: Tensor, right: Tensor) -> None:
        """Called by a matrix layer's backward in the norm pass.

        Args:
            tracker: The parameter.
            left: [B, ..., n0] floating, or ids [B, ...].
            right: [B, ..., n1] floating.
        """
        self._check_batch(tracker, right, trailing=1)
        n0, n1 = tracker.parameter.shape
        # Not -1: a micro-batch may be empty.
        rows = right.shape[1:-1].numel()
        left = left.reshape(self._records, rows, *left.shape[-1:] if left.is_floating_point() else ())
        use = Factors(left, right.reshape(self._records, rows, n1), (n0, n1))
        self._accumulate(tracker.add_factors(use, self.projections))

    def add_vector(self, tracker: ParameterTracker, per_position: Tensor) -> None:
        """Called by a vector parameter's backward in the norm pass.

        Args:
            tracker: The parameter, of shape [*s].
            per_position: Its gradient before any sum, [B, ..., *s]; summed here over all positions, in float32.
        """
        dims = tracker.parameter.ndim
        self._check_batch(tracker, per_position, trailing=dims)
        positions = tuple(range(1, per_position.ndim - dims))
        per_record = per_position.float()
        self._accumulate(tracker.add_vector(per_record.sum(positions) if positions else per_record))

    def _check_batch(self, tracker: ParameterTracker, value: Tensor, trailing: int) -> None:
        if value.ndim <= trailing or value.shape[0] != self._records:
            raise LossShapeError(
                f"module {tracker.modules[0]!r}: its output has shape {tuple(value.shape)} but there are "
                f"{self._records} losses; the first dimension of every trainable layer's input must be the record"
            )

    def _accumulate(self, squared: Tensor | None) -> None:
        if squared is not None:
            self._squared = squared if self._squared is None else self._squared + squared.to(self._squared.device)


@dataclass(frozen=True)
class Instrumentation:
    """What an instrumented module carries, in its ``__dict__`` and so outside of its state dict.

    Attributes:
        state: The model's pass state.
        trackers: Local parameter name (``weight``) -> tracker, for the trainable ones.
        original_class: To go back to.
    """

    state: PassState
    trackers: Mapping[str, ParameterTracker]
    original_class: type[nn.Module]


ATTRIBUTE = "_dprc_instrumentation"


def active(module: nn.Module, name: str) -> tuple[PassState, ParameterTracker] | None:
    """Whether this forward must go through an autograd Function for one of the module's parameters.

    Args:
        module: An instrumented module.
        name: Local name of the parameter.

    Returns:
        The pass state and the tracker, or None where the parameter is frozen or no graph is being built.
    """
    carried: Instrumentation = module.__dict__[ATTRIBUTE]
    tracker = carried.trackers.get(name)
    if tracker is None or not tracker.parameter.requires_grad or not torch.is_grad_enabled():
        return None
    carried.state.count_use(tracker)
    return carried.state, tracker
