"""Per-record losses [B] that depend on their own record alone."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from dprc_lightning.errors import InvalidArgumentError, LossShapeError, UnsupportedModuleError
from dprc_lightning.layers.lm_head import TokenLoss, head_losses, remembering_norms


def classification_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy of each record.

    Args:
        logits: [B, classes], any floating dtype.
        labels: [B], int64.

    Returns:
        [B], float32.
    """
    return F.cross_entropy(logits.float(), labels, reduction="none")


def causal_lm_loss(logits: Tensor, labels: Tensor, ignore_index: int = -100) -> Tensor:
    """Next-token cross entropy of each record: its own sum over its own count of labels.

    A mean over the batch's valid tokens would make one record's gradient depend on the others' lengths. A record
    without a single label has loss 0 and gradient 0, not NaN.

    Args:
        logits: [B, T, vocabulary], any floating dtype; position t predicts label t + 1, as Hugging Face has it.
        labels: [B, T], int64, ``ignore_index`` where nothing is to be learned.
        ignore_index: The label that is left out.

    Returns:
        [B], float32.
    """
    targets = labels[:, 1:]
    per_token = F.cross_entropy(
        logits[:, :-1].float().transpose(1, 2), targets, ignore_index=ignore_index, reduction="none"
    )
    counts = (targets != ignore_index).sum(1).clamp(min=1)
    return per_token.sum(1) / counts


def causal_lm_losses(
    model: Any,
    labels: Tensor,
    *,
    reduction: Literal["mean", "sum"] = "mean",
    label_smoothing: float = 0.0,
    ignore_index: int = -100,
    **inputs: Any,
) -> Tensor:
    """`causal_lm_loss` of a Hugging Face model, without its logits: for long contexts and large vocabularies.

    The model is called at its root, so that every engine's hooks run; its head makes the losses, 512 tokens of one
    record at a time. Equal to ``causal_lm_loss(model(**inputs).logits, labels)`` up to rounding, attached or not, tied
    or not, with a bias and with a soft cap of the logits (Gemma). On an attached model call `begin_step` before.

    Args:
        model: A model with `get_output_embeddings`, whose head is a linear layer and whose output has its logits as
            the head, and a soft cap, made them.
        labels: [B, T], int64, ``ignore_index`` where nothing is to be learned; position t predicts label t + 1.
        reduction: Of a record's own tokens.
        label_smoothing: Weight of the uniform distribution, in [0, 1).
        ignore_index: The label that is left out.
        **inputs: What the model is called with: ``input_ids``, ``attention_mask``, and so on.

    Returns:
        [B], float32.

    Raises:
        InvalidArgumentError: reduction or label_smoothing is not one of the above, or a label is no token.
        LossShapeError: There is not one label for each token.
        UnsupportedModuleError: The model has no such head, or does more with its logits.
    """
    if reduction not in ("mean", "sum"):
        raise InvalidArgumentError("reduction", reduction, "expected mean or sum, of a record's own tokens")
    number = isinstance(label_smoothing, int | float) and math.isfinite(label_smoothing)
    if not (number and 0.0 <= label_smoothing < 1.0):
        raise InvalidArgumentError("label_smoothing", label_smoothing, "expected a number in [0, 1)")
    remedy = "make the loss with causal_lm_loss(logits, labels)"
    if not hasattr(model, "get_output_embeddings"):
        raise UnsupportedModuleError(
            f"causal_lm_losses: a {type(model).__name__} has no get_output_embeddings; give it the Hugging Face model, "
            f"or {remedy}"
        )
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        kind = f"{type(head).__module__}.{type(head).__name__}"
        raise UnsupportedModuleError(f"causal_lm_losses: the model's head is a {kind}, not a torch.nn.Linear; {remedy}")
    if labels.ndim != 2:
        raise LossShapeError(f"causal_lm_losses: labels of shape {tuple(labels.shape)}; expected [B, T]")
    made: list[Tensor] = []
    versions: list[int] = []
    config = model.config
    cap = getattr(config, "final_logit_softcapping", None)
    # The last position predicts nothing.
    targets = F.pad(labels[:, 1:], (0, 1), value=ignore_index)
    outside = (targets != ignore_index) & ((targets < 0) | (targets >= head.out_features))
    if not targets.is_meta and bool(outside.any()):
        raise InvalidArgumentError(
            "labels", "<private>", f"expected tokens, 0 to {head.out_features - 1}, or ignore_index={ignore_index}"
        )
    loss = TokenLoss(targets, reduction == "mean", label_smoothing, cap, ignore_index)

    def forward(hidden: Tensor) -> Tensor:
        made.append(head_losses(head, hidden, loss))
        versions.append(_version(made[0]))
        return made[0]

    with _instead(head, "forward", forward), _without_cap(config, cap), remembering_norms(head):
        output = model(**inputs)
    found = getattr(output, "logits", None)
    if found is None:
        raise UnsupportedModuleError(
            f"causal_lm_losses: {type(model).__name__} returned a {type(output).__name__} without logits; leave "
            f"return_dict out, or {remedy}"
        )
    # Engines hang their hooks on the output of a module, so it need not be the same object.
    same = len(made) == 1 and found.shape == made[0].shape and found.data_ptr() == made[0].data_ptr()
    if not same or _version(made[0]) != versions[0]:
        raise UnsupportedModuleError(
            f"causal_lm_losses: {type(model).__name__} changes the output of its head, or does not call it once; "
            f"{remedy}"
        )
    return found


def _version(tensor: Tensor) -> int:
    # Evaluation under inference_mode counts no writes, and trains nothing.
    return 0 if tensor.is_inference() else tensor._version


@contextmanager
def _instead(module: nn.Module, name: str, value: Any) -> Iterator[None]:
    # An instance attribute, past `nn.Module.__setattr__`: the hooks of engines hang on the call, not on the class.
    before = module.__dict__.get(name)
    module.__dict__[name] = value
    try:
        yield
    finally:
        if before is None:
            del module.__dict__[name]
        else:
            module.__dict__[name] = before


@contextmanager
def _without_cap(config: Any, cap: float | None) -> Iterator[None]:
    if cap is None:
        yield
        return
    config.final_logit_softcapping = None
    try:
        yield
    finally:
        config.final_logit_softcapping = cap
