"""Per-record losses [B] that depend on their own record alone."""

import torch.nn.functional as F
from torch import Tensor


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
