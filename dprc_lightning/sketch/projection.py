"""The projection P of one logical step: one per parameter, the same in every micro-batch and on every rank."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from dprc_lightning.errors import StepOrderError
from dprc_lightning.keys import derive
from dprc_lightning.noise import GAUSSIAN_PIECE, fill_gaussian
from dprc_lightning.sketch.blocks import ROWS_PER_BLOCK, StreamedMatrix
from dprc_lightning.sketch.matrix import ProjectionMatrix


class Projections(Protocol):
    """Where the layers get P from. Tests inject their own (the identity, say)."""

    def begin_step(self, index: int) -> None:
        """Forget the last logical step's projections and start those of step ``index``."""

    def matrix(self, name: str, rows: int, device: torch.device) -> Tensor | ProjectionMatrix:
        """P of one parameter in the current step: [rows, k], float32 if it is a tensor."""


class KeyedProjections(ABC):
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
        self._cache: dict[str, Tensor | ProjectionMatrix] = {}
        self._streamed: frozenset[str] = frozenset()

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

    def stream(self, names: Iterable[str]) -> None:
        """Do not keep these matrices: their rows are made again, the same bit for bit, wherever they are used.

        Args:
            names: Those of `dprc_lightning.sketch.blocks.not_kept`; they take the place of the names before.
        """
        self._streamed = frozenset(names)

    def matrix(self, name: str, rows: int, device: torch.device) -> Tensor | ProjectionMatrix:
        """P of one parameter: kept until the next `begin_step`, or its keys alone, see `stream`.

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
            # A label serves one distribution: one key, one stream.
            key = partial(derive, self._key, self._label, self._index, name)
            make = self._streamed_matrix if name in self._streamed else self._draw
            self._cache[name] = make(key, rows, device)
        return self._cache[name]

    @property
    @abstractmethod
    def _label(self) -> str:
        """Part of every key."""

    @staticmethod
    @abstractmethod
    def stored_bytes(rows: int, sketch_dim: int) -> int:
        """Bytes of one P that is kept, from its first use to the end of the step."""

    @abstractmethod
    def _draw(self, key: Callable[[int], bytes], rows: int, device: torch.device) -> Tensor | ProjectionMatrix:
        """P of one parameter, drawn from the keys of its row blocks."""

    @abstractmethod
    def _streamed_matrix(self, key: Callable[[int], bytes], rows: int, device: torch.device) -> ProjectionMatrix:
        """The same P, of which the keys alone are held."""


def row_blocks(key: Callable[[int], bytes], rows: int) -> Iterator[tuple[bytes, slice]]:
    """Walk through the row blocks of P.

    Args:
        key: Gives a block's key by its number.
        rows: Of P.

    Yields:
        Key and rows of each block.
    """
    for start in range(0, rows, ROWS_PER_BLOCK):
        yield key(start // ROWS_PER_BLOCK), slice(start, min(start + ROWS_PER_BLOCK, rows))


class GaussianProjections(KeyedProjections):
    """P with iid N(0, 1/k) entries.

    Guarantee: that of `KeyedProjections`.
    """

    _label = "P"

    @staticmethod
    def stored_bytes(rows: int, sketch_dim: int) -> int:
        """Four bytes for each entry."""
        return 4 * rows * sketch_dim

    def _draw(self, key: Callable[[int], bytes], rows: int, device: torch.device) -> Tensor:
        entries = torch.empty(rows, self._k, dtype=torch.float32)
        for of_block, place in row_blocks(key, rows):
            part = entries[place].view(-1)
            fill_gaussian(part.numpy(), of_block, len(part), 0)
        return entries.mul_(1.0 / math.sqrt(self._k)).to(device)

    def _streamed_matrix(self, key: Callable[[int], bytes], rows: int, device: torch.device) -> StreamedMatrix:
        return StreamedGaussian(key, rows, self._k, device)


class StreamedGaussian(StreamedMatrix):
    """P with iid N(0, 1/k) entries, made where they are used: 8 ns for each on one core of a CPU (Xeon).

    Guarantee: that of `StreamedMatrix`.
    """

    _gap = GAUSSIAN_PIECE

    def _make(self, key: bytes, of_key: int, start: int, stop: int) -> Tensor:
        entries = torch.empty(stop - start, self._k, dtype=torch.float32)
        fill_gaussian(entries.view(-1).numpy(), key, of_key * self._k, start * self._k)
        return entries.mul_(1.0 / math.sqrt(self._k))
