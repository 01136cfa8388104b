"""Hutch++: the large directions of a per-record gradient exactly, and Hutchinson's estimate of what is left.

Meyer, Musco, Musco, Woodruff (arXiv 2010.09649); for per-record norms arXiv 2605.24879. Here the basis lies on the
axis that P does not contract, the shorter one: the mirror of ``M P - (M Q)(Q^T P)``, with the same law. In a language
model's head it is [d, k] for each record where the other would be [vocabulary, k].
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from dprc_lightning.sketch.factors import BLOCK_ROWS, Factors
from dprc_lightning.sketch.hutchinson import Side, sketch
from dprc_lightning.sketch.matrix import ProjectionMatrix, as_matrix

PRODUCTS = 4
"""Of the gradient with k columns: M^T S, M times it, M^T Q, and M P, which is all that Hutchinson's estimate takes."""

BLOCK_COLUMNS = 64
"""Columns of the basis that go through a record's gradient at once."""

BLOCK_WIDTH = 8192
"""Entries of a row (token) of the contracted axis that are float32 copies at once."""

RANK_TOLERANCE = 1e-5
"""A column whose part beside those before it is smaller, as a share of the longest column, is rounding: zero it."""

WORST_BASIS = 1e-3
"""A basis that is further from orthonormal is left out. Householder's are off by 1e-6."""


def hutchpp_squared_norms(
    uses: Sequence[Factors], projection: Tensor | ProjectionMatrix, head: Tensor | ProjectionMatrix, side: Side
) -> Tensor:
    """Squared norm of each record's gradient, over all uses of its parameter: exact on a basis, estimated beside it.

    With M [d, p] the gradient of one record, P [p, k] and S [d, k] independent, and Q = orth(M M^T S) [d, k]:

        ||Q^T M||_F^2 + ||M P - Q (Q^T (M P))||_F^2

    M itself is never formed: M S', M^T S' and M P go through the factors, by blocks of `BLOCK_ROWS` tokens.

    Guarantee: S and P are independent and shared by all records of the step, so given S the basis Q is a function of
    the record alone, and does not depend on P. If Q^T Q is a diagonal of zeros and ones, then given S

        n_hat^2 / ||M||^2 = tau + sum_j mu_j chi2_j(k)/k,   tau + sum_j mu_j = 1,

    with tau the share of the head and mu the spectrum of (I - Q Q^T) M over ||M||^2: the family that the accountant
    covers for Hutchinson with the same k (`sketch`; docs/accounting.md, section 1). It never uses tau: that is private.

    A Q that is not orthonormal would lose norm. With a the eigenvalues of Q Q^T the weights tau + sum_j mu_j are at
    least min(1 - a + a^2). Columns beyond the rank are zeroed exactly, so all a lie within E of 0 or 1, where E =
    ||Q^T Q - D||_F, D the diagonal of zeros and ones (Weyl), and the sum is at least 1 - E. The estimate is divided by
    1 - E, of the Q that is really used; where E > `WORST_BASIS`, or is no number, Q is zero and the estimate is
    Hutchinson's. Both look at the record and at S alone. Rounding of the sums over tokens is that of a sketch, for a
    token's term is no longer than with Q = I, and is covered by `dprc_lightning.layers.tracker.rounding_share`; an
    embedding's rows are added in float64.

    Unbiased: given Q, E ||(I - Q Q^T) M P||^2 = ||(I - Q Q^T) M||^2, and Pythagoras.

    Args:
        uses: All uses of one parameter in one micro-batch, at least one.
        projection: P, [p, k].
        head: S, [d, any number of columns], independent of P.
        side: The axis of the weight that P contracts, of length p.

    Returns:
        [B], float64. Peak extra memory: `floats_per_record`, the float32 blocks of the factors, S and P.
    """
    # The uses of a tied weight are finished after the pass, where a caller's autocast may be on.
    with torch.autocast(uses[0].right.device.type, enabled=False):
        gradient = _Gradient(uses, side)
        basis, error = orthonormal(_range(gradient, _whole(head)))
        exact = torch.zeros_like(error)
        for columns in _blocks(basis.shape[-1], BLOCK_COLUMNS):
            exact += _squares(gradient.up(basis[..., columns]))
        rest = sum(sketch(use, projection, side) for use in uses)
        assert isinstance(rest, Tensor)
        rest -= basis @ (basis.mT @ rest)
        return (exact + _squares(rest)) / (1.0 - error)


