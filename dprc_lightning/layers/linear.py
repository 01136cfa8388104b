"""`torch.nn.Linear`: weight by its two factors, bias as a vector.

The weight takes two autograd Functions. Non-reentrant checkpointing stops its recomputation at the last tensor that is
saved: a native linear saves its input before its product, a single Python Function only after its forward returned, so
the last product of every checkpointed block would be computed once more in each pass. `_Save` saves and computes
nothing, `_Apply` computes and saves nothing.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dprc_lightning.layers.tracker import ParameterTracker
from dprc_lightning.layers.tracking import Mode, PassState, active


class _Save(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, anchor: Tensor, state: PassState, tracker: ParameterTracker, box: list
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.state, ctx.tracker, ctx.box = state, tracker, box
        return anchor.detach().clone()

    @staticmethod
    def backward(ctx: Any, _token: Tensor) -> tuple[Tensor | None, ...]:
        # Once: under checkpointing each access could unpack (recompute) again.
        x, weight = ctx.saved_tensors
        output_gradient = ctx.box.pop()
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = output_gradient @ weight.to(output_gradient.dtype)
        ctx.state.witness(ctx, ctx.tracker, output_gradient)
        if ctx.state.mode is Mode.NORM:
            ctx.state.add_factors(ctx.tracker, output_gradient, x)
        else:
            # In the weight's own precision: rounding the SUM over records to less would let one record move the
            # rounding of all the others, by more than its own clipped norm.
            rows = output_gradient.reshape(-1, output_gradient.shape[-1]).to(weight.dtype)
            grad_weight = ctx.tracker.produced(rows.mT @ x.reshape(-1, x.shape[-1]).to(weight.dtype))
        return grad_x, grad_weight, None, None, None, None


class _Apply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, x: Tensor, weight: Tensor, box: list) -> Tensor:
        ctx.box = box
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[Tensor | None, ...]:
        # The output gradient lives only between the two nodes.
        ctx.box.append(output_gradient)
        return output_gradient.new_zeros((), dtype=torch.float32), None, None, None


class _Bias(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, y: Tensor, bias: Tensor, anchor: Tensor, state: PassState, tracker: ParameterTracker
    ) -> Tensor:
        ctx.state, ctx.tracker, ctx.dtype = state, tracker, bias.dtype
        return y + bias

    @staticmethod
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[Tensor | None, ...]:
        grad_bias = None
        ctx.state.witness(ctx, ctx.tracker, output_gradient)
        if ctx.state.mode is Mode.NORM:
            ctx.state.add_vector(ctx.tracker, output_gradient)
        else:
            rows = output_gradient.reshape(-1, output_gradient.shape[-1])
            grad_bias = ctx.tracker.produced(rows.sum(0).to(ctx.dtype))
        return output_gradient, grad_bias, None, None, None


class InstrumentedLinear(nn.Linear):
    """`torch.nn.Linear` whose backward offers per-record norms; takes its place by class swap."""

    def forward(self, input: Tensor) -> Tensor:
        """Same values as `torch.nn.Linear`.

        Args:
            input: [B, ..., in_features].

        Returns:
            [B, ..., out_features].
        """
        device_type = input.device.type
        autocast = torch.is_autocast_enabled(device_type)
        x = input.to(torch.get_autocast_dtype(device_type)) if autocast else input
        found = active(self, "weight")
        if found is None:
            y = F.linear(x, self.weight)
        else:
            state, tracker = found
            box: list[Tensor] = []
            token = _Save.apply(x, self.weight, state.anchor(x.device), state, tracker, box)
            y = _Apply.apply(token, x.detach(), self.weight.detach(), box)
        if self.bias is None:
            return y
        bias = self.bias.to(y.dtype) if autocast else self.bias
        found = active(self, "bias")
        if found is None:
            return y + bias
        state, tracker = found
        return _Bias.apply(y, bias, state.anchor(y.device), state, tracker)


class LinearRule:
    """Exactly `torch.nn.Linear`: a subclass may use its weight past its forward, as MultiheadAttention's does."""

    kinds = {"weight": "matrix", "bias": "vector"}
    sides: dict[str, int] = {}

    def matches(self, module: nn.Module) -> bool:
        """Whether this rule is for the module."""
        return type(module) is nn.Linear

    def refuse(self, module: nn.Module) -> str | None:
        """Why the module's settings cannot be handled, or None."""
        return None

    def instrumented_class(self, module: nn.Module) -> type[nn.Module]:
        """The class that takes the place of the module's own."""
        return InstrumentedLinear
