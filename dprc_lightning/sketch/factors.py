"""The two factors of a per-record gradient, one of which may be one-hot."""

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK_ROWS = 512
"""Rows (tokens) that are added up in one product. Float32 sums over more would round by more than the norm's floor."""


@dataclass(frozen=True)
class Factors:
    """One use of a matrix parameter W [n0, n1]: record i's gradient is ``left_i^T right_i``.

    Attributes:
        left: The factor on W's first axis: [B, T, n0] of any floating dtype, or token ids [B, T] (integers) that stand
            for one-hot rows, as an embedding has them.
        right: The factor on W's second axis: [B, T, n1], any floating dtype.
        shape: (n0, n1).
    """

    left: Tensor
    right: Tensor
    shape: tuple[int, int]

    @property
    def one_hot(self) -> bool:
        """Whether ``left`` holds ids instead of a dense factor."""
        return not self.left.is_floating_point()

    @property
    def length(self) -> int:
        """T, the number of rows (tokens) of each factor."""
        return self.right.shape[1]

    def dense(self, record: int) -> Tensor:
        """The whole gradient of one record, added up by blocks of `BLOCK_ROWS`; an embedding's in float64.

        Args:
            record: Index into the batch.

        Returns:
            [n0, n1], float32.
        """
        if self.one_hot:
            ids, places = torch.unique(self.left[record], return_inverse=True)
            sums = self.right.new_zeros((len(ids), self.shape[1]), dtype=torch.float64)
            sums.index_add_(0, places, self.right[record].double())
            return self.right.new_zeros(self.shape, dtype=torch.float32).index_copy_(0, ids, sums.float())
        total = self.right.new_zeros(self.shape, dtype=torch.float32)
        for start in range(0, self.length, BLOCK_ROWS):
            rows = slice(start, start + BLOCK_ROWS)
            total += self.left[record, rows].float().mT @ self.right[record, rows].float()
        return total


def gram(a: Factors, b: Factors, record: int) -> Tensor:
    """Inner product of two uses' gradients of one record, without forming either.

    <A_l^T A_r, B_l^T B_r> = sum over (t, s) of <A_l[t], B_l[s]> <A_r[t], B_r[s]>.

    In float64: where tokens nearly cancel, the sum is far smaller than its terms, and float32 could put a large norm at
    zero. (A sketch or a whole matrix adds up before it squares, and loses less.)

    Args:
        a: First use, T rows.
        b: Second use of the same parameter, S rows.
        record: Index into the batch.

    Returns:
        Scalar, float64. Peak extra memory: the factors of one record and two [T, S] matrices, float64.
    """
    right = a.right[record].double() @ b.right[record].double().mT
    a_left, b_left = a.left[record], b.left[record]
    if a.one_hot and b.one_hot:
        left = (a_left.unsqueeze(1) == b_left.unsqueeze(0)).to(right.dtype)
    elif a.one_hot:
        # <onehot(id_t), b_s> = b_s[id_t]
        left = b_left[:, a_left].double().mT
    elif b.one_hot:
        left = a_left[:, b_left].double()
    else:
        left = a_left.double() @ b_left.double().mT
    return (left * right).sum()
