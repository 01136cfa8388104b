"""`torch.nn.Linear` and Hugging Face's Conv1D: weight by its two factors, bias as a vector.

The weight takes two autograd Functions. Non-reentrant checkpointing stops its recomputation at the last tensor that is
saved: a native linear saves its input before its product, a single Python Function only after its forward returned, so
the last product of every checkpointed block would be computed once more in each pass. `_Save` saves and computes
nothing, `_Apply` computes and saves nothing.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dprc_lightning.layers.instrumentation import ATTRIBUTE, active
from dprc_lightning.layers.rule import LayerRule
from dprc_lightning.layers.tracker import ParameterTracker
from dprc_lightning.layers.tracking import PassState


class _Save(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        anchor: Tensor,
        state: PassState,
        tracker: ParameterTracker,
        box: list[Tensor],
        transposed: bool,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.state, ctx.tracker, ctx.box, ctx.transposed = state, tracker, box, transposed
        return anchor.detach().clone()

    @staticmethod
    def backward(ctx: Any, _token: Tensor) -> tuple[Tensor | None, ...]:
        # Once: under checkpointing each access could unpack (recompute) again.
        x, weight = ctx.saved_tensors
        output_gradient = ctx.box.pop()
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = output_gradient @ (weight.mT if ctx.transposed else weight).to(output_gradient.dtype)
        left, right = (x, output_gradient) if ctx.transposed else (output_gradient, x)
        grad_weight = ctx.state.matrix(ctx, ctx.tracker, output_gradient, left, right)
        return grad_x, grad_weight, None, None, None, None, None


class _Apply(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, token: Tensor, x: Tensor, weight: Tensor, box: list[Tensor], transposed: bool, product: bool
    ) -> Tensor:
        ctx.box = box
        return F.linear(x, weight.mT if transposed else weight) if product else _stand_in(x, weight, transposed)

    @staticmethod
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[Tensor | None, ...]:
        # The output gradient lives only between the two nodes.
        ctx.box.append(output_gradient)
        return output_gradient.new_zeros((), dtype=torch.float32), None, None, None, None, None


class _FrozenWithoutProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, transposed: bool) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.transposed = transposed
        return _stand_in(x, weight, transposed)

    @staticmethod
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        return output_gradient @ (weight.mT if ctx.transposed else weight).to(output_gradient.dtype), None, None


def _stand_in(x: Tensor, weight: Tensor, transposed: bool) -> Tensor:
    """Of the product's shape and dtype, in no memory: nobody looks at its values."""
    return x.new_zeros(()).expand(*x.shape[:-1], weight.shape[1 if transposed else 0])


class _Bias(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, y: Tensor, bias: Tensor, anchor: Tensor, state: PassState, tracker: ParameterTracker
    ) -> Tensor:
        ctx.state, ctx.tracker = state, tracker
        return y + bias.to(y.dtype)

    @staticmethod
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[Tensor | None, ...]:
        grad_bias = ctx.state.vector(ctx, ctx.tracker, output_gradient, output_gradient)
        return output_gradient, grad_bias, None, None, None


class LinearRule(LayerRule):
    """Exactly `torch.nn.Linear`: a subclass may use its weight past its forward, as MultiheadAttention's does."""

    module_class = nn.Linear
    kinds = {"weight": "matrix", "bias": "vector"}
    transposed = False
    """Whether the weight is [in_features, out_features]."""

    def forward(self, module: Any, input: Tensor) -> Tensor:
        """Same values as the original, up to rounding.

        Args:
            module: The layer.
            input: [B, ..., in_features].

        Returns:
            [B, ..., out_features].
        """
        return linear_output(module, input, transposed=self.transposed)


class HuggingFaceConv1DRule(LinearRule):
    """Hugging Face's Conv1D (GPT-2): a linear layer with its weight stored [in_features, out_features]."""

    transposed = True

    def matches(self, module: nn.Module) -> bool:
        """Whether this rule is for the module. By name, so that transformers need not be imported."""
        return type(module).__name__ == "Conv1D" and type(module).__module__ == "transformers.pytorch_utils"


def linear_output(module: Any, input: Tensor, *, transposed: bool, product: bool = True) -> Tensor:
    """A linear layer's forward, of an instrumented one or a frozen one.

    Args:
        module: The layer.
        input: [B, ..., in_features].
        transposed: Whether its weight is [in_features, out_features].
        product: Whether the values are wanted. A forward that is made anew for its backward does not look at those of
            its last layer: without them it takes no product, and its gradients are the same.

    Returns:
        [B, ..., out_features].
    """
    instrumented = ATTRIBUTE in module.__dict__
    device_type = input.device.type
    autocast = torch.is_autocast_enabled(device_type)
    x = input.to(torch.get_autocast_dtype(device_type)) if autocast else input
    found = active(module, "weight") if instrumented else None
    if found is not None:
        state, tracker = found
        box: list[Tensor] = []
        token = _Save.apply(x, module.weight, state.anchor(x.device), state, tracker, box, transposed)
        y = _Apply.apply(token, x.detach(), module.weight.detach(), box, transposed, product)
    elif product:
        y = F.linear(x, module.weight.mT if transposed else module.weight)
    else:
        y = _FrozenWithoutProduct.apply(x, module.weight, transposed)
    if module.bias is None:
        return y
    found = active(module, "bias") if instrumented else None
    if found is None:
        return y + module.bias.to(y.dtype)
    state, tracker = found
    return _Bias.apply(y, module.bias, state.anchor(y.device), state, tracker)
