"""`torch.nn.Embedding`: a matrix whose left factor is one-hot."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dprc_lightning.errors import UnsupportedModuleError
from dprc_lightning.layers.instrumentation import instrumentation
from dprc_lightning.layers.recording import record
from dprc_lightning.layers.rule import LayerRule


class EmbeddingRule(LayerRule):
    """Exactly `torch.nn.Embedding`, without the options whose gradient depends on the other records of the batch.

    Position and token-type ids often come once for all records, [1, T]. Their rows' gradients would then be summed over
    the records before they arrive here, so the ids are expanded to [B, T] first (the values are the same under
    broadcasting), with the B that the inputs of the embedding's parent modules show.
    """

    module_class = nn.Embedding
    kinds = {"weight": "matrix"}
    # Contracting the other axis would need vocabulary x k floats per record.
    sides = {"weight": 0}

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

    def forward(self, module: Any, input: Tensor) -> Tensor:
        """Same values as `torch.nn.Embedding`; [1, T, d] becomes [B, T, d].

        Args:
            module: The layer.
            input: Ids [B, ...] or [1, T], integers.

        Returns:
            [B, ..., embedding_dim].

        Raises:
            UnsupportedModuleError: Consecutive ids in one dimension: positions, which nothing tells from records where
                there are as many of them.
        """
        carried = instrumentation(module)
        ids = input
        if torch.is_grad_enabled() and module.weight.requires_grad:
            # Fewer may be consecutive by chance.
            if ids.ndim == 1 and len(ids) >= 8 and bool((ids.diff() == 1).all()):
                raise UnsupportedModuleError(
                    f"module {carried.name!r}: ids {int(ids[0])} to {int(ids[-1])} in one dimension are positions, not "
                    "one id per record; give them the shape [1, T] (unsqueeze(0)), or freeze the embedding"
                )
            records = carried.state.batch_hints[-1] if carried.state.batch_hints else None
            if records is not None and ids.ndim == 2 and ids.shape[0] == 1 and records != 1:
                ids = ids.expand(records, -1)
        output = F.embedding(ids, module.weight.detach())
        scale = self.scale(module)
        if scale is not None:
            output = output * scale
        return record(module, "weight", output, _factors, ids, module.padding_idx, scale)

    def scale(self, module: Any) -> Tensor | None:
        """What the rows are multiplied by, a scalar; None for nothing."""
        return None


class HuggingFaceScaledEmbeddingRule(EmbeddingRule):
    """Hugging Face's ``*ScaledWordEmbedding`` classes (Gemma): ``weight[ids] * embed_scale``, checked on some ids."""

    def matches(self, module: nn.Module) -> bool:
        """Whether this rule is for the module."""
        cls = type(module)
        return (
            isinstance(module, nn.Embedding)
            and cls.__name__.endswith("ScaledWordEmbedding")
            and cls.__module__.startswith("transformers.")
            and hasattr(module, "embed_scale")
        )

    def refuse(self, module: nn.Module) -> str | None:
        """Why the module's settings cannot be handled, or None."""
        reason = super().refuse(module)
        if reason is not None:
            return reason
        weight: Tensor = module.weight  # type: ignore[assignment]
        ids = torch.arange(min(8, len(weight)), device=weight.device).unsqueeze(0)
        with torch.no_grad():
            ours, theirs = weight[ids] * self.scale(module), module(ids)
        if ours.shape != theirs.shape or not torch.equal(ours, theirs):
            return "its forward is not weight[ids] * embed_scale; freeze its weight, or register_rule one for its class"
        return None

    def scale(self, module: Any) -> Tensor:
        """``embed_scale``, in the weight's precision, as the original has it."""
        return torch.as_tensor(module.embed_scale).to(module.weight)


def _factors(
    output_gradient: Tensor, ids: Tensor, padding_idx: int | None, scale: Tensor | None
) -> tuple[Tensor, Tensor]:
    if scale is not None:
        output_gradient = output_gradient * scale
    if padding_idx is not None:
        # The padding row gets no gradient from here, but may get one from a tied head.
        output_gradient = output_gradient.masked_fill((ids == padding_idx).unsqueeze(-1), 0.0)
    return ids, output_gradient


def batch_size_of(inputs: Any) -> int | None:
    """B, by the inputs of a module around an embedding: token ids [B, T] or hidden states [B, T, ...].

    Args:
        inputs: Positional and keyword arguments, flat.

    Returns:
        The first dimension of the first integer tensor of two dimensions, else of the first floating one of three or
        more. Not the largest: a mask [T, T] must not pass for a batch, nor several images for several records.
    """
    tensors = [value for value in inputs if isinstance(value, Tensor) and value.dtype is not torch.bool]
    ids = [value for value in tensors if not value.is_floating_point() and value.ndim == 2]
    hidden = [value for value in tensors if value.is_floating_point() and value.ndim >= 3]
    return next((value.shape[0] for value in (*ids, *hidden)), None)
