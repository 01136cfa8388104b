"""RMSNorm, torch's and Hugging Face's: normalise natively, then one Function for the elementwise weight."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dprc_lightning.layers.tracker import ParameterTracker
from dprc_lightning.layers.tracking import Mode, PassState, active


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, normalised: Tensor, weight: Tensor, anchor: Tensor, state: PassState, tracker: ParameterTracker
    ) -> Tensor:
        ctx.save_for_backward(normalised, weight)
        ctx.state, ctx.tracker = state, tracker
        return weight * normalised

    @staticmethod
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[Tensor | None, ...]:
        normalised, weight = ctx.saved_tensors
        grad_x = output_gradient * weight if ctx.needs_input_grad[0] else None
        per_position = output_gradient * normalised
        grad_weight = None
        ctx.state.witness(ctx, ctx.tracker, output_gradient)
        if ctx.state.mode is Mode.NORM:
            ctx.state.add_vector(ctx.tracker, per_position)
        else:
            leading = per_position.ndim - weight.ndim
            grad_weight = ctx.tracker.produced(per_position.sum(tuple(range(leading))).to(weight.dtype))
        return grad_x, grad_weight, None, None, None


def _scale(module: nn.Module, normalised: Tensor) -> Tensor:
    found = active(module, "weight")
    weight: Tensor = module.weight  # type: ignore[assignment]
    if found is None:
        return weight * normalised
    state, tracker = found
    return _Scale.apply(normalised, weight, state.anchor(normalised.device), state, tracker)


class InstrumentedRMSNorm(nn.RMSNorm):
    """`torch.nn.RMSNorm` whose backward offers per-record norms; takes its place by class swap."""

    def forward(self, x: Tensor) -> Tensor:
        """Same values as `torch.nn.RMSNorm`, up to rounding.

        Args:
            x: [B, ..., *normalized_shape].

        Returns:
            The shape of x.
        """
        return _scale(self, F.rms_norm(x, self.normalized_shape, None, self.eps))


class TorchRMSNormRule:
    """Exactly `torch.nn.RMSNorm`."""

    kinds = {"weight": "vector"}
    sides: dict[str, int] = {}

    def matches(self, module: nn.Module) -> bool:
        """Whether this rule is for the module."""
        return type(module) is nn.RMSNorm

    def refuse(self, module: nn.Module) -> str | None:
        """Why the module's settings cannot be handled, or None."""
        return None

    def instrumented_class(self, module: nn.Module) -> type[nn.Module]:
        """The class that takes the place of the module's own."""
        return InstrumentedRMSNorm


def _hf_normalise(x: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.float32)
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


# One class per original, so that models of one architecture share it.
_HF_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}


def _instrumented_hf(cls: type[nn.Module]) -> type[nn.Module]:
    def forward(self: nn.Module, hidden_states: Tensor) -> Tensor:
        """Same values as the original class."""
        return _scale(self, _hf_normalise(hidden_states, self.variance_epsilon))  # type: ignore[arg-type]

    if cls not in _HF_CLASSES:
        _HF_CLASSES[cls] = type(f"Instrumented{cls.__name__}", (cls,), {"forward": forward, "__module__": __name__})
    return _HF_CLASSES[cls]


class HuggingFaceRMSNormRule:
    """Hugging Face's ``*RMSNorm`` classes of the form ``weight * normalised``, by name and by a numerical check.

    transformers has one copy of the class per architecture, and some scale by ``1 + weight``: the name alone proves
    nothing, so `refuse` compares the module's own forward with the formula on random input.
    """

    kinds = {"weight": "vector"}
    sides: dict[str, int] = {}

    def matches(self, module: nn.Module) -> bool:
        """Whether this rule is for the module."""
        return (
            type(module).__name__.endswith("RMSNorm")
            and type(module).__module__.startswith("transformers.")
            and isinstance(getattr(module, "variance_epsilon", None), float)
            and list(module._parameters) == ["weight"]
        )

    def refuse(self, module: nn.Module) -> str | None:
        """Why the module's settings cannot be handled, or None."""
        weight: Tensor = module.weight  # type: ignore[assignment]
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(2, 3, weight.shape[-1], generator=generator).to(weight.device, weight.dtype)
        with torch.no_grad():
            ours = weight * _hf_normalise(x, module.variance_epsilon)  # type: ignore[arg-type]
            theirs = module(x)
        if ours.shape == theirs.shape and torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6):
            return None
        return "its forward is not weight * x / rms(x); freeze its weight, or register a rule for its class"

    def instrumented_class(self, module: nn.Module) -> type[nn.Module]:
        """The class that takes the place of the module's own."""
        return _instrumented_hf(type(module))
