"""Exact squared norms of per-record gradients: the whole matrix (identity) or Gram matrices (ghost), the cheaper one.

Both give the same number, so the choice may depend on the shapes of the micro-batch. The choice between an exact norm
and a sketch may not: it changes the number, and the shapes depend on which other records were drawn.

Source of the ghost norm: Goodfellow (arXiv 1510.01799); Li et al. (arXiv 2110.05679).
"""

from collections.abc import Sequence
from itertools import combinations

import torch
from torch import Tensor

from dprc_lightning.sketch.factors import Factors, gram


def squared_norms(uses: Sequence[Factors]) -> Tensor:
    """Squared Frobenius norm of each record's gradient, summed over all uses of the parameter before squaring.

    Guarantee: exact up to rounding (of which `dprc_lightning.layers.tracker.rounding_share` takes care), also for a
    tied weight: ||g1 + g2||^2 can be twice ||g1||^2 + ||g2||^2, so the uses are never squared one by one.

    Args:
        uses: All uses of one parameter in one micro-batch, at least one.

    Returns:
        [B], float32.
    """
    rows = sum(use.length for use in uses)
    n0, n1 = uses[0].shape
    # Multiply-adds per record: rows * n0 * n1 for the matrix, rows^2 * (n0 + n1) for the Gram matrices.
    by_gram = rows * (n0 + n1) < n0 * n1
    # One record at a time: the memory is one n0 x n1 matrix, not B of them.
    squared = [
        _gram_sum(uses, record) if by_gram else _dense_sum(uses, record).square().sum()
        for record in range(uses[0].right.shape[0])
    ]
    return torch.stack(squared) if squared else uses[0].right.new_zeros(0, dtype=torch.float32)


def _gram_sum(uses: Sequence[Factors], record: int) -> Tensor:
    total = sum(gram(use, use, record) for use in uses) + 2.0 * sum(
        gram(a, b, record) for a, b in combinations(uses, 2)
    )
    return torch.as_tensor(total).clamp(min=0.0).float()


def _dense_sum(uses: Sequence[Factors], record: int) -> Tensor:
    total = uses[0].dense(record)
    for use in uses[1:]:
        total += use.dense(record)
    return total
