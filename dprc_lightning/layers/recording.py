"""How a layer's forward offers the per-record gradient of one of its parameters: two autograd Functions."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dprc_lightning.errors import UnsupportedModuleError
from dprc_lightning.layers.instrumentation import active, instrumentation, parameter_in_use
from dprc_lightning.layers.tracker import ParameterTracker
from dprc_lightning.layers.tracking import PassState

Gradient = Callable[..., Tensor | tuple[Tensor, Tensor]]


class _Record(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        output: Tensor,
        weight: Tensor,
        anchor: Tensor,
        gradient: Gradient,
        state: PassState,
        tracker: ParameterTracker,
        *saved: Any,
    ) -> Tensor:
        tensors = [value for value in saved if isinstance(value, Tensor)]
        ctx.save_for_backward(*tensors)
        ctx.rest = [None if isinstance(value, Tensor) else value for value in saved]
        ctx.is_tensor = [isinstance(value, Tensor) for value in saved]
        ctx.gradient, ctx.state, ctx.tracker = gradient, state, tracker
        # Not a view of the layer's output: what follows may change it in place, as an inplace ReLU does.
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[Tensor | None, ...]:
        # Once: under checkpointing each access could unpack (recompute) again.
        tensors = iter(ctx.saved_tensors)
        saved = [next(tensors) if known else rest for known, rest in zip(ctx.is_tensor, ctx.rest, strict=True)]
        if ctx.tracker.kind == "matrix":
            left, right = ctx.gradient(output_gradient, *saved)
            grad_weight = ctx.state.matrix(ctx, ctx.tracker, output_gradient, left, right)
        else:
            half = output_gradient.dtype in (torch.bfloat16, torch.float16)
            wide = output_gradient.float() if half else output_gradient
            grad_weight = ctx.state.vector(ctx, ctx.tracker, output_gradient, ctx.gradient(wide, *saved))
        return output_gradient, grad_weight, None, None, None, None, *[None] * len(saved)


def record(module: nn.Module, name: str, output: Tensor, gradient: Gradient, *saved: Any) -> Tensor:
    """Offer the per-record gradients of one parameter of a layer whose forward made ``output`` without it.

    Args:
        module: An instrumented module.
        name: Local name of the parameter.
        output: [B, ...], what the forward made from the parameter DETACHED. A fresh tensor that no operation has saved
            for its own backward (autograd says so if one has).
        gradient: ``(output_gradient, *saved) ->`` for a vector its gradient at each position, [B, ..., *shape], before
            any sum (output_gradient is float32 or float64 there); for a matrix [n0, n1] its two factors ``left``
            [B, ..., n0] (or ids [B, ...] for a one-hot one) and ``right`` [B, ..., n1], so that record i's gradient is
            ``left_i^T right_i``.
        *saved: What the formula needs; tensors are saved as autograd saves its own.

    Returns:
        The same values; as they are where the parameter is frozen or no graph is built.
    """
    found = active(module, name)
    if found is None:
        return output
    state, tracker = found
    detached = [value.detach() if isinstance(value, Tensor) else value for value in saved]
    anchor = state.anchor(output.device)
    return _Record.apply(output, parameter_in_use(module, name), anchor, gradient, state, tracker, *detached)


class _PerRecord(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        anchor: Tensor,
        shape: Sequence[int],
        state: PassState,
        tracker: ParameterTracker,
    ) -> Tensor:
        ctx.state, ctx.tracker = state, tracker
        return weight.expand(shape)

    @staticmethod
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[Tensor | None, ...]:
        per_record = output_gradient.reshape(output_gradient.shape[0], *ctx.tracker.shape)
        return ctx.state.vector(ctx, ctx.tracker, output_gradient, per_record), None, None, None, None


def per_record_parameter(module: nn.Module, name: str, records: int, *, new_axis: bool) -> Tensor:
    """A parameter once for each record, in no memory: the gradient of each copy is that of its record.

    Args:
        module: An instrumented module.
        name: Local name of the parameter, of shape [*s].
        records: B.
        new_axis: Whether the records get an axis of their own, [B, *s]; else s[0] must be 1 and becomes B.

    Returns:
        An expanded view. Its gradient takes B times the parameter's memory.

    Raises:
        UnsupportedModuleError: The first axis is not 1 where it must be.
    """
    parameter: Tensor = parameter_in_use(module, name)  # type: ignore[assignment]
    if not new_axis and parameter.shape[:1] != (1,):
        raise UnsupportedModuleError(
            f"module {instrumentation(module).name!r}, parameter {name!r}: it has shape {tuple(parameter.shape)}, and "
            "its first axis must be 1 to be broadcast over the records"
        )
    shape = (records, *(parameter.shape if new_axis else parameter.shape[1:]))
    found = active(module, name)
    if found is None:
        return parameter.detach().expand(shape)
    state, tracker = found
    return _PerRecord.apply(parameter, state.anchor(parameter.device), shape, state, tracker)
