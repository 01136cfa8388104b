"""The two factors of a per-record gradient, one of which may be one-hot."""

from dataclasses import dataclass

import torch
from torch import Tensor


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
        """The whole gradient of one record.

        Args:
            record: Index into the batch.

        Returns:
            [n0, n1], float32.
        """
        right = self.right[record].float()
        if self.one_hot:
            return right.new_zeros(self.shape).index_add_(0, self.left[record], right)
        return self.left[record].float().mT @ right


def gram(a: Factors, b: Factors) -> Tensor:
    """Inner products of two uses' gradients, without forming either.

    <A_l^T A_r, B_l^T B_r> = sum over (t, s) of <A_l[t], B_l[s]> <A_r[t], B_r[s]>.

    Args:
        a: First use, T rows.
        b: Second use of the same parameter, S rows.

    Returns:
        [B], float32. Peak extra memory: two [B, T, S] float32 matrices.
    """
    right = a.right.float() @ b.right.float().mT
    if a.one_hot and b.one_hot:
        left = (a.left.unsqueeze(2) == b.left.unsqueeze(1)).to(right.dtype)
    elif a.one_hot:
        # <onehot(id_t), b_s> = b_s[id_t]
        left = _columns(b.left, a.left).mT
    elif b.one_hot:
        left = _columns(a.left, b.left)
    else:
        left = a.left.float() @ b.left.float().mT
    return (left * right).sum(dim=(1, 2))


def _columns(dense: Tensor, ids: Tensor) -> Tensor:
    """Dense [B, T, n], ids [B, S] -> [B, T, S] with entry (t, s) = dense[t, ids[s]]."""
    index = ids.unsqueeze(1).expand(-1, dense.shape[1], -1)
    return torch.gather(dense, 2, index).float()
