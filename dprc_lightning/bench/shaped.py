"""P on torch's meta device: its shape and size without numbers."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from dprc_lightning.sketch import PROJECTIONS as DISTRIBUTIONS
from dprc_lightning.sketch import ProjectionMatrix, RademacherMatrix
from dprc_lightning.sketch.blocks import StreamedMatrix


class ShapedProjections:
    """P of the right shape without numbers, kept for a step as the real one is.

    Args:
        projection: Distribution of the entries: how many bytes they take.
        sketch_dim: k.
        making: Makes a context in which P is made.
    """

    def __init__(self, projection: str, sketch_dim: int, making: Callable[[], AbstractContextManager[None]]) -> None:
        self._signs = projection == "rademacher"
        self._k = sketch_dim
        self._making = making
        self._kept: dict[str, Tensor | ProjectionMatrix] = {}
        self._streamed: frozenset[str] = frozenset()

    def begin_step(self, index: int) -> None:
        """Forget the last step's."""
        self._kept.clear()

    def stream(self, names: Iterable[str]) -> None:
        """As of the real ones: these are not kept, a block of their rows is made where it is used.

        Args:
            names: They take the place of the names before.
        """
        self._streamed = frozenset(names)

    def matrix(self, name: str, rows: int, device: torch.device) -> Tensor | ProjectionMatrix:
        """One P, [rows, k].

        Args:
            name: Of the parameter.
            rows: Length of the contracted axis.
            device: Where it lies.

        Returns:
            What the real source of this distribution gives.
        """
        if name in self._streamed:
            return _ShapedStream(lambda _: b"", rows, self._k, device)
        if name not in self._kept:
            with self._making():
                if self._signs:
                    width = DISTRIBUTIONS["rademacher"].stored_bytes(1, self._k)
                    bits = torch.empty(rows, width, dtype=torch.uint8, device=device)
                    self._kept[name] = RademacherMatrix(bits, self._k)
                else:
                    self._kept[name] = torch.empty(rows, self._k, dtype=torch.float32, device=device)
        return self._kept[name]


class _ShapedStream(StreamedMatrix):
    _gap = 0

    def _make(self, key: bytes, of_key: int, start: int, stop: int) -> Tensor:
        return torch.empty(stop - start, self._k, dtype=torch.float32, device=self._device)

    def gather(self, ids: Tensor) -> Tensor:
        """As the real one where ids lie in a block from its first row to its last."""
        found = torch.empty(*ids.shape, self._k, dtype=torch.float32, device=self._device)
        self.rows(0, min(self._block_rows, self._rows))
        return found
