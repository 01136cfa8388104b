"""The projection P of one logical step: one per parameter, the same in every micro-batch and on every rank."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from dprc_lightning.errors import StepOrderError
from dprc_lightning.keys import derive
from dprc_lightning.noise import gaussian
from dprc_lightning.sketch.matrix import ProjectionMatrix

ROWS_PER_BLOCK = 4096
"""P is generated in blocks of this many rows, each from its own key: a stored format, never to be changed."""


class Projections(Protocol):
    """Where the layers get P from. Tests inject their own (the identity, say)."""

    def begin_step(self, index: int) -> None:
        """Forget the last logical step's projections and start those of step ``index``."""

    def matrix(self, name: str, rows: int, device: torch.device) -> Tensor | ProjectionMatrix:
        """P of one parameter in the current step: [rows, k], float32 if it is a tensor."""


Drawn = TypeVar("Drawn", bound=Tensor | ProjectionMatrix)


class KeyedProjections(ABC, Generic[Drawn]):
    """P as a function of (key, step index, parameter name, row block) alone; the distribution is that of the subclass.

    Guarantee: P is fresh at each logical step, independent of parameters, data and noise, and the same for all records
    of the step: nothing in it depends on micro-batch, rank, world size or batch. (A P that depends on a record's
    position is not covered by the accounting: one more record would move others to another P.) The index never
    repeats: it is the ledger's sequence number, or a counter under a key of this process alone.

    Args:
        key: 32 secret bytes.
        sketch_dim: k, the number of columns really drawn.
    """

    def __init__(self, key: bytes, sketch_dim: int) -> None:
        self._key = key
        self._k = sketch_dim
        self._index: int | None = None
        self._cache: dict[str, Drawn] = {}

    def begin_step(self, index: int) -> None:
        """Start a logical step.

        Args:
            index: Larger than every earlier index of this object.

        Raises:
            StepOrderError: The index was used before or lies behind: P would repeat.
        """
        if self._index is not None and index <= self._index:
            raise StepOrderError(
                f"begin_step(index={index}): step {self._index} was begun already and a projection must never repeat; "
                "pass a larger index"
            )
        self._index = index
        self._cache.clear()

    def matrix(self, name: str, rows: int, device: torch.device) -> Drawn:
        """P of one parameter, kept until the next `begin_step`.

        Args:
            name: The parameter's name in the model, before any wrapping.
            rows: Length of the contracted axis.
            device: Where to put it. The numbers are made on the CPU, so that they are the same on every device.

        Returns:
            [rows, k].

        Raises:
            StepOrderError: No step was begun.
        """
        if self._index is None:
            raise StepOrderError("no logical step was begun; call begin_step() first")
        if name not in self._cache:
            self._cache[name] = self._draw(name, rows, device)
        return self._cache[name]

    @staticmethod
    @abstractmethod
    def stored_bytes(rows: int, sketch_dim: int) -> int:
        """Bytes of one P that are held from its first use to the end of the step."""

    @abstractmethod
    def _draw(self, name: str, rows: int, device: torch.device) -> Drawn:
        """P of one parameter, drawn from the keys of its row blocks."""

    def _row_blocks(self, label: str, name: str, rows: int) -> Iterator[tuple[bytes, int]]:
        """The key and the number of rows of each block. A label serves one distribution: one key, one stream."""
        assert self._index is not None, "matrix() refuses before begin_step()"
        for start in range(0, rows, ROWS_PER_BLOCK):
            key = derive(self._key, label, self._index, name, start // ROWS_PER_BLOCK)
            yield key, min(ROWS_PER_BLOCK, rows - start)


class GaussianProjections(KeyedProjections[Tensor]):
    """P with iid N(0, 1/k) entries.

    Guarantee: that of `KeyedProjections`.
    """

    @staticmethod
    def stored_bytes(rows: int, sketch_dim: int) -> int:
        """Four bytes for each entry."""
        return 4 * rows * sketch_dim

    def _draw(self, name: str, rows: int, device: torch.device) -> Tensor:
        blocks = [gaussian(key, (count, self._k)) for key, count in self._row_blocks("P", name, rows)]
        return torch.cat(blocks).mul_(1.0 / math.sqrt(self._k)).to(device)
