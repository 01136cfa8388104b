"""Poisson sampling: every record is in a logical batch by its own coin flip."""

import os
from collections.abc import Iterator
from typing import NoReturn

import numpy as np

from dprc_lightning.errors import InvalidArgumentError, SecretError
from dprc_lightning.keys import KEY_BYTES, KeyStream, derive

# Records whose bits are held at once (8 bytes each).
_BLOCK = 2**20


class PoissonBatchSampler:
    """Logical batches in which each record is, independently, with probability ``sample_rate``.

    Guarantee: record i is in batch s exactly if 64 bits of a cryptographic pseudo-random function of (key, s, i) fall
    below ``floor(sample_rate * 2^64)``. Hence the draws are computationally indistinguishable from independent
    Bernoulli(sample_rate) draws over records and over batches; a record's draw depends neither on the other records,
    nor on their number, nor on ranks, workers or micro-batches; and the probability never exceeds ``sample_rate`` (it
    falls short by less than 2^-64, and less than the stated rate is less than the stated epsilon). This is what
    amplification by Poisson sampling assumes, as long as the key and the batches stay secret.

    What it does not do: it computes no epsilon, and the order inside a batch (increasing index) carries no guarantee;
    nothing that clips or noises may depend on a record's position in its batch.

    ====================  ==============================================================================================
    empty batch           yielded like any other: it is a step with noise, an optimizer step and a ledger entry. As
                          ``batch_sampler`` of a DataLoader it reaches ``collate_fn`` as an empty list
    iterated again        continues with the next sequence numbers: no batch is drawn twice (a batch noised twice is not
                          two independent subsampled steps)
    ``sample_rate = 1``   all records
    several ranks         give all the same key: they agree on the batch without communication
    ====================  ==============================================================================================

    Args:
        num_records: N, the size of the data set: a declared, public constant.
        sample_rate: q in (0, 1].
        steps: How many logical batches one iteration yields.
        key: 32 bytes: the run secret's subkey for sampling. None: from the operating system, for this object alone.
        first_sequence: The ledger sequence number of the first batch that iteration yields.

    Raises:
        InvalidArgumentError: If a value is out of range or of another type.
    """

    def __init__(
        self, num_records: int, *, sample_rate: float, steps: int, key: bytes | None = None, first_sequence: int = 0
    ) -> None:
        self.num_records = _integer("num_records", num_records, 1)
        self.steps = _integer("steps", steps, 0)
        self._next_sequence = _integer("first_sequence", first_sequence, 0)
        # "not (0 < q <= 1)" also refuses NaN.
        if isinstance(sample_rate, bool) or not isinstance(sample_rate, int | float) or not 0 < sample_rate <= 1:
            raise InvalidArgumentError("sample_rate", sample_rate, "a number with 0 < sample_rate <= 1")
        self.sample_rate = float(sample_rate)
        self._key = os.urandom(KEY_BYTES) if key is None else key
        derive(self._key)  # refuses a wrong length

    @property
    def expected_batch_size(self) -> float:
        """E[B] = sample_rate * num_records: a public constant, unlike the size of any batch."""
        return self.sample_rate * self.num_records

    @property
    def next_sequence(self) -> int:
        """The sequence number of the next batch that iteration yields."""
        return self._next_sequence

    def batch(self, sequence: int) -> np.ndarray:
        """Return the records of one logical batch.

        A pure function: iteration is not advanced, and the same number gives the same batch. So give it a number that
        the ledger handed out, once.

        Args:
            sequence: The ledger sequence number of the step, an integer >= 0.

        Returns:
            Increasing record indices, int64, possibly none.
        """
        sequence = _integer("sequence", sequence, 0)
        if self.sample_rate == 1.0:
            return np.arange(self.num_records, dtype=np.int64)
        # Exact: a product by a power of two only moves the exponent.
        threshold = np.uint64(int(self.sample_rate * 2.0**64))
        stream = KeyStream(derive(self._key, sequence))
        chosen = []
        for start in range(0, self.num_records, _BLOCK):
            # Record i owns the eight bytes at offset 8 i of the stream.
            words = stream.uint64(min(_BLOCK, self.num_records - start))
            chosen.append(np.flatnonzero(words < threshold) + start)
        return np.concatenate(chosen).astype(np.int64, copy=False)

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(self.steps):
            # Advanced before the batch is handed out: whatever the consumer does, it cannot come twice.
            sequence, self._next_sequence = self._next_sequence, self._next_sequence + 1
            yield self.batch(sequence).tolist()

    def __len__(self) -> int:
        return self.steps

    def __repr__(self) -> str:
        return f"PoissonBatchSampler({self.num_records}, sample_rate={self.sample_rate}, steps={self.steps})"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise SecretError("a Poisson sampler cannot be pickled or copied, it holds the sampling key: build it anew")


def _integer(name: str, value: int, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < least:
        raise InvalidArgumentError(name, value, f"an integer >= {least}")
    return int(value)