def head_name(name: str) -> str:
    """The name under which `Projections.matrix` gives S: that of no parameter, for no part of theirs is empty.

    Guarantee: another name is another key, so S and the parameter's P, and P of every other parameter, are independent.

    Args:
        name: The parameter's, which is that of P.

    Returns:
        Another one.
    """
    return f"{name}..head"


def orthonormal(spanning: Tensor) -> tuple[Tensor, Tensor]:
    """An orthonormal basis of what some columns span, by Householder QR.

    Args:
        spanning: [B, d, k], float32.

    Returns:
        Q, [B, d, min(d, k)], whose columns beyond the rank are exactly zero; and ||Q^T Q - D||_F, [B], float64, with D
        the diagonal of zeros and ones. Of a record with NaN, or whose Q would be no basis, both are zero.
    """
    basis, triangle = torch.linalg.qr(spanning)
    sizes = triangle.diagonal(dim1=-2, dim2=-1).abs()
    # Of the columns that came: the first of R's own parts may be small by chance, beside rounding in the others.
    largest = torch.linalg.vector_norm(triangle, dim=-2).amax(-1, keepdim=True)
    # Not a product with zero, which keeps NaN; no comparison with NaN is true.
    kept = sizes > RANK_TOLERANCE * largest
    basis = basis.where(kept.unsqueeze(-2), 0.0)
    wide = basis.double()
    error = torch.linalg.matrix_norm(wide.mT @ wide - torch.diag_embed(kept.double()))
    sound = error <= WORST_BASIS
    return basis.where(sound.view(-1, 1, 1), 0.0), error.where(sound, 0.0)


def floats_per_record(contracted: int, other: int, columns: int) -> int:
    """float32 numbers that are live at once for each record: one block of M^T S, and four matrices [d, k].

    Args:
        contracted: p. An embedding has no more than its tokens, but takes float64 and float32 (three floats a number).
        other: d.
        columns: k.

    Returns:
        The number.
    """
    return min(columns, BLOCK_COLUMNS) * contracted + 4 * columns * other


def flops_per_record(other: int, columns: int) -> int:
    """Operations beside those per token: the basis on the sketch, twice, and its test. Householder's are not in them.

    Args:
        other: d.
        columns: k.

    Returns:
        Multiplication and addition counted each.
    """
    width = min(other, columns)
    return 4 * other * width * columns + 2 * other * width**2


def _range(gradient: "_Gradient", start: Tensor) -> Tensor:
    """``M M^T S`` of each record, [B, d, k], but for the scale of its blocks of columns.

    Args:
        gradient: M.
        start: S.

    Returns:
        Float32, scaled so that a gradient of any size stays in range: the span is what counts.
    """
    parts = [
        gradient.down(_scaled(gradient.up(start[:, columns]))) for columns in _blocks(start.shape[1], BLOCK_COLUMNS)
    ]
    return torch.cat([_scaled(part) for part in parts], dim=-1)


def _scaled(value: Tensor) -> Tensor:
    """Each record over its largest entry, in place."""
    largest = value.abs().amax((1, 2), keepdim=True)
    return value.div_(largest.where(largest > 0, 1.0))


def _squares(value: Tensor) -> Tensor:
    return torch.linalg.vector_norm(value.flatten(1), dim=1, dtype=torch.float64).square()


def _whole(matrix: Tensor | ProjectionMatrix) -> Tensor:
    blocks = as_matrix(matrix)
    rows, height = blocks.shape[0], blocks.block_rows
    return torch.cat([blocks.rows(start, min(start + height, rows)) for start in range(0, rows, height)])


