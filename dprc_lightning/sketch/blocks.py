"""P as a key for each block of rows: what is kept for a step, and what is made again where it is used.

The entries are the same bit for bit either way, so the choice is one of memory and time. It takes no part in the
guarantee.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from dprc_lightning.sketch.factors import BLOCK_ROWS

ROWS_PER_BLOCK = 4096
"""P is generated in blocks of this many rows, each from its own key: a stored format, never to be changed."""

_BYTES_OF_BLOCK = 2**24


def not_kept(sizes: Mapping[str, int], limit: int | None) -> frozenset[str]:
    """Which matrices are not kept for the step, because those before them have used up the memory.

    The choice looks at names and shapes alone, in the model's own order and not in the order of use, so that it is the
    same on every rank and in every micro-batch.

    Args:
        sizes: Bytes of each matrix, in the order of the model's parameters.
        limit: Bytes that may be kept in all; None for any number.

    Returns:
        Names of those that are made again at each use.
    """
    left = limit
    streamed = set()
    for name, size in sizes.items():
        if left is None or size <= left:
            left = None if left is None else left - size
        else:
            streamed.add(name)
    return frozenset(streamed)


def rows_at_once(columns: int) -> int:
    """How many rows of a P that is not kept are made at once.

    Args:
        columns: k.

    Returns:
        As many as take 16 MiB, at least one and at most those of one key. A power of two, so that a block never lies in
        two keys' rows, and a function of k alone, so that sums over P's rows are made in one order.
    """
    fitting = max(_BYTES_OF_BLOCK // (4 * columns), 1)
    return min(ROWS_PER_BLOCK, 1 << (fitting.bit_length() - 1))


class StreamedMatrix(ABC):
    """P, [rows, k], of which nothing but the keys is held: its rows are made when they are asked for.

    Guarantee: that of `dprc_lightning.sketch.projection.KeyedProjections`, for the rows are a function of the very keys
    that a kept P is made from. They are the same however often, in whatever order and for whichever ids they are made.

    Args:
        key: Gives the key of a block of `ROWS_PER_BLOCK` rows by its number.
        rows: Length of the contracted axis.
        columns: k.
        device: Where the rows are put.
    """

    made_anew = True

    def __init__(self, key: Callable[[int], bytes], rows: int, columns: int, device: torch.device) -> None:
        self._key = key
        self._rows = rows
        self._k = columns
        self._device = device
        self._block_rows = rows_at_once(columns)

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, k)."""
        return self._rows, self._k

    @property
    def nbytes(self) -> int:
        """Nothing is held between two uses."""
        return 0

    @property
    def block_rows(self) -> int:
        """See `rows_at_once`."""
        return self._block_rows

    def rows(self, start: int, stop: int) -> Tensor:
        """Make one block.

        Args:
            start: First row.
            stop: The row after the last, of the same key.

        Returns:
            [stop - start, k], float32.
        """
        block, first = divmod(start, ROWS_PER_BLOCK)
        of_key = min(ROWS_PER_BLOCK, self._rows - block * ROWS_PER_BLOCK)
        made = self._make(self._key(block), of_key, first, first + stop - start)
        return made.to(self._device)

    def gather(self, ids: Tensor) -> Tensor:
        """Single rows. Each is made once however often it is asked for, and rows far from all others are left out.

        Args:
            ids: Any shape.

        Returns:
            [*ids.shape, k], float32. Peak extra memory: one block of rows, and `BLOCK_ROWS` of those asked for.
        """
        found = torch.empty(ids.numel(), self._k, dtype=torch.float32, device=self._device)
        ordered, places = ids.flatten().cpu().sort()
        for part in self._runs(ordered):
            run = ordered[part]
            first, last = int(run[0]), int(run[-1])
            assert 0 <= first <= last < self._rows, "the forward has looked them up"
            made = self.rows(first, last + 1)
            # By parts: one id may stand at every place, and the right side is a copy.
            for few, where in zip(run.split(BLOCK_ROWS), places[part].split(BLOCK_ROWS), strict=True):
                found[where.to(self._device)] = made[(few - first).to(self._device)]
            # Else they would live on while the next ones are made.
            del made
        return found.view(*ids.shape, self._k)

    def _runs(self, ordered: Tensor) -> Iterator[slice]:
        """Parts of sorted ids that are made in one go: within a block, without a gap that is dearer than a start."""
        breaks = (ordered.diff() * self._k > self._gap) | (ordered // self._block_rows).diff().bool()
        begin = 0
        for end in [*(torch.nonzero(breaks).flatten() + 1).tolist(), len(ordered)]:
            if end > begin:
                yield slice(begin, end)
            begin = end

    @property
    @abstractmethod
    def _gap(self) -> int:
        """From how many unwanted entries on it is cheaper to begin anew."""

    @abstractmethod
    def _make(self, key: bytes, of_key: int, start: int, stop: int) -> Tensor:
        """Rows ``start`` to ``stop`` of the ``of_key`` rows of one key, [stop - start, k] float32, on the CPU."""
