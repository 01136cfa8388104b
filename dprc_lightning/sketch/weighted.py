"""The clipped gradient of one use of a matrix: the sum of its per-record gradients, each times its own factor."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dprc_lightning.sketch.factors import Factors

LOOP_FROM_ROWS = 64
"""From this many rows per record on, one product per record costs no more than one product of all records."""


def weighted_sum(use: Factors, weights: Sequence[float], dtype: torch.dtype = torch.float32) -> Tensor:
    """``sum_i weights_i * left_i^T right_i``.

    Guarantee: record i's term is its own gradient, made of the very factors whose norm was taken, times its weight. The
    weight enters in float32 or better, after any rounding that the factors carry. The losses are not multiplied by it:
    a product in half precision would round the factor up, and the rest of the backward would round otherwise than in
    the norm pass. A record of weight 0 is left out, so what it holds (NaN, say) reaches no sum.

    Args:
        use: Factors of any floating dtype; products and sums are made in ``dtype``.
        weights: One per record, finite.
        dtype: float32 or float64.

    Returns:
        [n0, n1], ``dtype``.
    """
    kept = [i for i, weight in enumerate(weights) if weight != 0.0]
    if not kept:
        return use.right.new_zeros(use.shape, dtype=dtype)
    if not use.one_hot and use.length >= LOOP_FROM_ROWS:
        total = use.right.new_empty(use.shape, dtype=dtype)
        for n, i in enumerate(kept):
            # beta=0 does not read the fresh tensor.
            total.addmm_(use.left[i].to(dtype).mT, use.right[i].to(dtype), beta=float(n > 0), alpha=weights[i])
        return total
    left, right = use.left, use.right
    if len(kept) < len(weights):
        index = torch.tensor(kept, device=right.device)
        left, right = left[index], right[index]
    factors = torch.tensor([weights[i] for i in kept], dtype=dtype, device=right.device)
    rows = (right.to(dtype) * factors.view(-1, 1, 1)).flatten(0, 1)
    if use.one_hot:
        return torch.ops.aten.embedding_dense_backward(rows, left.flatten(), use.shape[0], -1, False)
    return left.flatten(0, 1).to(dtype).mT @ rows
