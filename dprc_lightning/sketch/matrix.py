"""What a sketch needs of P: row blocks one after the other, and single rows by id. P as a whole need never exist."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from dprc_lightning.sketch.blocks import rows_at_once


class ProjectionMatrix(Protocol):
    """P of one parameter in one logical step, [rows, k]. The same numbers however often and in whatever order asked."""

    @property
    def made_anew(self) -> bool:
        """Whether rows are made again each time: then ask seldom, for many tokens at once."""

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
    """P as a tensor.

    Args:
        entries: [rows, k], float32.
    """

    made_anew = False

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
        """No copy of P is saved by it, but one of the factor in float32, and sums are those of a P that is not kept."""
        return rows_at_once(self.entries.shape[1])

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
    return times_all([factor], projection)[0]


def times_all(factors: Sequence[Tensor], projection: ProjectionMatrix) -> list[Tensor]:
    """`times` of several factors, which take each row block of P in turn: it is made once for all of them.

    Args:
        factors: Each [..., rows], any floating dtype.
        projection: P, [rows, k].

    Returns:
        For each factor [..., k], float32, the same bit for bit as of `times` alone.
    """
    rows = projection.shape[0]
    totals: list[Tensor] = []
    for start in range(0, max(rows, 1), projection.block_rows):
        stop = min(start + projection.block_rows, rows)
        block = projection.rows(start, stop)
        for i, factor in enumerate(factors):
            product = factor[..., start:stop].float() @ block
            if start == 0:
                totals.append(product)
            else:
                totals[i].add_(product)
            del product
        # Else it would live on while the next one is made.
        del block
    return totals
