"""P of random signs: its bits against whole matrices, what it depends on, and what it takes."""

import hashlib
from fractions import Fraction

import numpy as np
import pytest
import torch
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from scipy import stats
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dprc_lightning.errors import StepOrderError
from dprc_lightning.keys import derive
from dprc_lightning.sketch import (
    BLOCK_ROWS,
    PROJECTIONS,
    ROWS_PER_BLOCK,
    DenseMatrix,
    Factors,
    RademacherMatrix,
    RademacherProjections,
    sketch,
)

CPU = torch.device("cpu")
KEY = bytes(range(32))


def projection(key=KEY, index=0, name="w", rows=10, k=16):
    source = RademacherProjections(key, k)
    source.begin_step(index)
    return source.matrix(name, rows, CPU)


def dense(matrix):
    """[rows, k], float64, bit by bit in NumPy; the entries are exactly +-1/sqrt(k)."""
    k = matrix.shape[1]
    bits = np.unpackbits(matrix.bits.numpy(), axis=1, bitorder="little")[:, :k]
    return torch.from_numpy((2.0 * bits - 1.0) / np.sqrt(k))


@pytest.mark.parametrize("k", [1, 7, 8, 13, 32, 65])
@pytest.mark.parametrize("rows", [1, 5, ROWS_PER_BLOCK, ROWS_PER_BLOCK + 3])
def test_blocks_and_rows_are_the_bits(k, rows):
    matrix = projection(rows=rows, k=k)
    expected = dense(matrix)
    starts = range(0, rows, matrix.block_rows)
    blocks = [matrix.rows(start, min(start + matrix.block_rows, rows)) for start in starts]
    assert max(map(len, blocks)) <= ROWS_PER_BLOCK
    unpacked = torch.cat(blocks)
    assert unpacked.dtype is torch.float32 and unpacked.shape == matrix.shape == (rows, k)
    assert torch.equal(unpacked.sign().double(), expected.sign())
    assert torch.allclose(unpacked.double(), expected, rtol=2.0**-23, atol=0)
    ids = torch.randint(0, rows, (2, 3))
    assert torch.equal(matrix.gather(ids), unpacked[ids])


def test_the_bits_are_the_key_streams_own():
    """A stored format: another value means that a resumed run would draw other projections."""
    matrix = projection(index=3, name="layer.weight", rows=ROWS_PER_BLOCK + 2, k=12)
    for block, count in enumerate((ROWS_PER_BLOCK, 2)):
        key = derive(KEY, "P rademacher", 3, "layer.weight", block)
        stream = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor().update(bytes(2 * count))
        assert matrix.bits[block * ROWS_PER_BLOCK :][:count].numpy().tobytes() == stream
    digest = hashlib.sha256(matrix.bits.numpy().tobytes()).hexdigest()
    assert digest == "5d894943274ce0c5905119979782186804a6108ec5bc55a24176963699d619ad"


