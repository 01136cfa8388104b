"""What a sketch needs of P: row blocks one after the other, and single rows by id. P as a whole need never exist."""

from typing import Protocol

from torch import Tensor


class ProjectionMatrix(Protocol):
    """P of one parameter in one logical step, [rows, k]. The same numbers however often and in whatever order asked."""

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, k)."""

    @property
    def nbytes(self) -> int:
        """Bytes that are held between two uses."""

    @property
    def block_rows(self) -> int:
        """How many rows come at once."""

    def rows(self, start: int, stop: int) -> Tensor:
        """One block, [stop - start, k] float32; ``start`` is a multiple of `block_rows`, ``stop`` the next or rows."""

    def gather(self, ids: Tensor) -> Tensor:
        """``P[ids]``, [*ids.shape, k] float32, for ids of any shape."""


class DenseMatrix:
    """P as a tensor: one block.

    Args:
        entries: [rows, k], float32.
    """

    def __init__(self, entries: Tensor) -> None:
        self.entries = entries

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, k)."""
        return self.entries.shape[0], self.entries.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return self.entries.nbytes

    @property
    def block_rows(self) -> int:
        """All of them."""
        return max(len(self.entries), 1)

    def rows(self, start: int, stop: int) -> Tensor:
        """A part of the tensor.

        Args:
            start: First row.
            stop: The row after the last.

        Returns:
            [stop - start, k], a view.
        """
        return self.entries[start:stop]

    def gather(self, ids: Tensor) -> Tensor:
        """Single rows.

        Args:
            ids: Any shape.

        Returns:
            [*ids.shape, k], float32.
        """
        return self.entries[ids]


def as_matrix(projection: Tensor | ProjectionMatrix) -> ProjectionMatrix:
    """A tensor as a `ProjectionMatrix`; any other as it is.

    Args:
        projection: P.

    Returns:
        P.
    """
    return DenseMatrix(projection) if isinstance(projection, Tensor) else projection


def times(factor: Tensor, projection: ProjectionMatrix) -> Tensor:
    """``factor P``, added up over P's row blocks.

    Rounding: each entry is a float32 sum of ``rows`` products in blocks, so no partial sum has more terms than a single
    product's would: the usual bound ``rows * 2^-24 * sum |products|`` holds for both, and blocks only lower it.

    Args:
        factor: [..., rows], any floating dtype.
        projection: P, [rows, k].

    Returns:
        [..., k], float32.
    """
    rows = projection.shape[0]
    total: Tensor | None = None
    for start in range(0, max(rows, 1), projection.block_rows):
        stop = min(start + projection.block_rows, rows)
        # No name for the block: it would live on while the next one is made.
        product = factor[..., start:stop].float() @ projection.rows(start, stop)
        total = product if total is None else total.add_(product)
    assert total is not None, "there is at least one block"
    return total
