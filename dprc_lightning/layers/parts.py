"""The uses that one node's parameters get in parts, while a layer makes its activations anew, some tokens at a time."""

from types import SimpleNamespace
from typing import TYPE_CHECKING

from torch import Tensor

from dprc_lightning.layers.tracker import ParameterTracker
from dprc_lightning.layers.use import MatrixUse, VectorUse

if TYPE_CHECKING:
    from dprc_lightning.layers.tracking import PassState


class Parts:
    """What arrives for each parameter in one backward of one node, whatever layers inside it bring.

    Guarantee: record i's norm is that of the sum over all parts, as `MatrixUse` and `VectorUse` add them up: nothing is
    squared, and no gradient handed on, before the last part has come.

    Args:
        state: The pass.
        slots: By parameter name, where a use remembers what it saw in the norm pass; it lives as long as the node.
    """

    def __init__(self, state: "PassState", slots: dict[str, SimpleNamespace]) -> None:
        self._state, self._slots = state, slots
        self._matrices: dict[str, MatrixUse] = {}
        self._vectors: dict[str, VectorUse] = {}

    def matrix(self, tracker: ParameterTracker, output_gradient: Tensor, left: Tensor, right: Tensor) -> None:
        """A part of a matrix's use: see `MatrixUse.add`."""
        if tracker.name not in self._matrices:
            self._matrices[tracker.name] = MatrixUse(self._state, self._slot(tracker), tracker)
        self._matrices[tracker.name].add(output_gradient, left, right)

    def vector(self, tracker: ParameterTracker, output_gradient: Tensor, per_position: Tensor) -> None:
        """A part of a vector's use: see `VectorUse.add`."""
        if tracker.name not in self._vectors:
            self._vectors[tracker.name] = VectorUse(self._state, self._slot(tracker), tracker)
        self._vectors[tracker.name].add(output_gradient, per_position)

    def finish(self, tracker: ParameterTracker) -> Tensor | None:
        """All parts have come.

        Args:
            tracker: A parameter.

        Returns:
            Its gradient; None in the norm pass, or where no part came.
        """
        use = self._matrices.get(tracker.name) or self._vectors.get(tracker.name)
        return None if use is None else use.finish()

    def _slot(self, tracker: ParameterTracker) -> SimpleNamespace:
        return self._slots.setdefault(tracker.name, SimpleNamespace())
