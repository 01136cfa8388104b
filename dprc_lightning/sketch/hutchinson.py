"""Hutchinson's estimate of a per-record gradient norm."""

from typing import Literal

from torch import Tensor

from dprc_lightning.sketch.factors import BLOCK_ROWS, Factors
from dprc_lightning.sketch.matrix import ProjectionMatrix, as_matrix, times_all

Side = Literal[0, 1]

_PRODUCT_BYTES = 2**26


def cheaper_side(n0: int, n1: int) -> Side:
    """Which axis of a weight [n0, n1] the projection contracts.

    The floats needed are ``k * (p_side + B * other_side)`` with B >= 1, least when P lies on the longer axis. The rule
    must not look at B: P's shape would then depend on the drawn batch, which the guarantee does not cover.

    Args:
        n0: Rows of the weight.
        n1: Columns of the weight.

    Returns:
        0 or 1, the longer axis.
    """
    return 0 if n0 >= n1 else 1


def sketch(use: Factors, projection: Tensor | ProjectionMatrix, side: Side) -> Tensor:
    """``Y_i = right_i^T (left_i P)`` (side 0) or ``left_i^T (right_i P)`` (side 1): ``E ||Y_i||_F^2 = ||g_i||_F^2``.

    Guarantee: with P's entries iid N(0, 1/k), ``||Y_i||^2 / ||g_i||^2 = sum_j lambda_j chi2_j(k)/k`` with lambda the
    normalised spectrum of g_i: the family that the accountant's laws cover (arXiv 2605.24879, and
    `dprc_lightning.accounting`). Entries +-1/sqrt(k) have another law, of which the accountant must be told. Y is
    linear in g_i: the sketches of several uses of one parameter ADD, and are squared only after that. With P the
    identity the norm is exact.

    Unbiased: ``E ||g P||_F^2 = tr(g E[P P^T] g^T) = ||g||_F^2`` because ``E[P P^T] = I``, for Gaussian entries and for
    random signs.

    Args:
        use: One use of the parameter.
        projection: P, [n_side, k]; a tensor is float32.
        side: The axis of the weight that P contracts.

    Returns:
        [B, n_other, k], float32. Peak extra memory: [B, min(T, BLOCK_ROWS), k] float32, the factors' blocks, and one
        row block of P. Each block of `BLOCK_ROWS` tokens goes through P once. Where P's rows are made again each time,
        as many blocks as have 64 MiB of products share a row block; the sums are the same, bit for bit.
    """
    # left_i^T (right_i P) would be a scatter over the vocabulary: V x k floats per record, never wanted.
    assert side == 0 or not use.one_hot, "an embedding's projection lies on the vocabulary side"
    matrix = as_matrix(projection)
    projected, other = (use.left, use.right) if side == 0 else (use.right, use.left)
    window = tokens_at_once(other.shape[0], matrix.shape[1]) if matrix.made_anew else BLOCK_ROWS
    total: Tensor | None = None
    for begin in range(0, max(use.length, 1), window):
        end = min(begin + window, max(use.length, 1))
        blocks = [slice(start, min(start + BLOCK_ROWS, end)) for start in range(begin, end, BLOCK_ROWS)]
        if use.one_hot:
            gathered = matrix.gather(projected[:, begin:end])
            products = [gathered[:, block.start - begin : block.stop - begin] for block in blocks]
            del gathered
        else:
            products = times_all([projected[:, block] for block in blocks], matrix)
        for block, product in zip(blocks, products, strict=True):
            part = other[:, block].float().mT @ product
            total = part if total is None else total.add_(part)
    assert total is not None
    return total


def tokens_at_once(records: int, columns: int) -> int:
    """How many tokens of each record share a row block of P that is made for them: a matter of memory and time alone.

    Args:
        records: B.
        columns: k.

    Returns:
        A multiple of `BLOCK_ROWS`; their products with P take 64 MiB, or are one block.
    """
    return BLOCK_ROWS * max(_PRODUCT_BYTES // max(4 * records * columns * BLOCK_ROWS, 1), 1)
