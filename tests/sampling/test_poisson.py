import copy
import pickle
import time

import numpy as np
import pytest
from scipy.stats import binom, chi2, chisquare

from dprc_lightning.errors import DPRCError, InvalidArgumentError, SecretError
from dprc_lightning.keys import Domain, KeyStream, RunSecret, derive
from dprc_lightning.sampling import PoissonBatchSampler, poisson

KEY = RunSecret.for_testing(0).subkey(Domain.SAMPLING)
N, Q, T = 400, 0.1, 2000


@pytest.fixture(scope="module")
def drawn():
    """[T, N] inclusion matrix of T logical batches."""
    sampler = PoissonBatchSampler(N, sample_rate=Q, steps=T, key=KEY)
    matrix = np.zeros((T, N), dtype=bool)
    for sequence in range(T):
        matrix[sequence, sampler.batch(sequence)] = True
    return matrix


def test_every_record_has_the_same_rate(drawn):
    statistic = ((drawn.sum(0) - T * Q) ** 2 / (T * Q * (1 - Q))).sum()
    assert 1e-4 < chi2.sf(statistic, N) < 1 - 1e-4


def test_batch_sizes_are_binomial(drawn):
    # A fixed batch size, or one kept in bounds, is not Poisson sampling and has another guarantee.
    edges = [-1, *binom.ppf(np.linspace(0.1, 0.9, 9), N, Q), N]
    expected = np.diff(binom.cdf(edges, N, Q)) * T
    observed, _ = np.histogram(drawn.sum(1), bins=np.array(edges) + 0.5)
    assert chisquare(observed, expected).pvalue > 1e-4


