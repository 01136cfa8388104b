"""The projection P of one logical step: one per parameter, the same in every micro-batch and on every rank."""

import math
from typing import Protocol

import torch
from torch import Tensor

from dprc_lightning.errors import StepOrderError
from dprc_lightning.keys import derive
from dprc_lightning.noise import gaussian

ROWS_PER_BLOCK = 4096
"""P is generated in blocks of this many rows, each from its own key: a stored format, never to be changed."""


class Projections(Protocol):
    """Where the layers get P from. Tests inject their own (the identity, say)."""

    def begin_step(self, index: int) -> None:
        """Forget the last logical step's projections and start those of step ``index``."""

    def matrix(self, name: str, rows: int, device: torch.device) -> Tensor:
        """P of one parameter in the current step: [rows, k], float32."""


class GaussianProjections:
    """P with iid N(0, 1/k) entries, a function of (key, step index, parameter name, row block) alone.

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
        self._cache: dict[str, Tensor] = {}

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

    def matrix(self, name: str, rows: int, device: torch.device) -> Tensor:
        """P of one parameter, kept until the next `begin_step`.

        Args:
            name: The parameter's name in the model, before any wrapping.
            rows: Length of the contracted axis.
            device: Where to put it. The numbers are made on the CPU, so that they are the same on every device.

        Returns:
            [rows, k], float32.

        Raises:
            StepOrderError: No step was begun.
        """
        if self._index is None:
            raise StepOrderError("no logical step was begun; call begin_step() first")
        if name not in self._cache:
            blocks = [
                gaussian(
                    derive(self._key, "P", self._index, name, start // ROWS_PER_BLOCK),
                    (min(ROWS_PER_BLOCK, rows - start), self._k),
                )
                for start in range(0, rows, ROWS_PER_BLOCK)
            ]
            self._cache[name] = torch.cat(blocks).mul_(1.0 / math.sqrt(self._k)).to(device)
        return self._cache[name]