def _blocks(length: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


class _Gradient:
    """M of each record, [d, p], as a sum of products of factors, of which those on p may be one-hot.

    Args:
        uses: At least one.
        side: The axis of the weight that is p.
    """

    def __init__(self, uses: Sequence[Factors], side: Side) -> None:
        self._records = uses[0].right.shape[0]
        self._dense = [(u.left, u.right) if side == 0 else (u.right, u.left) for u in uses if not u.one_hot]
        chosen = [use for use in uses if use.one_hot]
        assert side == 0 or not chosen, "an embedding's projection lies on the vocabulary side"
        self._values = [use.right for use in chosen]
        self._rows = uses[0].shape[side]
        if chosen:
            self._places, self._owners = _numbered(torch.cat([use.left for use in chosen], 1), self._rows)
            if not self._dense:
                # Absent ids have zero rows, which need not exist.
                self._rows = self._owners.shape[1]
            else:
                self._ids = _flat(torch.cat([use.left for use in chosen], 1), self._rows)
            self._places = _flat(self._places, self._owners.shape[1])

    def up(self, basis: Tensor) -> Tensor:
        """``M^T X``.

        Args:
            basis: X, [d, c] for all records or [B, d, c], float32.

        Returns:
            [B, p, c], float32; of embeddings alone as many rows as may be present.
        """
        chosen = self._up_chosen(basis) if self._values else None
        if not self._dense:
            assert chosen is not None
            return chosen
        total = basis.new_zeros((self._records, self._rows, basis.shape[-1]))
        for outer, inner in self._dense:
            for rows in _blocks(inner.shape[1], BLOCK_ROWS):
                coefficients = inner[:, rows].float() @ basis
                for width in _blocks(self._rows, BLOCK_WIDTH):
                    total[:, width] += outer[:, rows, width].float().mT @ coefficients
        if chosen is not None:
            owners = _flat(self._owners, self._rows)
            total.view(-1, total.shape[-1]).index_add_(0, owners.flatten(), chosen.flatten(0, 1))
        return total

    def _up_chosen(self, basis: Tensor) -> Tensor:
        """One row per id: one id may stand at every position, so the rows are added in float64."""
        present, columns = self._owners.shape[1], basis.shape[-1]
        sums = basis.new_zeros((self._records * present, columns), dtype=torch.float64)
        start = 0
        for values in self._values:
            for rows in _blocks(values.shape[1], BLOCK_ROWS):
                terms = (values[:, rows].float() @ basis).double()
                places = self._places[:, start : start + terms.shape[1]]
                sums.index_add_(0, places.flatten(), terms.flatten(0, 1))
                start += terms.shape[1]
        return sums.float().view(self._records, present, columns)

    def down(self, value: Tensor) -> Tensor:
        """``M Z``.

        Args:
            value: Z, as `up` returned it.

        Returns:
            [B, d, c], float32.
        """
        total: Tensor | None = None
        for coefficients, inner in self._coefficients(value):
            part = inner.float().mT @ coefficients
            total = part if total is None else total.add_(part)
        assert total is not None
        return total

    def _coefficients(self, value: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """What each block of tokens has on Z, and its factor on d."""
        for outer, inner in self._dense:
            for rows in _blocks(max(inner.shape[1], 1), BLOCK_ROWS):
                found = value.new_zeros((self._records, inner[:, rows].shape[1], value.shape[-1]))
                for width in _blocks(self._rows, BLOCK_WIDTH):
                    found += outer[:, rows, width].float() @ value[:, width]
                yield found, inner[:, rows]
        flat, start = value.flatten(0, 1), 0
        for values in self._values:
            for rows in _blocks(max(values.shape[1], 1), BLOCK_ROWS):
                inner = values[:, rows]
                index = (self._ids if self._dense else self._places)[:, start : start + inner.shape[1]]
                yield flat[index], inner
                start += inner.shape[1]


def _numbered(ids: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
    """The ids of each record numbered from 0 on, without shapes that depend on how many are different.

    Args:
        ids: [B, T].
        vocabulary: No id is as large.

    Returns:
        The number of each, [B, T]; and the id of each number, [B, min(T, vocabulary)] (at least 1), 0 where none is.
    """
    records, length = ids.shape
    if length >= vocabulary:
        return ids, torch.arange(vocabulary, device=ids.device).expand(records, -1)
    ordered, order = ids.sort(dim=1)
    fresh = torch.zeros_like(ordered)
    fresh[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    numbers = torch.empty_like(ordered).scatter_(1, order, fresh.cumsum(1))
    return numbers, ids.new_zeros(records, max(length, 1)).scatter_(1, numbers, ids)


def _flat(index: Tensor, rows: int) -> Tensor:
    """Rows of each record as rows of all records one after the other."""
    return index + rows * torch.arange(len(index), device=index.device).unsqueeze(1)
