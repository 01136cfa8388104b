"""How fast this process makes steps, and when a line of a plain log is due."""

import math
from datetime import timedelta

_LINE_SECONDS = 30.0
_LINE_SHARE = 0.05


class Pace:
    """The remaining time, judged by the steps of this process alone: those of a checkpoint took no time here.

    The first step has more to do (checks, first allocations) and counts only while there is no other.

    Args:
        done: Steps done before this process.
        total: Steps of the whole run, if that is known.
        now: The time before the first step, in seconds.
    """

    def __init__(self, done: int, total: int | None, now: float) -> None:
        self.total = total
        self._began = self._latest = (done, now)
        self._first: tuple[int, float] | None = None
        self._line = (done, now)

    def count(self, done: int, now: float) -> None:
        """A step ended.

        Args:
            done: Steps done in all.
            now: The time.
        """
        self._latest = (done, now)
        self._first = self._first or self._latest

    @property
    def position(self) -> str:
        """Such as ``2/4``."""
        return f"{self._latest[0]}/{'?' if self.total is None else self.total}"

    @property
    def remaining(self) -> str:
        """The time that the rest takes, h:mm:ss; ``-`` where it is not known."""
        done, now = self._latest
        since, started = self._first if self._first is not None and done > self._first[0] else self._began
        if self.total is None or done <= since:
            return "-"
        return str(timedelta(seconds=round((now - started) / (done - since) * max(self.total - done, 0))))

    def line_due(self) -> bool:
        """Whether a line is due: after a twentieth of the steps, after thirty seconds, or at the end.

        Returns:
            Whether it is; it counts as written then.
        """
        done, now = self._latest
        share = math.inf if self.total is None else max(1, math.ceil(self.total * _LINE_SHARE))
        due = done - self._line[0] >= share or now - self._line[1] >= _LINE_SECONDS or done == self.total
        if due:
            self._line = self._latest
        return due
