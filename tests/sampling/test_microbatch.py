import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dprc_lightning.errors import InvalidArgumentError
from dprc_lightning.sampling import split_batch

batches = st.lists(st.integers(0, 10**6), unique=True, max_size=60)
maybe_size = st.one_of(st.none(), st.integers(1, 70))


@given(batches, st.data(), maybe_size, st.integers(1, 500))
def test_token_split_keeps_every_record_and_the_budget(indices, data, size, budget):
    lengths = data.draw(st.lists(st.integers(0, 300), min_size=len(indices), max_size=len(indices)))
    length = dict(zip(indices, lengths, strict=True))
    split = split_batch(indices, physical_batch_size=size, max_tokens=budget, lengths=lengths)
    assert sorted(np.concatenate([[], *split]).astype(int).tolist()) == sorted(indices)
    longest = []
    for micro in split:
        assert micro.dtype == np.int64 and len(micro) > 0
        assert size is None or len(micro) <= size
        longest.append(max(length[i] for i in micro.tolist()))
        assert len(micro) == 1 or len(micro) * longest[-1] <= budget
    assert longest == sorted(longest, reverse=True)
    again = split_batch(np.array(indices), physical_batch_size=size, max_tokens=budget, lengths=np.array(lengths))
    assert [micro.tolist() for micro in again] == [micro.tolist() for micro in split]


@given(batches, st.integers(1, 70))
def test_split_by_number_keeps_order_and_fills_up(indices, size):
    split = split_batch(indices, physical_batch_size=size)
    assert [i for micro in split for i in micro.tolist()] == indices
    assert len(split) == -(-len(indices) // size)
    assert all(len(micro) == size for micro in split[:-1])


def test_examples():
    split = split_batch([10, 11, 12, 13, 14], max_tokens=8, lengths=[2, 9, 4, 2, 4])
    # 11 exceeds the budget and goes alone; 12 and 14 pad to 2 * 4; the short ones follow.
    assert [micro.tolist() for micro in split] == [[11], [12, 14], [10, 13]]
    assert [m.tolist() for m in split_batch([3, 1, 2], physical_batch_size=2)] == [[3, 1], [2]]
    assert split_batch([], physical_batch_size=4) == []
    assert split_batch([], max_tokens=4, lengths=[]) == []


def test_ties_keep_their_order():
    split = split_batch(np.arange(5000), max_tokens=7000, lengths=np.arange(5000) % 2 + 7)
    sevens = [i for i in np.concatenate(split).tolist() if i % 2 == 0]
    assert sevens == list(range(0, 5000, 2))


def test_sorting_saves_padding():
    rng = np.random.default_rng(0)
    lengths = rng.integers(16, 2048, 200)
    split = split_batch(np.arange(200), max_tokens=8192, lengths=lengths)
    padded = sum(len(micro) * lengths[micro].max() for micro in split)
    assert padded < 1.1 * lengths.sum()


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("physical_batch_size", {}),
        *[("physical_batch_size", {"physical_batch_size": v}) for v in (0, -1, 2.0, True)],
        *[("max_tokens", {"max_tokens": v, "lengths": [1, 1]}) for v in (0, 1.5, False)],
        ("lengths", {"max_tokens": 4}),
        ("lengths", {"max_tokens": 4, "lengths": [1]}),
        ("lengths", {"max_tokens": 4, "lengths": [1, -1]}),
    ],
)
def test_wrong_arguments_are_refused(name, arguments):
    with pytest.raises(InvalidArgumentError, match=name):
        split_batch([1, 2], **arguments)
