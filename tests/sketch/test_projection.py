"""P of a logical step: what it depends on, and what it does not."""

import numpy as np
import pytest
import torch
from scipy import stats

from dprc_lightning.errors import StepOrderError
from dprc_lightning.sketch import ROWS_PER_BLOCK, GaussianProjections

CPU = torch.device("cpu")
KEY = bytes(range(32))


def projection(key=KEY, index=0, name="w", rows=10, k=3):
    source = GaussianProjections(key, k)
    source.begin_step(index)
    return source.matrix(name, rows, CPU)


def test_it_is_a_function_of_key_step_and_name():
    assert torch.equal(projection(), projection())
    for other in (projection(key=bytes(32)), projection(index=1), projection(name="v")):
        assert not torch.isclose(projection(), other).any()


def test_micro_batches_of_one_step_see_one_matrix_whatever_was_asked_for_before():
    source = GaussianProjections(KEY, 3)
    source.begin_step(5)
    source.matrix("other", 100, CPU)
    first = source.matrix("w", 10, CPU).clone()
    source.matrix("another", 7, CPU)
    assert torch.equal(source.matrix("w", 10, CPU), first)
    assert torch.equal(projection(index=5), first)
    source.begin_step(6)
    assert not torch.isclose(source.matrix("w", 10, CPU), first).any()


def test_row_blocks_differ():
    """A repeated block could cancel halves of a gradient in the norm."""
    rows = 2 * ROWS_PER_BLOCK + 5
    whole = projection(rows=rows, k=2)
    assert whole.shape == (rows, 2) and whole.dtype == torch.float32
    blocks = whole.split(ROWS_PER_BLOCK)
    assert not torch.isclose(blocks[0], blocks[1]).any()
    assert len(np.unique(whole.numpy())) > 0.99 * whole.numel()
    # Blocks are keyed by their place: the first one is the same in a longer matrix. A stored format.
    assert torch.equal(projection(rows=ROWS_PER_BLOCK, k=2), blocks[0])


@pytest.mark.parametrize("k", [1, 7, 32])
def test_entries_are_normal_with_variance_one_over_k(k):
    values = projection(rows=ROWS_PER_BLOCK + 100, k=k).double().numpy().ravel() * np.sqrt(k)
    assert stats.kstest(values, "norm").pvalue > 1e-3
    assert abs(values.var() - 1) < 5 * np.sqrt(2 / len(values))


def test_a_step_must_be_begun():
    with pytest.raises(StepOrderError, match="begin_step"):
        GaussianProjections(KEY, 3).matrix("w", 5, CPU)