def test_records_and_steps_are_independent(drawn):
    centred = (drawn - Q) / np.sqrt(Q * (1 - Q))
    for first, second in (
        (centred[:, :-1], centred[:, 1:]),  # neighbouring records
        (centred[:-1], centred[1:]),  # one record in consecutive steps
        (centred[:-1, :-1], centred[1:, 1:]),
        (centred[:, : N // 2], centred[:, N // 2 :]),
    ):
        assert abs((first * second).sum()) / np.sqrt(first.size) < 4.5
    # Two steps with equal batches would be one batch noised twice.
    assert len({row.tobytes() for row in drawn}) == T


def test_batch_is_a_pure_function_of_key_and_sequence():
    first = PoissonBatchSampler(5000, sample_rate=0.03, steps=9, key=KEY)
    second = PoissonBatchSampler(5000, sample_rate=0.03, steps=2, key=KEY, first_sequence=4)
    forward = [first.batch(s) for s in range(9)]
    list(second)
    for sequence in reversed(range(9)):
        np.testing.assert_array_equal(second.batch(sequence), forward[sequence])
    other = PoissonBatchSampler(5000, sample_rate=0.03, steps=9, key=derive(KEY, "other"))
    assert not np.array_equal(other.batch(0), forward[0])


def test_a_record_is_drawn_alone():
    # Neither more records nor a larger rate changes a record's own bits.
    small, large = (PoissonBatchSampler(n, sample_rate=0.2, steps=1, key=KEY) for n in (1000, 3000))
    more = PoissonBatchSampler(1000, sample_rate=0.4, steps=1, key=KEY)
    for sequence in range(5):
        batch = large.batch(sequence)
        np.testing.assert_array_equal(small.batch(sequence), batch[batch < 1000])
        assert set(small.batch(sequence)) < set(more.batch(sequence))


def test_blocks_are_invisible(monkeypatch):
    whole = PoissonBatchSampler(1000, sample_rate=0.3, steps=1, key=KEY).batch(3)
    monkeypatch.setattr(poisson, "_BLOCK", 64)
    np.testing.assert_array_equal(PoissonBatchSampler(1000, sample_rate=0.3, steps=1, key=KEY).batch(3), whole)


@pytest.mark.parametrize("rate", [0.5, 0.1, 1e-9, 1 - 2**-53, 2.0**-64])
def test_threshold_is_exact(monkeypatch, rate):
    threshold = int(rate * 2**64)
    words = np.array([0, threshold - 1, threshold, 2**64 - 1], dtype=np.uint64)
    monkeypatch.setattr(KeyStream, "uint64", lambda self, n: words[:n])
    batch = PoissonBatchSampler(4, sample_rate=rate, steps=1, key=KEY).batch(0)
    assert batch.tolist() == [0, 1]


def test_edges():
    everything = PoissonBatchSampler(7, sample_rate=1, steps=1, key=KEY)
    assert everything.batch(0).tolist() == list(range(7))
    batch = PoissonBatchSampler(3000, sample_rate=0.5, steps=1, key=KEY).batch(0)
    assert batch.dtype == np.int64 and (np.diff(batch) > 0).all() and batch.min() >= 0 and batch.max() < 3000
    assert PoissonBatchSampler(3, sample_rate=1e-300, steps=1, key=KEY).batch(0).shape == (0,)
    assert PoissonBatchSampler(1225, sample_rate=0.05224, steps=208).expected_batch_size == pytest.approx(63.994)


def test_empty_batches_are_yielded():
    sampler = PoissonBatchSampler(3, sample_rate=0.2, steps=200, key=KEY)
    batches = list(sampler)
    assert len(sampler) == len(batches) == 200
    assert 60 < sum(batch == [] for batch in batches) < 145  # 0.8^3 * 200 = 102
    assert all(isinstance(batch, list) and all(type(i) is int for i in batch) for batch in batches)


def test_iterating_again_never_repeats_a_batch():
    sampler = PoissonBatchSampler(500, sample_rate=0.1, steps=10, key=KEY, first_sequence=5)
    first = list(sampler)
    abandoned = iter(sampler)
    next(abandoned)
    second = list(sampler)
    next(abandoned)
    assert sampler.next_sequence == 5 + 10 + 1 + 10 + 1
    assert first == [sampler.batch(s).tolist() for s in range(5, 15)]
    assert second == [sampler.batch(s).tolist() for s in range(16, 26)]


def test_default_key_is_fresh():
    first, second = (PoissonBatchSampler(1000, sample_rate=0.5, steps=1) for _ in range(2))
    assert not np.array_equal(first.batch(0), second.batch(0))


def test_key_shows_itself_nowhere():
    sampler = PoissonBatchSampler(10, sample_rate=0.5, steps=1, key=b"secretkey-secretkey-secretkey-!!")
    assert "secretkey" not in repr(sampler)
    for copied in (pickle.dumps, copy.deepcopy):
        with pytest.raises(SecretError):
            copied(sampler)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("num_records", v) for v in (0, -1, 1.0, True, None, "5")],
        *[("sample_rate", v) for v in (0, -0.1, 1.0000001, float("nan"), float("inf"), True, None, "0.1")],
        *[("steps", v) for v in (-1, 2.0, False)],
        *[("first_sequence", v) for v in (-1, 0.0)],
        *[("key", v) for v in (b"short", "0" * 32)],
    ],
)
def test_wrong_arguments_are_refused(name, value):
    arguments = {"num_records": 10, "sample_rate": 0.5, "steps": 1, "key": KEY, "first_sequence": 0, name: value}
    with pytest.raises(InvalidArgumentError, match=name):
        PoissonBatchSampler(arguments.pop("num_records"), **arguments)


@pytest.mark.parametrize("sequence", [-1, 0.5, True])
def test_wrong_sequence_is_refused(sequence):
    with pytest.raises(DPRCError, match="sequence"):
        PoissonBatchSampler(10, sample_rate=0.5, steps=1).batch(sequence)


def test_works_as_batch_sampler():
    from torch.utils.data import DataLoader

    sampler = PoissonBatchSampler(20, sample_rate=0.05, steps=30, key=KEY)
    expected = [sampler.batch(s).tolist() for s in range(30)]
    loader = DataLoader(list(range(20)), batch_sampler=sampler, collate_fn=lambda records: records)
    assert [] in expected
    assert list(loader) == expected and len(loader) == 30


def test_a_million_records_are_fast():
    sampler = PoissonBatchSampler(1_000_000, sample_rate=0.05, steps=1, key=KEY)
    times = []
    for sequence in range(10):
        start = time.perf_counter()
        sampler.batch(sequence)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.05
