"""P with entries +-1/sqrt(k), kept as one bit each: a thirty-second of the memory of Gaussian entries.

The bits are drawn once per step and turned into floats where they are used, one block of rows at a time.
"""

import math
from fractions import Fraction

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from dprc_lightning.keys import KeyStream
from dprc_lightning.sketch.projection import ROWS_PER_BLOCK, KeyedProjections

_LABEL = "P rademacher"


class RademacherMatrix:
    """P, [rows, k], as packed bits. Bit ``j % 8`` of byte ``j // 8`` of a row is column j: 1 is +, 0 is -.

    Guarantee: every entry is + or - the same float32 number, `scale`, which is 1/sqrt(k) rounded UP. So the estimate is
    that of exact entries times one constant in [1, 1 + 2^-23]: no norm comes out too small by it, and it needs no share
    of the norm's floor (`dprc_lightning.layers.tracker.rounding_share`).

    Args:
        bits: [rows, ceil(k / 8)], uint8. Bits beyond k are not looked at.
        columns: k.
    """

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
        """Rows that are floats at a time: half a MiB of them at k = 32."""
        return ROWS_PER_BLOCK

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


class RademacherProjections(KeyedProjections[RademacherMatrix]):
    """P with iid entries +-1/sqrt(k), each sign with probability 1/2.

    Guarantee: that of `KeyedProjections`. The signs are bits of ChaCha20 key streams, one stream for each row block
    (`dprc_lightning.keys.KeyStream`). The law of the estimate is known on a grid only, so the accountant calls its
    numbers not certified (`dprc_lightning.accounting`).
    """

    @staticmethod
    def stored_bytes(rows: int, sketch_dim: int) -> int:
        """One bit for each entry, and whole bytes for each row."""
        return rows * _width(sketch_dim)

    def _draw(self, name: str, rows: int, device: torch.device) -> RademacherMatrix:
        width = _width(self._k)
        packed = np.empty((rows, width), dtype=np.uint8)
        start = 0
        for key, count in self._row_blocks(_LABEL, name, rows):
            drawn = KeyStream(key).bytes(count * width)
            packed[start : start + count] = np.frombuffer(drawn, dtype=np.uint8).reshape(count, width)
            start += count
        return RademacherMatrix(torch.from_numpy(packed).to(device), self._k)


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
