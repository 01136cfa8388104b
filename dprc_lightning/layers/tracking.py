"""What the instrumented layers share: the mode of the pass, the anchor, and the guards of the clipped backward."""

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from dprc_lightning.errors import LossShapeError, StepOrderError, UnclippedGradientError, UnsupportedModuleError
from dprc_lightning.layers.parts import Parts
from dprc_lightning.layers.tracker import ParameterTracker, Uses
from dprc_lightning.layers.use import MatrixUse, VectorUse
from dprc_lightning.sketch import Factors, Projections

if TYPE_CHECKING:
    from dprc_lightning.layers.normed import Normed

MISMATCH = 1e-4
"""By how much of S, the sum of the norms of a record's terms, S itself and a random functional of the gradient may
differ between the two passes, in float32. On a CPU they are the same bit for bit; other devices may add up in another
order."""
HALF_MISMATCH = 2.0**-8
"""The same where the output gradient is bfloat16."""
ROUNDING_OF_C = 1e-5
"""And by how much of C, for gradients that are nothing but rounding."""


class Mode(Enum):
    """Which pass is running. ``ctx.needs_input_grad`` cannot tell: it stays True in a restricted `autograd.grad`."""

    IDLE = "idle"
    """Outside of both passes: forwards count uses, backwards are none of ours."""
    NORM = "norm"
    """First backward: layers add norms and compute no weight gradient."""
    ISOLATE = "isolate"
    """A backward of some losses alone: layers look whether the other records' rows stay zero, and compute nothing."""
    CLIP = "clip"
    """Second backward: layers compute weight gradients, each record's times its clip factor."""


