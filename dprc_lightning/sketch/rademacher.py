"""P with entries +-1/sqrt(k), kept as one bit each: a thirty-second of the memory of Gaussian entries.

The bits are drawn once per step, or at each use where even they take too much memory. They become floats where they
are used, one block of rows at a time.
"""

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dprc_lightning.keys import KeyStream
from dprc_lightning.sketch.blocks import StreamedMatrix, rows_at_once
from dprc_lightning.sketch.projection import KeyedProjections, row_blocks

_STREAM_UNIT = 64
"""A key stream can be entered at multiples of so many bytes."""


class RademacherMatrix:
    """P, [rows, k], as packed bits. Bit ``j % 8`` of byte ``j // 8`` of a row is column j: 1 is +, 0 is -.

    Guarantee: every entry is + or - the same float32 number, `scale`, which is 1/sqrt(k) rounded UP. So the estimate is
    that of exact entries times one constant in [1, 1 + 2^-23]: no norm comes out too small by it, and it needs no share
    of the norm's floor (`dprc_lightning.layers.tracker.rounding_share`).

    Args:
        bits: [rows, ceil(k / 8)], uint8. Bits beyond k are not looked at.
        columns: k.
    """

    made_anew = False

    def __init__(self, bits: Tensor, columns: int) -> None:
        self.bits = bits
        self._k = columns
        self.scale = scale(columns)
        signs = torch.where((torch.arange(256).unsqueeze(1) >> torch.arange(8)) & 1 == 1, 1.0, -1.0)
        # The eight entries of each possible byte.
        self._entries = (signs * self.scale).to(bits.device)

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, k)."""
        return self.bits.shape[0], self._k

    @property
    def nbytes(self) -> int:
        """Bytes of the packed bits."""
        return self.bits.nbytes

    @property
    def block_rows(self) -> int:
        """Rows that are floats at a time: half a MiB of them at k = 32, 16 MiB at most."""
        return rows_at_once(self._k)

    def rows(self, start: int, stop: int) -> Tensor:
        """The entries of some rows.

        Args:
            start: First row.
            stop: The row after the last.

        Returns:
            [stop - start, k], float32.
        """
        return self._unpacked(self.bits[start:stop])

    def gather(self, ids: Tensor) -> Tensor:
        """Single rows.

        Args:
            ids: Any shape.

        Returns:
            [*ids.shape, k], float32.
        """
        return self._unpacked(self.bits[ids])

    def _unpacked(self, packed: Tensor) -> Tensor:
        return F.embedding(packed.int(), self._entries).flatten(-2)[..., : self._k]


class RademacherProjections(KeyedProjections):
    """P with iid entries +-1/sqrt(k), each sign with probability 1/2.

    Guarantee: that of `KeyedProjections`. The signs are bits of ChaCha20 key streams, one stream for each row block
    (`dprc_lightning.keys.KeyStream`). The law of the estimate is known on a grid only, so the accountant calls its
    numbers not certified (`dprc_lightning.accounting`).
    """

    _label = "P rademacher"

    @staticmethod
    def stored_bytes(rows: int, sketch_dim: int) -> int:
        """One bit for each entry, and whole bytes for each row."""
        return rows * _width(sketch_dim)

    def _draw(self, key: Callable[[int], bytes], rows: int, device: torch.device) -> RademacherMatrix:
        width = _width(self._k)
        packed = torch.empty(rows, width, dtype=torch.uint8)
        for of_block, place in row_blocks(key, rows):
            packed[place] = _bits(of_block, width, 0, place.stop - place.start)
        return RademacherMatrix(packed.to(device), self._k)

    def _streamed_matrix(self, key: Callable[[int], bytes], rows: int, device: torch.device) -> StreamedMatrix:
        return StreamedSigns(key, rows, self._k, device)


class StreamedSigns(StreamedMatrix):
    """P with entries +-1/sqrt(k) of which not even the bits are held.

    Guarantee: that of `StreamedMatrix` and of `RademacherMatrix`.
    """

    # Bits cost next to nothing; what costs is to begin.
    _gap = 2**20

    def _make(self, key: bytes, of_key: int, start: int, stop: int) -> Tensor:
        return RademacherMatrix(_bits(key, _width(self._k), start, stop), self._k).rows(0, stop - start)


def _bits(key: bytes, width: int, start: int, stop: int) -> Tensor:
    """Some rows of packed bits, [stop - start, width], from the stream of their block's key."""
    skipped = start * width % _STREAM_UNIT
    drawn = KeyStream(key, start * width - skipped).bytes(skipped + (stop - start) * width)
    packed = np.frombuffer(bytearray(drawn), dtype=np.uint8, offset=skipped)
    return torch.from_numpy(packed).view(stop - start, width)


def _width(columns: int) -> int:
    return -(-columns // 8)


def scale(columns: int) -> float:
    """The smallest float32 that is at least 1/sqrt(k).

    Args:
        columns: k.

    Returns:
        The number; its square is at least 1/k, and less than (1 + 2^-23)^2 / k.
    """
    nearest = np.float32(1.0 / math.sqrt(columns))
    # In exact arithmetic, because a comparison in floats could be a tie.
    if Fraction(float(nearest)) ** 2 * columns < 1:
        nearest = np.nextafter(nearest, np.float32(2.0))
    return float(nearest)
