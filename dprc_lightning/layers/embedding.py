"""`torch.nn.Embedding`: a matrix whose left factor is one-hot."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dprc_lightning.layers.tracker import ParameterTracker
from dprc_lightning.layers.tracking import Mode, PassState, active


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        ids: Tensor,
        weight: Tensor,
        anchor: Tensor,
        padding_idx: int | None,
        state: PassState,
        tracker: ParameterTracker,
    ) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.rows, ctx.dtype, ctx.padding_idx = weight.shape[0], weight.dtype, padding_idx
        ctx.state, ctx.tracker = state, tracker
        return F.embedding(ids, weight)

    @staticmethod
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[Tensor | None, ...]:
        (ids,) = ctx.saved_tensors
        if ctx.padding_idx is not None:
            # The padding row gets no gradient from here, but may get one from a tied head.
            output_gradient = output_gradient.masked_fill((ids == ctx.padding_idx).unsqueeze(-1), 0.0)
        grad_weight = None
        ctx.state.witness(ctx, ctx.tracker, output_gradient)
        if ctx.state.mode is Mode.NORM:
            ctx.state.add_factors(ctx.tracker, ids, output_gradient)
        else:
            rows = output_gradient.to(ctx.dtype)
            grad_weight = torch.ops.aten.embedding_dense_backward(rows, ids, ctx.rows, -1, False)
            ctx.tracker.produced(grad_weight)
        return None, grad_weight, None, None, None, None


class InstrumentedEmbedding(nn.Embedding):
    """`torch.nn.Embedding` whose backward offers per-record norms; takes its place by class swap."""

    def forward(self, input: Tensor) -> Tensor:
        """Same values as `torch.nn.Embedding`.

        Args:
            input: Ids [B, ...], integers.

        Returns:
            [B, ..., embedding_dim].
        """
        found = active(self, "weight")
        if found is None:
            return F.embedding(input, self.weight)
        state, tracker = found
        anchor = state.anchor(self.weight.device)
        return _Lookup.apply(input, self.weight, anchor, self.padding_idx, state, tracker)


class EmbeddingRule:
    """Exactly `torch.nn.Embedding`, without the options whose gradient depends on the other records of the batch."""

    kinds = {"weight": "matrix"}
    # Contracting the other axis would need vocabulary x k floats per record.
    sides = {"weight": 0}

    def matches(self, module: nn.Module) -> bool:
        """Whether this rule is for the module."""
        return type(module) is nn.Embedding

    def refuse(self, module: nn.Module) -> str | None:
        """Why the module's settings cannot be handled, or None."""
        assert isinstance(module, nn.Embedding)
        if module.scale_grad_by_freq:
            return "scale_grad_by_freq=True divides by counts over the whole batch; set it to False"
        if module.max_norm is not None:
            return f"max_norm={module.max_norm} changes the weight inside the forward; set it to None"
        if module.sparse:
            return "sparse=True gives sparse gradients, whose support shows the tokens of the batch; set it to False"
        return None

    def instrumented_class(self, module: nn.Module) -> type[nn.Module]:
        """The class that takes the place of the module's own."""
        return InstrumentedEmbedding
