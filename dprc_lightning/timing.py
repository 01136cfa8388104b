"""Where a step's time goes."""

import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


class StepClock:
    """Wall-clock seconds per logical step and per phase.

    On a GPU the phases measure launches unless something synchronises; the whole step is right on average.
    """

    def __init__(self) -> None:
        self.steps: list[float] = []
        self.phases: dict[str, float] = defaultdict(float)
        self._started: float | None = None

    def start_step(self) -> None:
        """Begin a logical step."""
        self._started = time.perf_counter()

    def end_step(self) -> None:
        """End it."""
        if self._started is not None:
            self.steps.append(time.perf_counter() - self._started)
            self._started = None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of the block to a phase.

        Args:
            name: Its name.

        Yields:
            Nothing.
        """
        started = time.perf_counter()
        try:
            yield
        finally:
            self.phases[name] += time.perf_counter() - started
