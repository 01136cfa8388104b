"""LayerNorm and RMSNorm, torch's and Hugging Face's. Backward normalises the saved input once more: no copy is kept."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dprc_lightning.layers.instrumentation import active, instrumentation, parameter_in_use
from dprc_lightning.layers.normed import Normed, NormRecipe
from dprc_lightning.layers.rule import LayerRule, detached_parameters, replaced_parameters
from dprc_lightning.layers.tracker import ParameterTracker
from dprc_lightning.layers.tracking import PassState
from dprc_lightning.layers.use import VectorUse

PIECE = 2**22
"""Entries that are float32 at a time: 16 MiB of each temporary. Hugging Face's forward makes several of all tokens."""


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

    Lean (lean_norms of `dprc_lightning.clipping.attach`), forward and backward run on pieces of the tokens: the values
    are the same, because each position is normalised by itself; the input alone is kept, and what they take beside
    input and output does not grow with T. Then frozen ones are instrumented too.
    """

    kinds = {"weight": "vector"}

    def __init__(self) -> None:
        super().__init__()
        self._offsets: dict[type[nn.Module], float] = {}

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
        for offset, scale in ((0.0, weight), (1.0, 1.0 + weight.float())):
            ours = (scale * normalised).to(theirs.dtype)
            if ours.shape == theirs.shape and torch.allclose(ours, theirs, rtol=rounding, atol=1e-6):
                self._offsets[type(module)] = offset
                return None
        return (
            "its forward is neither weight * x / rms(x) nor (1 + weight) * x / rms(x); freeze its weight, or "
            "register_rule one for its class"
        )

    def gradient(self, module: Any, name: str, output_gradient: Tensor, x: Tensor) -> Tensor:
        """See `LayerRule.gradient`; where the norms are not lean."""
        return output_gradient * _normalise(x, module)

    def forward(self, module: Any, hidden_states: Tensor) -> Tensor:
        """Same values as the original, piece by piece.

        Args:
            module: The layer.
            hidden_states: [B, T, ..., d].

        Returns:
            Of the same shape.
        """
        state = instrumentation(module).state
        if not state.lean_norms:
            out: Tensor = super().forward(module, hidden_states)
            return out
        found = active(module, "weight")
        if found is None and not (torch.is_grad_enabled() and hidden_states.requires_grad):
            return self.in_pieces(module, hidden_states)
        weight = parameter_in_use(module, "weight")
        assert weight is not None
        # Frozen: no anchor, so that the norm pass comes here only on its way to what trains below.
        anchor = None if found is None else state.anchor(hidden_states.device)
        out = _RMSNorm.apply(hidden_states, weight, anchor, self, module, *(found or (None, None)))
        if state.remember_normed:
            original = instrumentation(module).original_class
            state.normed = Normed.of(NormRecipe(module, original, weight.detach().clone()), hidden_states, out)
        return out

    def in_pieces(self, module: Any, x: Tensor) -> Tensor:
        """The module's own forward, on some tokens after the others.

        Args:
            module: The layer.
            x: [B, T, ..., d].

        Returns:
            Of the same shape.
        """
        out: Tensor | None = None
        for piece in _pieces(x):
            made = self.original(module, x[:, piece])
            if made.shape == x.shape:
                return made
            out = made.new_empty(x.shape) if out is None else out
            out[:, piece] = made
        return self.original(module, x) if out is None else out

    def original(self, module: Any, x: Tensor) -> Tensor:
        """The module's own forward, as it is."""
        carried = instrumentation(module)
        with detached_parameters(module, carried.trackers):
            out: Tensor = carried.original_class.forward(module, x)
        return out

    def offset(self, module: nn.Module) -> float:
        """What is added to the weight: 0, or Gemma's 1."""
        return self._offsets[instrumentation(module).original_class]


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        anchor: Tensor | None,
        rule: HuggingFaceRMSNormRule,
        module: nn.Module,
        state: PassState | None,
        tracker: ParameterTracker | None,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.rule, ctx.module, ctx.state, ctx.tracker = rule, module, state, tracker
        return rule.in_pieces(module, x)

    @staticmethod
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        grad_x = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        state: PassState | None = ctx.state
        use = VectorUse(state, ctx, ctx.tracker) if state is not None and state.parts is None else None
        scale = weight if ctx.rule.offset(ctx.module) == 0.0 else weight.to(_wide_dtype(x)) + 1.0
        for piece in _pieces(x):
            part, gradient = x[:, piece], output_gradient[:, piece]
            wide = _wide(part)
            rstd = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + _eps(ctx.module))
            normalised = wide * rstd
            if state is not None:
                per_position = _wide(gradient) * normalised
                if use is not None:
                    use.add(gradient, per_position)
                elif state.parts is not None:
                    state.parts.vector(ctx.tracker, gradient, per_position)
                del per_position
            if grad_x is not None:
                by_normalised = _wide(gradient * scale)
                mean = (by_normalised * normalised).mean(-1, keepdim=True)
                grad_x[:, piece] = by_normalised.sub_(normalised.mul_(mean)).mul_(rstd)
        return grad_x, None if use is None else use.finish(), None, None, None, None, None


def _pieces(x: Tensor) -> Iterator[slice]:
    """Along the tokens, the second dimension; all at once where there is none."""
    per_token = max(x.numel() // max(x.shape[1], 1), 1) if x.ndim > 2 else x.numel() + 1
    step = max(PIECE // per_token, 1) if x.ndim > 2 else max(x.shape[1], 1)
    for start in range(0, x.shape[1], step):
        yield slice(start, start + step)


def _wide_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype is torch.float64 else x.float()


def _eps(module: nn.Module) -> Any:
    return getattr(module, "variance_epsilon", getattr(module, "eps", None))


def _normalise(x: Tensor, module: nn.Module) -> Tensor:
    wide = _wide(x)
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + _eps(module))