class Shown(Enum):
    """What the modules find in the place of their parameters while they run."""

    ITSELF = "itself"
    """The parameters."""
    WHOLE = "whole"
    """Of each sharded parameter a whole copy: one tensor, where gradients accumulate (FSDP2)."""
    VIEWS = "views"
    """Of a flat parameter another view in each forward, through which gradients only pass (FSDP1)."""


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
        self.half_precision = False
        """Whether the last norm pass saw an output gradient in bfloat16."""
        self.batch_hints: list[int | None] = []
        """Records, as seen by the inputs of an embedding's parents that are running; the innermost last."""
        self.parts: Parts | None = None
        """Where what arrives is collected while a layer makes its activations anew, some tokens at a time."""
        self.lean_norms = True
        """Whether RMSNorms run in pieces and keep their input alone."""
        self.remember_normed = False
        """Whether the last norm's forward is noted, for a head that makes the loss too."""
        self.normed: Normed | None = None
        self.shown = Shown.ITSELF
        self.flat_parameters: list[Tensor] = []
        """Where gradients accumulate that pass through views."""
        self.on_stand_in: Callable[[ParameterTracker, Tensor], None] = lambda tracker, parameter: None
        """Called when a whole copy, or a view, is seen for the first time."""
        self._met: MutableMapping[Tensor, ParameterTracker] = WeakTensorKeyDictionary()
        self._squared: Tensor | None = None
        self._records = 0
        self._others = torch.zeros(0, dtype=torch.int64)
        self.coincidence = False
        """Whether a layer saw another dimension as large as the number of records."""
        self._scales: Sequence[float] = ()
        self._factors_over_c = torch.zeros(0)
        self._findings: list[tuple[str, Tensor]] = []
        self._deterministic = True
        self._open: list[Uses] = []
        self.step = 0
        """Grows with each projection that is begun."""

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
            self.anchors[device] = torch.zeros((), device=device, dtype=torch.float32, requires_grad=True)
        return self.anchors[device]

    def count_use(self, tracker: ParameterTracker) -> None:
        """Called by a forward. A checkpoint's recomputation happens inside a pass and is not a second use."""
        if self.mode is Mode.IDLE:
            tracker.forward_uses += 1

    def meet(self, tracker: ParameterTracker, current: Tensor | None) -> None:
        """A forward found another tensor than the tracker's in the place of a parameter.

        Args:
            tracker: The parameter.
            current: What the module has.

        Raises:
            UnsupportedModuleError: It is not an engine's whole copy of the shard.
        """
        if current is tracker.parameter:
            raise UnsupportedModuleError(
                f"module {tracker.modules[0]!r}: it ran while its weights were sharded, past the forward of the module "
                "that gathers them; call the model at its root (self.net(...)), not one of its parts"
            )
        replaced = tracker.stand_in is not None if self.shown is Shown.WHOLE else self.shown is Shown.ITSELF
        if replaced or current is None or current.shape != tracker.shape:
            raise UnsupportedModuleError(
                f"parameter {tracker.name!r} was replaced or tied after attach(); detach, change the model, attach "
                "again"
            )
        tracker.stand_in = current
        # A view that comes back, after another one, is watched already.
        if current not in self._met:
            self._met[current] = tracker
            self.on_stand_in(tracker, current)

    def is_known(self, parameter: Tensor) -> bool:
        """Whether a parameter's gradients are clipped: a tracker's own, a whole copy of its shard, or made of them."""
        return any(parameter is flat for flat in self.flat_parameters) or any(
            parameter is t.parameter or parameter is t.stand_in for t in self.trackers.values()
        )

    def start_isolation(self, records: int, others: Tensor) -> None:
        """Begin a backward of some records' losses alone.

        Args:
            records: B.
            others: The rows of all other records, int64.
        """
        self._records, self._others, self._findings = records, others, []
        self.mode = Mode.ISOLATE

    def mixing(self) -> list[str]:
        """Names of the parameters whose layers saw a gradient in another record's row in that backward."""
        return list(dict.fromkeys(name for name, found in self._findings if bool(found)))

    def look_at_others(self, tracker: ParameterTracker, output_gradient: Tensor) -> None:
        """Note whether a layer sees a gradient in the row of a record whose loss is not among those that run."""
        if output_gradient.ndim and output_gradient.shape[0] == self._records:
            rows = output_gradient[self._others.to(output_gradient.device)]
            # Zero times an infinite activation is NaN, in a record that is bad by itself.
            self._findings.append((tracker.name, ((rows != 0) & rows.isfinite()).any()))
            self.coincidence |= self._records in output_gradient.shape[1:-1]

    def start_norms(self, records: int) -> None:
        """Begin the norm pass of a micro-batch of ``records`` records."""
        for tracker in self.trackers.values():
            tracker.start()
        self._squared, self._records = None, records
        self.half_precision, self._deterministic, self.coincidence = False, True, False
        self.mode = Mode.NORM

    @torch.no_grad()  # the kept factors are part of the user's graph; the norms are not
    def finish_norms(self) -> Tensor | None:
        """End the norm pass.

        Returns:
            Norms of the whole gradient [B], float32, each with its floor (`rounding_share`) added; None if no parameter
            contributed.
        """
        floors: Tensor | None = None
        for tracker in self.trackers.values():
            floor = tracker.floor(may_flip=self.half_precision and not self._deterministic)
            if floor is not None:
                square = floor.double().square()
                floors = square if floors is None else floors + square.to(floors.device)
            self.accumulate(tracker.finish())
        squared, self._squared = self._squared, None
        if squared is None or floors is None:
            return None
        return (squared.sqrt() + floors.to(squared.device).sqrt()).float()

    def unused(self) -> list[str]:
        """Names of the trainable parameters that the last norm pass did not meet."""
        return [t.name for t in self.trackers.values() if t.parameter.requires_grad and t.contributions == 0]

    def start_clipping(self, factors: Tensor, scale: float, max_grad_norm: float) -> None:
        """Begin the clipped backward.

        Args:
            factors: Each record's clip factor times its weight, [B], float32.
            scale: The public constant on top.
            max_grad_norm: C.
        """
        # One transfer for all layers; the products take them as numbers.
        self._scales = (factors.double() * scale).tolist()
        self._factors_over_c, self._findings = factors / max_grad_norm, []
        self._records = len(self._scales)
        self.mode = Mode.CLIP

    def check_clipping(self) -> None:
        """After the clipped backward: was it that of the norm pass, and did nothing else reach a parameter?

        The clip factor of a record bounds its contribution only if the second backward meets the same inputs and output
        gradients as the first one, and if no gradient comes by another way than through the layers whose norms were
        taken. Guarantee: none by itself; this finds what breaks it, above the tolerances at the top of this file.

        Raises:
            UnclippedGradientError: One of the two does not hold.
        """
        of_views = [(_foreign(t), found) for t in self.trackers.values() if (found := t.foreign_views()) is not None]
        for message, found in (*self._findings, *of_views):
            if bool(found):
                raise UnclippedGradientError(message)
        if any(uses.total is not None for uses in self._open):
            raise UnclippedGradientError(
                "a use of a tied weight that the norm pass met did not come in the clipped backward; give both the "
                "same losses of the same forward"
            )

    def abort(self) -> None:
        """Back to idle, with nothing kept; right after either pass, also after an exception."""
        self.mode = Mode.IDLE
        self.parts = None
        self._squared, self._scales = None, ()
        self._findings = []
        for uses in self._open:
            uses.total = None
        self._open = []
        for tracker in self.trackers.values():
            tracker.clear()

    @contextmanager
    def collecting(self, parts: Parts) -> Iterator[None]:
        """Inside, what arrives for a parameter is a part of the use that one outer node makes of it.

        Args:
            parts: Where it goes.

        Yields:
            Nothing.
        """
        self.parts = parts
        try:
            yield
        finally:
            self.parts = None

    # Called by the layers' backwards --------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether neither pass is running: a backward is then none of ours."""
        return self.mode is Mode.IDLE

    @property
    def isolating(self) -> bool:
        """Whether the backward is one of some records' losses alone."""
        return self.mode is Mode.ISOLATE

    @property
    def taking_norms(self) -> bool:
        """Whether it is the norm pass."""
        return self.mode is Mode.NORM

    def uses_of(self, ctx: Any, tracker: ParameterTracker) -> Uses | None:
        """What the uses of a parameter share; the norm pass counts them.

        Args:
            ctx: The autograd node's own context.
            tracker: The parameter.

        Returns:
            None in a backward that is none of ours.

        Raises:
            StepOrderError: The clipped backward of a graph that no norm pass has seen, or that was clipped already.
        """
        if self.mode is Mode.NORM:
            tracker.uses.count += 1
            ctx.uses = tracker.uses
        elif self.mode is Mode.CLIP:
            if getattr(ctx, "seen", None) is None:
                raise StepOrderError(_unseen(tracker))
            if ctx.uses not in self._open:
                self._open.append(ctx.uses)
        else:
            return None
        uses: Uses = ctx.uses
        return uses

    def matrix(
        self, ctx: Any, tracker: ParameterTracker, output_gradient: Tensor, left: Tensor, right: Tensor
    ) -> Tensor | None:
        """One use of a matrix arrived: its norm now, or its gradient, each record's times its factor.

        Args:
            ctx: The autograd node's own context, which lives as long as the graph.
            tracker: The parameter, of shape [n0, ...].
            output_gradient: [B, ...], as autograd gave it.
            left: [B, ..., n0] floating, or ids [B, ...].
            right: [B, ..., n1] floating, n1 the product of the parameter's other axes.

        Returns:
            The weight gradient, of the parameter's shape and at least float32; None in the norm pass.
        """
        if self.parts is not None:
            self.parts.matrix(tracker, output_gradient, left, right)
            return None
        use = MatrixUse(self, ctx, tracker, in_parts=False)
        use.add(output_gradient, left, right)
        return use.finish()

    def vector(
        self, ctx: Any, tracker: ParameterTracker, output_gradient: Tensor, per_position: Tensor
    ) -> Tensor | None:
        """One use of a vector, or of any parameter whose per-record gradient is small enough to be formed.

        Args:
            ctx: The autograd node's own context.
            tracker: The parameter, of shape [*s].
            output_gradient: [B, ...], as autograd gave it.
            per_position: The parameter's gradient before any sum, [B, ..., *s]; summed over all positions in float32.

        Returns:
            The gradient, of the parameter's shape and at least float32; None in the norm pass.
        """
        if self.parts is not None:
            self.parts.vector(tracker, output_gradient, per_position)
            return None
        use = VectorUse(self, ctx, tracker)
        use.add(output_gradient, per_position)
        return use.finish()

    def watch(self, tracker: ParameterTracker, gradient: Tensor) -> None:
        """Called with what is about to be added to a parameter's gradient.

        Args:
            tracker: The parameter.
            gradient: Of its shape.
        """
        if self.mode is Mode.CLIP:
            self._findings.append((_foreign(tracker), tracker.foreign(gradient)))

    def refuse_float16(self, tracker: ParameterTracker, output_gradient: Tensor) -> None:
        """An UnsupportedModuleError for an output gradient in float16."""
        if output_gradient.dtype is torch.float16:
            raise UnsupportedModuleError(
                f"module {tracker.modules[0]!r}: its output gradient is float16, which needs loss scaling and loses "
                "small gradients; use bfloat16 (trainer.precision=bf16-mixed) or float32"
            )

    def witness(self, ctx: Any, tracker: ParameterTracker, output_gradient: Tensor, now: Tensor) -> None:
        """Both passes must meet the same inputs and output gradients.

        They do not where something random is drawn again in a recomputation, or when the losses of the two passes are
        not the same. Compared are S_i, the sum of the norms of record i's terms, and a random linear functional of its
        gradient. This finds mistakes; it proves nothing.

        Args:
            ctx: The autograd node's own context.
            tracker: The parameter.
            output_gradient: As autograd gave it.
            now: [2, B], float32: the sums of the norms of each record's terms, and u^T g_i v.

        Raises:
            StepOrderError: The clipped backward of a graph that no norm pass has seen, or that was clipped already.
        """
        half = output_gradient.dtype is torch.bfloat16
        self.coincidence |= self._records in output_gradient.shape[1:-1]
        if self.mode is Mode.NORM:
            self.half_precision |= half
            self._deterministic &= output_gradient.device.type == "cpu" or torch.are_deterministic_algorithms_enabled()
            ctx.seen = now
            return
        seen = getattr(ctx, "seen", None)
        if seen is None:
            raise StepOrderError(_unseen(tracker))
        ctx.seen = None
        factors = self._factors_over_c.to(now.device)
        share = HALF_MISMATCH if half else MISMATCH
        # In units of C. Not "greater than", which NaN never is; a record of factor 0 may be NaN.
        agree = factors * (now - seen).abs() <= share * factors * seen[0] + ROUNDING_OF_C
        self._findings.append((
            f"module {tracker.modules[0]!r}: its inputs or gradients in the clipped backward are not those of the norm "
            "pass; give both the same losses, no hook that changes gradients, nothing random but torch's own "
            "generator, and checkpoint with preserve_rng_state=True",
            (~agree & (factors > 0)).any(),
        ))

    def weights(self, records: int) -> Sequence[float]:
        """Each record's clip factor; ones in a backward that is none of ours."""
        return self._scales if self.mode is Mode.CLIP else [1.0] * records

    def factors(self, tracker: ParameterTracker, left: Tensor, right: Tensor) -> Factors:
        """The two factors with one axis for the records and one for their rows, once their shapes fit."""
        n0, n1 = tracker.matrix_shape
        if self.mode is Mode.IDLE:
            # A backward that is none of ours: records do not matter.
            records, rows = 1, right.numel() // n1
        else:
            self.check_batch(tracker, right, trailing=1)
            # Not -1: a micro-batch may be empty.
            records, rows = self._records, right.shape[1:-1].numel()
            of_left = left.shape if left.is_floating_point() else (*left.shape, n0)
            if right.shape[-1] != n1 or of_left[-1] != n0 or of_left[:-1] != right.shape[:-1]:
                raise UnsupportedModuleError(
                    f"parameter {tracker.name!r} of shape {tuple(tracker.shape)}: its module's rule gave "
                    f"factors of shapes {tuple(left.shape)} and {tuple(right.shape)}; expected left [B, ..., {n0}] and "
                    f"right [B, ..., {n1}]"
                )
        left = left.reshape(records, rows, *left.shape[-1:] if left.is_floating_point() else ())
        return Factors(left, right.reshape(records, rows, n1), (n0, n1))

    def check_batch(self, tracker: ParameterTracker, value: Tensor, trailing: int) -> None:
        """A LossShapeError where the first dimension is not the losses'; ``trailing`` ones are the parameter's own."""
        if value.ndim <= trailing or value.shape[0] != self._records:
            raise LossShapeError(
                f"module {tracker.modules[0]!r}: its input or output has shape {tuple(value.shape)} but there are "
                f"{self._records} losses; give one loss per record (sum over its own tokens), and let the first "
                "dimension of every trainable layer's input be the record"
            )

    def accumulate(self, squared: Tensor | None) -> None:
        """Add the squared norms of a parameter, once they are complete."""
        if squared is not None:
            # Float64: over a few hundred parameters float32 would lose 1e-5.
            wide = squared.double()
            self._squared = wide if self._squared is None else self._squared + wide.to(self._squared.device)


def _unseen(tracker: ParameterTracker) -> str:
    return (
        f"module {tracker.modules[0]!r}: no norm pass has seen it, or it was clipped already; call norms(losses) and "
        "then once clipped_backward(losses, ...) with the same losses of the same forward, and checkpoint with "
        "use_reentrant=False"
    )


def _foreign(tracker: ParameterTracker) -> str:
    return (
        f"parameter {tracker.name!r} got a gradient that does not come from its module's forward (a functional use, a "
        "penalty on the weights, a second-order loss): its norm was not taken; call the module, or freeze it"
    )
