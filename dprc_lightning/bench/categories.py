"""What the live memory of a step is made of when it is largest."""

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from dprc_lightning.bench.memory import LiveMemory
from dprc_lightning.offload import copies_to_host

PARAMETERS = "parameters"
"""Parameters, buffers and the batch."""
GRADIENTS = "gradients"
"""What stands in ``.grad`` when the step is over."""
ACTIVATIONS = "activations"
"""Made by the forward and still there when it ended: what autograd saved, inputs of checkpoints among it."""
RECOMPUTED = "recomputed"
"""The same of the forward that a checkpoint runs again inside a backward."""
PROJECTIONS = "projections"
"""P."""
SKETCHES = "sketches"
"""What the handle keeps between two layers of the norm pass: sums of sketches, factors, and what it compares."""
TEMPORARIES = "temporaries"
"""All else: gradients on their way, copies, blocks."""
CATEGORIES = (PARAMETERS, GRADIENTS, ACTIVATIONS, RECOMPUTED, PROJECTIONS, SKETCHES, TEMPORARIES)

_HOST = "host"


@dataclass(eq=False)
class _Storage:
    category: str
    size: int
    born: int


class CategorisedMemory(LiveMemory):
    """`LiveMemory` that knows of each storage what it is, and remembers the sum of each kind at the peak.

    A storage is temporary until somebody says something else of it (`inside`, `mark`, `mark_alive`), which may be after
    the peak: what a saved activation is shows when the forward is over. Offloaded checkpoints are none of the kinds.
    """

    def __init__(self) -> None:
        super().__init__()
        self._category = TEMPORARIES
        self._clock = 0
        self._storages: dict[int, _Storage] = {}
        self._watches: dict[int, weakref.ref[Any]] = {}
        # What was there at the peak and is no more.
        self._dead: list[_Storage] = []
        self._peak_clock = 0

    @property
    def clock(self) -> int:
        """Grows with every operation; for `mark_alive`."""
        return self._clock

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Count tensors, as what is being made now.

        Args:
            tensors: As `LiveMemory.add` takes them.
        """
        self._clock += 1
        on_host = copies_to_host()
        for tensor in tensors:
            storage = tensor.untyped_storage()
            address, size = storage._cdata, storage.nbytes()
            known = self._storages.get(address)
            if known is not None and known.size == size:
                continue
            category = _HOST if on_host else self._category
            if known is None:
                self._watches[address] = weakref.ref(storage, partial(self._forget, address))
            else:
                # Of another size since: at an earlier peak it counts with the old one.
                category = known.category
                self._bury(known)
            self._storages[address] = made = _Storage(category, size, self._clock)
            self._tally(made, size)
        if self._current > self._peak:
            self._peak, self._peak_clock = self._current, self._clock
            self._dead.clear()

    def _tally(self, storage: _Storage, size: int) -> None:
        if storage.category == _HOST:
            self._host += size
            self._host_peak = max(self._host_peak, self._host)
        else:
            self._current += size

    def _bury(self, storage: _Storage) -> None:
        self._tally(storage, -storage.size)
        if storage.born <= self._peak_clock:
            self._dead.append(storage)

    def _forget(self, address: int, _dead: object) -> None:
        del self._watches[address]
        self._bury(self._storages.pop(address))

    @contextmanager
    def inside(self, category: str) -> Iterator[None]:
        """What is made inside is of this kind.

        Args:
            category: One of `CATEGORIES`.

        Yields:
            Nothing.
        """
        before, self._category = self._category, category
        try:
            yield
        finally:
            self._category = before

    def mark(self, tensors: Iterable[Tensor], category: str) -> None:
        """Say what temporary storages are; others keep their kind.

        Args:
            tensors: Those that are unknown are left out.
            category: One of `CATEGORIES`.
        """
        for tensor in tensors:
            known = self._storages.get(tensor.untyped_storage()._cdata)
            if known is not None and known.category == TEMPORARIES:
                known.category = category

    def mark_alive(self, category: str, since: int = 0) -> None:
        """Say what the temporary storages are that live now.

        Args:
            category: One of `CATEGORIES`.
            since: A `clock`; older ones are left out.
        """
        for storage in self._storages.values():
            if storage.born > since and storage.category == TEMPORARIES:
                storage.category = category

    @contextmanager
    def recomputation(self) -> Iterator[None]:
        """Inside, what a module leaves behind that runs within a backward is `RECOMPUTED`.

        Yields:
            Nothing.
        """
        depth, begun = 0, 0

        def before(*_: Any) -> None:
            nonlocal depth, begun
            if depth == 0:
                begun = self._clock
            depth += 1

        def after(*_: Any) -> None:
            nonlocal depth
            depth -= 1
            if depth == 0:
                self.mark_alive(RECOMPUTED, begun)

        # A checkpoint may leave its modules by an exception, once it has all that it needs.
        hooks = register_module_forward_pre_hook(before), register_module_forward_hook(after, always_call=True)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def at_peak(self) -> dict[str, int]:
        """Bytes of each kind at the peak; they add up to it.

        Returns:
            For each of `CATEGORIES` its bytes.
        """
        found = dict.fromkeys(CATEGORIES, 0)
        for storage in (*self._storages.values(), *self._dead):
            if storage.born <= self._peak_clock and storage.category != _HOST:
                found[storage.category] += storage.size
        return found
