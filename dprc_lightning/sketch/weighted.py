"""The clipped gradient of one use of a matrix: the sum of its per-record gradients, each times its own factor."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dprc_lightning.sketch.factors import BLOCK_ROWS, Factors

LOOP_FROM_ROWS = 64
"""From this many rows per record on, one product per record costs no more than one product of all records."""


def weighted_sum(use: Factors, weights: Sequence[float], dtype: torch.dtype = torch.float32) -> Tensor:
    """``sum_i weights_i * left_i^T right_i``.

    Guarantee: record i's term is its own gradient, made of the very factors whose norm was taken, times its weight. The
    weight enters in float32 or better, after any rounding that the factors carry. The losses are not multiplied by it:
    a product in half precision would round the factor up, and the rest of the backward would round otherwise than in
    the norm pass. A record of weight 0 is left out, so what it holds (NaN, say) reaches no sum. No partial sum of a
    record goes over more than `BLOCK_ROWS` rows, and the blocks are added one by one, so its rounding stays below
    ``(min(rows, BLOCK_ROWS) + blocks + 1) * 2^-24`` of the sum of its terms' norms, which the norm's floor covers
    (`dprc_lightning.layers.tracker.rounding_share`); an embedding's rows are added in float64.

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
    if use.one_hot:
        return _rows_by_id(use, kept, weights).to(dtype)
    if use.length < LOOP_FROM_ROWS:
        left, right, factors = _chosen(use, kept, weights, dtype)
        return left.flatten(0, 1).to(dtype).mT @ (right.to(dtype) * factors).flatten(0, 1)
    total = use.right.new_empty(use.shape, dtype=dtype)
    part = torch.empty_like(total) if use.length > BLOCK_ROWS else None
    for n, i in enumerate(kept):
        for start in range(0, use.length, BLOCK_ROWS):
            rows = slice(start, start + BLOCK_ROWS)
            left, right = use.left[i, rows].to(dtype).mT, use.right[i, rows].to(dtype)
            first = n == 0 and start == 0
            if part is None or first:
                # beta=0 does not read the fresh tensor.
                total.addmm_(left, right, beta=0.0 if first else 1.0, alpha=weights[i])
            else:
                total.add_(torch.mm(left, right, out=part), alpha=weights[i])
    return total


def _chosen(
    use: Factors, kept: Sequence[int], weights: Sequence[float], dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """The records that have a weight: left, right, and their weights [kept, 1, 1]."""
    left, right = use.left, use.right
    if len(kept) < len(weights):
        index = torch.tensor(kept, device=right.device)
        left, right = left[index], right[index]
    factors = torch.tensor([weights[i] for i in kept], dtype=dtype, device=right.device)
    return left, right, factors.view(-1, 1, 1)


def _rows_by_id(use: Factors, kept: Sequence[int], weights: Sequence[float]) -> Tensor:
    """An embedding's gradient, [n0, n1] float32. One id may stand at every position: its rows are added in float64."""
    ids, right, factors = _chosen(use, kept, weights, torch.float64)
    present, places = torch.unique(ids, return_inverse=True)
    sums = right.new_zeros((len(present), use.shape[1]), dtype=torch.float64)
    for i in range(len(ids)):
        # One record at a time: float64 copies of all would take more memory than the rest of the pass.
        sums.index_add_(0, places[i], right[i].double() * factors[i])
    return right.new_zeros(use.shape, dtype=torch.float32).index_copy_(0, present, sums.float())
