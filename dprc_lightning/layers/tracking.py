"""What the instrumented layers share: the mode of the pass, the anchor, and the guards of the clipped backward."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from dprc_lightning.errors import LossShapeError, StepOrderError, UnclippedGradientError, UnsupportedModuleError
from dprc_lightning.layers.tracker import ParameterTracker
from dprc_lightning.sketch import Factors, Projections


class Mode(Enum):
    """Which pass is running. ``ctx.needs_input_grad`` cannot tell: it stays True in a restricted `autograd.grad`."""

    IDLE = "idle"
    """Outside of both passes: forwards count uses, backwards are none of ours."""
    NORM = "norm"
    """First backward: layers add norms and compute no weight gradient."""
    CLIP = "clip"
    """Second backward: layers compute weight gradients of the rescaled losses."""


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
        self._scales: Tensor | None = None
        self._carried = torch.zeros(0)
        self._findings: list[tuple[str, Tensor]] = []

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
            self._accumulate(tracker.squared_floor())
            self._accumulate(tracker.finish())
        squared, self._squared = self._squared, None
        return squared

    def start_clipping(self, scales: Tensor, carried: Tensor) -> None:
        """Begin the clipped backward.

        Args:
            scales: What each record's loss is multiplied by, [B].
            carried: Norm of each clipped gradient as a share of C, [B] in [0, 1].
        """
        self._scales, self._carried, self._findings = scales.float(), carried.float(), []
        self.mode = Mode.CLIP

    def check_clipping(self) -> None:
        """After the clipped backward: was it that of the norm pass, and did nothing else reach a parameter?

        Guarantee: the clip factor of a record bounds its contribution only if the second backward is the first one
        times the factor, and if no gradient comes by another way than through the layers whose norms were taken.

        Raises:
            UnclippedGradientError: One of the two does not hold.
        """
        for message, found in self._findings:
            if bool(found):
                raise UnclippedGradientError(message)

    def witness(self, ctx: Any, tracker: ParameterTracker, output_gradient: Tensor) -> None:
        """Called by every layer's backward: the output gradients of both passes must agree up to the factors.

        They do not under a backward that is not linear (a hook that normalises gradients), under dropout that is drawn
        again in a recomputation, or when the losses of the two passes are not the same.

        Args:
            ctx: The autograd node's own context, which lives as long as the graph.
            tracker: The parameter.
            output_gradient: [B, ...].

        Raises:
            StepOrderError: The clipped backward of a graph that no norm pass has seen.
            UnsupportedModuleError: The gradient is in half precision.
        """
        if output_gradient.dtype in (torch.bfloat16, torch.float16):
            raise UnsupportedModuleError(
                f"module {tracker.modules[0]!r}: its output gradient is {output_gradient.dtype}, and what half "
                "precision takes off a norm is not accounted; run the trainable layers in float32 (no autocast)"
            )
        if self.mode is Mode.IDLE:
            return
        sizes = torch.linalg.vector_norm(output_gradient.flatten(1), dim=1, dtype=torch.float32)
        if self.mode is Mode.NORM:
            ctx.sizes = sizes
            return
        if not hasattr(ctx, "sizes") or self._scales is None:
            raise StepOrderError(
                f"module {tracker.modules[0]!r}: no norm pass has seen it; call norms(losses) and clipped_backward("
                "losses, ...) with the same losses of the same forward, and checkpoint with use_reentrant=False"
            )
        scales, carried = self._scales.to(sizes.device), self._carried.to(sizes.device)
        expected = ctx.sizes * scales
        # By how much of C the record's contribution may be off; rounding of a gradient that is all but zero is neither.
        apart = (carried * (sizes - expected).abs() > 0.01 * expected) & ((sizes - expected).abs() > 1e-5 * scales)
        self._findings.append((
            f"module {tracker.modules[0]!r}: its gradients in the clipped backward are not those of the norm pass "
            "times the clip factors; give both the same losses, no hook that changes gradients, and checkpoint with "
            "preserve_rng_state=True",
            apart.any(),
        ))

    def watch(self, tracker: ParameterTracker, gradient: Tensor) -> None:
        """Called with what is about to be added to a parameter's gradient.

        Args:
            tracker: The parameter.
            gradient: Of its shape.
        """
        if self.mode is Mode.CLIP:
            self._findings.append((
                f"parameter {tracker.name!r} got a gradient that does not come from its module's forward (a functional "
                "use, a penalty on the weights, a second-order loss): its norm was not taken; call the module, or "
                "freeze it",
                tracker.foreign(gradient),
            ))

    def abort(self) -> None:
        """Back to idle, with nothing kept; right after either pass, also after an exception."""
        self.mode = Mode.IDLE
        self._squared = self._scales = None
        self._findings = []
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
        sizes = torch.linalg.vector_norm(use.right, dim=-1, dtype=torch.float32)
        if not use.one_hot:
            sizes = sizes * torch.linalg.vector_norm(use.left, dim=-1, dtype=torch.float32)
        tracker.add_terms(sizes.sum(1))
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
        terms = torch.linalg.vector_norm(per_record, dim=tuple(range(per_record.ndim - dims, per_record.ndim)))
        tracker.add_terms(terms.flatten(1).sum(1) if positions else terms)
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

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        # A copy would share the projection's key and be guarded by nothing.
        raise UnsupportedModuleError("an attached model cannot be copied or pickled: call detach() first")


ATTRIBUTE = "_dprc_instrumentation"


def active(module: nn.Module, name: str) -> tuple[PassState, ParameterTracker] | None:
    """Whether this forward must go through an autograd Function for one of the module's parameters.

    Args:
        module: An instrumented module.
        name: Local name of the parameter.

    Returns:
        The pass state and the tracker, or None where the parameter is frozen or no graph is being built.

    Raises:
        UnsupportedModuleError: The module's parameter is not the one that was attached.
    """
    carried: Instrumentation = module.__dict__[ATTRIBUTE]
    tracker = carried.trackers.get(name)
    if tracker is None or not tracker.parameter.requires_grad or not torch.is_grad_enabled():
        return None
    if module._parameters.get(name) is not tracker.parameter:
        raise UnsupportedModuleError(
            f"parameter {tracker.name!r} was replaced or tied after attach(); detach, change the model, attach again"
        )
    carried.state.count_use(tracker)
    return carried.state, tracker