@pytest.mark.parametrize("k", [*range(1, 70), 512, 4096, 10**6 + 3])
def test_the_scale_is_the_next_float_above(k):
    """Rounded up, an entry makes no norm smaller; by so little that nobody needs to know."""
    scale = RademacherMatrix(torch.zeros(1, -(-k // 8), dtype=torch.uint8), k).scale
    below = float(np.nextafter(np.float32(scale), np.float32(0)))
    assert Fraction(below) ** 2 < Fraction(1, k) <= Fraction(scale) ** 2
    assert float(np.float32(scale)) == scale


@pytest.mark.parametrize("k", [5, 32])
@pytest.mark.parametrize("length", [3, BLOCK_ROWS + 5])
@pytest.mark.parametrize(("side", "one_hot"), [(0, False), (0, True), (1, False)])
def test_a_sketch_is_the_gradient_times_p(side, one_hot, length, k):
    """Over several blocks of tokens and several row blocks of P."""
    generator = torch.Generator().manual_seed(k + length)
    n0, n1 = (ROWS_PER_BLOCK + 70, 3) if side == 0 else (3, ROWS_PER_BLOCK + 70)
    right = torch.randn(2, length, n1, generator=generator)
    if one_hot:
        left = torch.randint(0, n0, (2, length), generator=generator)
        gradient = torch.zeros(2, n0, n1, dtype=torch.float64)
        for i in range(2):
            gradient[i].index_add_(0, left[i], right[i].double())
    else:
        left = torch.randn(2, length, n0, generator=generator)
        gradient = torch.einsum("bti,btj->bij", left.double(), right.double())
    matrix = projection(rows=(n0, n1)[side], k=k)
    expected = (gradient.mT if side == 0 else gradient) @ dense(matrix)
    found = sketch(Factors(left, right, (n0, n1)), matrix, side)
    assert found.dtype is torch.float32
    assert float((found.double() - expected).norm() / expected.norm()) < 1e-6


def test_a_tensor_is_one_block():
    """A dense P gives the same numbers, bit for bit, as a tensor and as a matrix of one block."""
    torch.manual_seed(0)
    use = Factors(torch.randn(2, 600, 9), torch.randn(2, 600, 4), (9, 4))
    entries = torch.randn(9, 5)
    assert torch.equal(sketch(use, entries, 0), sketch(use, DenseMatrix(entries), 0))
    left = use.left.split(BLOCK_ROWS, dim=1)
    right = use.right.split(BLOCK_ROWS, dim=1)
    expected = sum((r.mT @ (a @ entries) for a, r in zip(left, right, strict=True)), start=torch.zeros(2, 4, 5))
    assert torch.equal(sketch(use, entries, 0), expected)


def test_the_estimate_is_unbiased_and_has_its_variance():
    """Var(||g P||^2) = 2/k (||g^T g||_F^2 - sum_i ||g_i||^4) for columns g_i: less than Gaussian entries have."""
    torch.manual_seed(0)
    draws, k, n = 3000, 8, 6
    use = Factors(torch.randn(1, 2, n), torch.randn(1, 2, 3), (n, 3))
    gradient = torch.einsum("bti,btj->ij", use.left.double(), use.right.double())
    source = RademacherProjections(KEY, k)
    found = []
    for index in range(draws):
        source.begin_step(index)
        found.append(float(sketch(use, source.matrix("w", n, CPU), 0).square().sum()))
    squared = torch.tensor(found, dtype=torch.float64)
    gram = gradient @ gradient.T
    variance = float(2 / k * (gram.square().sum() - gram.diagonal().square().sum()))
    assert float(squared.mean()) == pytest.approx(float(gram.trace()), abs=4 * (variance / draws) ** 0.5)
    assert float(squared.var()) == pytest.approx(variance, rel=0.15)


def test_signs_are_balanced_and_uncorrelated():
    rows, k = 2048, 24
    signs = projection(rows=rows, k=k).gather(torch.arange(rows)).sign().double()
    assert abs(float(signs.mean())) < 5 / (rows * k) ** 0.5
    # Each column, and each pair of columns: chi-square over all of them.
    for between, axis in ((signs.T @ signs / rows, k), (signs @ signs.T / k, rows)):
        pairs = between[torch.triu(torch.ones(axis, axis, dtype=torch.bool), 1)]
        samples = rows if axis == k else k
        assert abs(float(pairs.mean())) < 5 / (samples * len(pairs)) ** 0.5
        assert float((pairs.square() * samples).mean()) == pytest.approx(1.0, abs=5 * (2 / len(pairs)) ** 0.5)
    # Bytes are uniform: no pattern of eight neighbours is preferred.
    counts = np.bincount(projection(rows=50000, k=k).bits.numpy().ravel(), minlength=256)
    assert stats.chisquare(counts).pvalue > 1e-4


def test_it_is_a_function_of_key_step_name_and_block():
    first = projection(rows=50).bits
    assert torch.equal(projection(rows=50).bits, first)
    others = [projection(rows=50, key=bytes(32)), projection(rows=50, index=1), projection(rows=50, name="v")]
    for other in others:
        # 800 independent bits: half of them agree, to six standard deviations.
        agree = float((dense(other).sign() == dense(projection(rows=50)).sign()).double().mean())
        assert abs(agree - 0.5) < 6 * 0.5 / 800**0.5
    whole = projection(rows=2 * ROWS_PER_BLOCK).bits
    assert (whole[:ROWS_PER_BLOCK] != whole[ROWS_PER_BLOCK:]).any()
    assert torch.equal(projection(rows=ROWS_PER_BLOCK).bits, whole[:ROWS_PER_BLOCK])


def test_micro_batches_of_one_step_see_one_matrix_and_steps_see_others():
    source = RademacherProjections(KEY, 16)
    with pytest.raises(StepOrderError, match="begin_step"):
        source.matrix("w", 10, CPU)
    source.begin_step(5)
    first = source.matrix("w", 10, CPU)
    source.matrix("other", 100, CPU)
    assert source.matrix("w", 10, CPU) is first and torch.equal(projection(index=5).bits, first.bits)
    source.begin_step(6)
    assert not torch.equal(source.matrix("w", 10, CPU).bits, first.bits)
    with pytest.raises(StepOrderError, match="never repeat"):
        source.begin_step(6)


def test_it_has_nothing_in_common_with_the_gaussian_stream():
    """One key, one stream: the same bits under two distributions would tie them together."""
    gaussian = PROJECTIONS["gaussian"](KEY, 64)
    gaussian.begin_step(0)
    signs = gaussian.matrix("w", 500, CPU).sign().double()
    agree = float((signs == dense(projection(rows=500, k=64)).sign()).double().mean())
    assert abs(agree - 0.5) < 6 * 0.5 / 32000**0.5


@pytest.mark.parametrize(("k", "share"), [(8, 32), (32, 32), (64, 32), (20, 80 / 3)])
def test_bits_take_a_thirty_second_of_floats(k, share):
    """What is held, storage by storage; k that is no multiple of 8 fills its last byte."""
    held = {}
    for kind, source in PROJECTIONS.items():
        made = source(KEY, k)
        made.begin_step(0)
        made.matrix("w", 5000, CPU)
        found = made._cache["w"]
        tensors = [found] if isinstance(found, torch.Tensor) else [found.bits]
        held[kind] = sum(tensor.untyped_storage().nbytes() for tensor in tensors)
        assert held[kind] == source.stored_bytes(5000, k) == found.nbytes
    assert held["gaussian"] / held["rademacher"] == pytest.approx(share)


def test_no_more_than_one_block_of_floats_at_a_time():
    """Storages that live while a sketch is made: one row block of P, never all 32 of them."""
    rows, k = 32 * ROWS_PER_BLOCK, 16
    matrix = projection(rows=rows, k=k)
    block = ROWS_PER_BLOCK * k * 4
    use = Factors(torch.randn(1, 4, rows), torch.randn(1, 4, 2), (rows, 2))
    with LiveBytes() as live:
        sketch(use, matrix, 0)
    # An eighth for the bytes as integers, and the small products.
    assert block <= live.peak < 1.25 * block


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages that operations make and somebody still holds."""

    def __init__(self):
        super().__init__()
        self.made, self.peak = {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        before = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in before:
                storage = tensor.untyped_storage()
                self.made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.made = {key: kept for key, kept in self.made.items() if not kept[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.made.values()))
        return out
