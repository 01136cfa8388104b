"""Where a step's time goes."""

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import TypeVar

import torch

T = TypeVar("T")

DATA = "data"
"""Waiting for the next batch: the one phase that lies before its step begins."""
OTHER = "other"
"""What is in no phase."""


class StepClock:
    """Seconds per logical step and per phase.

    Phases may lie in one another: each has its own time alone, so that the phases of a step and `OTHER` add up to it.
    Phases before a step begins, such as waiting for its batch, belong to it.

    On a GPU the work of a phase is only queued while the phase lasts. Given the device, its boundaries are marked in
    the queue too, and the step's phases are those of the device, read when the step ends; that waits for the device
    once per step. Without the device the phases of a step on a GPU are those of queueing.

    Args:
        device: Where the step runs; None for the host's clock alone.

    Attributes:
        steps: Seconds of each step, its wait for data included.
        phases: Seconds of each phase over all steps.
        last: Seconds of each phase of the step that ended last; they add up to its entry in ``steps``.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self.steps: list[float] = []
        self.phases: dict[str, float] = defaultdict(float)
        self.last: dict[str, float] = {}
        self._on_gpu = device is not None and device.type == "cuda"
        self._before: dict[str, float] = defaultdict(float)
        self._open: list[str] = []
        # The phase that begins at each boundary of the step at hand; None: outside of a step.
        self._marks: list[tuple[str, float, torch.cuda.Event | None]] | None = None

    @property
    def current(self) -> str:
        """The innermost phase of the step at hand; `OTHER` where there is none."""
        return self._open[-1] if self._open else OTHER

    def start_step(self) -> None:
        """Begin a logical step. One that was begun and not ended is forgotten."""
        self._open = []
        self._marks = []
        self._mark(OTHER)

    def end_step(self) -> None:
        """End it."""
        if self._marks is None:
            return
        self._mark(OTHER)
        last = self._marks[-1][2]
        if last is not None:
            last.synchronize()
        spent = self._before
        for (name, began, event), (_, ended, next_event) in pairwise(self._marks):
            if event is not None and next_event is not None:
                spent[name] += event.elapsed_time(next_event) / 1000
            else:
                spent[name] += ended - began
        self.last = dict(spent)
        self.steps.append(sum(spent.values()))
        for name, seconds in spent.items():
            self.phases[name] += seconds
        self._before, self._marks = defaultdict(float), None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """The time of the block, without that of phases inside of it, belongs to a phase.

        Args:
            name: Its name.

        Yields:
            Nothing.
        """
        if self._marks is None:
            started = time.perf_counter()
            try:
                yield
            finally:
                self.add(name, time.perf_counter() - started)
            return
        self._open.append(name)
        self._mark(name)
        try:
            yield
        finally:
            # An exception may have left the step: then there is nothing to go back to.
            if self._open:
                self._open.pop()
                self._mark(self._open[-1] if self._open else OTHER)

    def add(self, name: str, seconds: float) -> None:
        """Add to a phase of the next step what was measured elsewhere, before the step began.

        Args:
            name: The phase.
            seconds: How long.
        """
        self._before[name] += seconds

    def waiting(self, items: Iterable[T], name: str = DATA) -> Iterator[T]:
        """The same items; the time that each takes to come belongs to a phase.

        Args:
            items: A loader, say.
            name: The phase.

        Yields:
            Each item.
        """
        iterator = iter(items)
        while True:
            with self.phase(name):
                try:
                    item = next(iterator)
                except StopIteration:
                    return
            yield item

    def _mark(self, name: str) -> None:
        assert self._marks is not None
        event = None
        if self._on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        self._marks.append((name, time.perf_counter(), event))
