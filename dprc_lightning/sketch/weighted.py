"""The clipped gradient of one use of a matrix: the sum of its per-record gradients, each times its own factor."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dprc_lightning.sketch.factors import BLOCK_ROWS, Factors

SLAB = 2**24
"""Entries of the temporary products that are added to a larger sum: 64 MiB of float32."""


def weighted_sum(
    use: Factors, weights: Sequence[float], dtype: torch.dtype = torch.float32, total: Tensor | None = None
) -> Tensor:
    """``sum_i weights_i * left_i^T right_i``.

    Guarantee: record i's term is its own gradient, made of the very factors whose norm was taken, times its weight. The
    weight enters in float32 or better, after any rounding that the factors carry. The losses are not multiplied by it:
    a product in half precision would round the factor up, and the rest of the backward would round otherwise than in
    the norm pass. A record of weight 0 is left out, so what it holds (NaN, say) reaches no sum. No partial sum of a
    record goes over more than `BLOCK_ROWS` rows, and the blocks are added one by one, so its rounding stays below
    ``(min(rows, BLOCK_ROWS) + blocks + 1) * 2^-24`` of the sum of its terms' norms, which the norm's floor covers
    (`dprc_lightning.layers.tracker.rounding_share`); an embedding's rows are added in float64.

    A record's blocks are added one after the other, no other record's in between. Terms of several records are made
    in one product only where each has a single row, so that none can cancel within its record's rows here; in the
    precision of ``total``, for they may cancel with what it holds.

    Args:
        use: Factors of any floating dtype; products are made in ``dtype``, and sums too unless ``total`` is wider: then
            sums are made in its dtype, and of records of a single row the products too.
        weights: One per record, finite.
        dtype: float32 or float64.
        total: [n0, n1], ``dtype`` or wider, to which the sum is added in place: of other uses, or of the tokens before.
            Float64 where records' terms come into it by turns (`dprc_lightning.layers.use.interleaves`).

    Returns:
        [n0, n1], ``dtype``, or ``total`` if it was given. Peak extra memory then: `SLAB` entries, or one row block.
    """
    kept = [i for i, weight in enumerate(weights) if weight != 0.0]
    if not kept:
        return use.right.new_zeros(use.shape, dtype=dtype) if total is None else total
    if use.one_hot:
        if total is None:
            total = use.right.new_zeros(use.shape, dtype=dtype)
        for i in kept:
            add_rows(total, use.left[i], use.right[i], weights[i])
        return total
    fresh = total is None
    if total is None:
        if use.length == 1:
            left, right = _weighted(use, kept, weights, dtype)
            return left.mT @ right
        total = use.right.new_empty(use.shape, dtype=dtype)
    if use.length == 1:
        # In the sum's own precision: the terms of several records meet in this product already.
        _add_product(total, *_weighted(use, kept, weights, total.dtype), 1.0)
        return total
    for n, i in enumerate(kept):
        for start in range(0, use.length, BLOCK_ROWS):
            rows = slice(start, start + BLOCK_ROWS)
            left, right = use.left[i, rows].to(dtype), use.right[i, rows].to(dtype)
            if fresh and n == 0 and start == 0:
                # beta=0 does not read the fresh tensor.
                total.addmm_(left.mT, right, beta=0.0, alpha=weights[i])
            elif fresh and use.length <= BLOCK_ROWS:
                total.addmm_(left.mT, right, alpha=weights[i])
            else:
                _add_product(total, left, right, weights[i])
    return total


def _add_product(total: Tensor, left: Tensor, right: Tensor, weight: float) -> None:
    """``total += weight * left^T right``, the product made first: some kernels would add its terms to the sum."""
    slab = max(SLAB // max(right.shape[1], 1), 1)
    part = right.new_empty((min(slab, total.shape[0]), right.shape[1]))
    for start in range(0, total.shape[0], slab):
        columns = left[:, start : start + slab]
        product = part[: columns.shape[1]]
        total[start : start + slab].add_(torch.mm(columns.mT, right, out=product), alpha=weight)


def _weighted(use: Factors, kept: Sequence[int], weights: Sequence[float], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The records that have a weight, one after the other: left [rows, n0], and right times the weights [rows, n1]."""
    left, right = use.left, use.right
    if len(kept) < len(weights):
        index = torch.tensor(kept, device=right.device)
        left, right = left[index], right[index]
    factors = torch.tensor([weights[i] for i in kept], dtype=dtype, device=right.device).view(-1, 1, 1)
    return left.flatten(0, 1).to(dtype), (right.to(dtype) * factors).flatten(0, 1)


def add_rows(total: Tensor, ids: Tensor, right: Tensor, weight: float) -> None:
    """``total[ids[t]] += weight * right[t]``, each row's terms added up in float64 first: an embedding's gradient.

    No tensor's shape depends on the ids.

    Args:
        total: [n0, n1], changed in place.
        ids: [T], integers in [0, n0).
        right: [T, n1].
        weight: A number.
    """
    ordered, order = ids.sort()
    # The tokens of one id have one place among the sums.
    places = torch.cat([ordered.new_zeros(1), (ordered.diff() != 0).cumsum(0)])[: len(ordered)]
    columns = max(SLAB // 4 // max(len(ids), 1), 1)
    for start in range(0, total.shape[1], columns):
        part = slice(start, start + columns)
        terms = right[order, part].double() * weight
        sums = torch.zeros_like(terms).index_add_(0, places, terms)
        # Tokens of one id write the same number.
        total[:, part].index_copy_(0, ordered, (total[ordered, part] + sums[places]).to(total.dtype))
