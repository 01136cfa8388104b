"""LayerNorm and RMSNorm, torch's and Hugging Face's. Backward normalises the saved input once more: no copy is kept."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dprc_lightning.layers.rule import LayerRule, replaced_parameters


class LayerNormRule(LayerRule):
    """Exactly `torch.nn.LayerNorm`, with or without bias."""

    module_class = nn.LayerNorm
    kinds = {"weight": "vector", "bias": "vector"}

    def gradient(self, module: Any, name: str, output_gradient: Tensor, x: Tensor) -> Tensor:
        """See `LayerRule.gradient`; the bias's is the output gradient itself."""
        if name == "bias":
            return output_gradient
        return output_gradient * F.layer_norm(_wide(x), module.normalized_shape, None, None, module.eps)


class TorchRMSNormRule(LayerRule):
    """Exactly `torch.nn.RMSNorm`."""

    module_class = nn.RMSNorm
    kinds = {"weight": "vector"}

    def gradient(self, module: Any, name: str, output_gradient: Tensor, x: Tensor) -> Tensor:
        """See `LayerRule.gradient`."""
        # Without an eps of its own the layer takes one that depends on the input's precision.
        wide = x if module.eps is None else _wide(x)
        return output_gradient * F.rms_norm(wide, module.normalized_shape, None, module.eps)


class HuggingFaceRMSNormRule(LayerRule):
    """Hugging Face's ``*RMSNorm`` classes whose output is ``weight * x / rms(x)`` or ``(1 + weight) * x / rms(x)``.

    transformers has one copy of the class per architecture and the name alone proves nothing, so `refuse` compares the
    module's own forward with both formulas on random input. Either way the weight's gradient is the output gradient
    times the normalised input.
    """

    kinds = {"weight": "vector"}

    def matches(self, module: nn.Module) -> bool:
        """Whether this rule is for the module."""
        return (
            type(module).__name__.endswith("RMSNorm")
            and type(module).__module__.startswith("transformers.")
            and isinstance(_eps(module), float)
            and list(module._parameters) == ["weight"]
        )

    def refuse(self, module: nn.Module) -> str | None:
        """Why the module's settings cannot be handled, or None."""
        original: Tensor = module.weight  # type: ignore[assignment]
        generator = torch.Generator().manual_seed(0)
        x, weight = torch.randn(2, 6, original.shape[-1], generator=generator).to(original).split([5, 1], dim=1)
        # Weights of its own: 2 x / rms(x) is both 2 * weight and 1 + weight where the weight is one.
        weight = weight[0, 0]
        with torch.no_grad(), replaced_parameters(module, {"weight": weight}):
            normalised = _normalise(x, module)
            theirs = module(x)
        rounding = 1e-5 if weight.dtype in (torch.float32, torch.float64) else 2e-2
        for scale in (weight, 1.0 + weight.float()):
            ours = (scale * normalised).to(theirs.dtype)
            if ours.shape == theirs.shape and torch.allclose(ours, theirs, rtol=rounding, atol=1e-6):
                return None
        return (
            "its forward is neither weight * x / rms(x) nor (1 + weight) * x / rms(x); freeze its weight, or "
            "register_rule one for its class"
        )

    def gradient(self, module: Any, name: str, output_gradient: Tensor, x: Tensor) -> Tensor:
        """See `LayerRule.gradient`."""
        return output_gradient * _normalise(x, module)


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype is torch.float64 else x.float()


def _eps(module: nn.Module) -> Any:
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))


def _normalise(x: Tensor, module: nn.Module) -> Tensor:
    wide = _wide(x)
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + _eps(module))
