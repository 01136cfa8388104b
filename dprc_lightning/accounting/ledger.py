"""The privacy ledger: a write-ahead log of every step ever begun.

A step's noised sum may be released the moment it exists, so the step is written down, and is on disk, before it begins.
What was written down counts, whether or not the step was finished: the ledger may count too much, never too little.

The file ``ledger.jsonl`` is a `ChainedLog` of these entries::

    {"type": "ledger", "version": 1, "run": "...", "meta": {...}}              the first line
    {"type": "reserve", "sequence": 0, "count": 1, "event": {...}}             count steps from sequence on may begin
    {"type": "close", "sequence": 0, "used": 1}                                a clean stop gives the rest of them back
    {"type": "amend", "meta": {...}}                                           from here on something else is declared
    {"type": "fork", "run": "...", "parent": "...", "sequence": 7}             all before was copied from another run
    {"type": "torn", "bytes": 17}                                              an incomplete line was cut off here
"""

import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from dprc_lightning.accounting.chained_log import ChainedLog, canonical
from dprc_lightning.accounting.chained_log import LedgerLockedError as LedgerLockedError
from dprc_lightning.accounting.reservation import Reservation
from dprc_lightning.errors import InvalidArgumentError, LedgerError

LEDGER_NAME = "ledger.jsonl"
FORMAT_VERSION = 1


class Ledger:
    """The ledger of one run, open for writing by this process alone, or for reading.

    Guarantee: when `reserve` returns, its entry is on disk; when it raises, its steps must not begin, and none of their
    numbers was handed out. Hence at any crash the steps on disk are at least the steps begun, and over any number of
    restarts no sequence number is handed out twice, as long as the file is kept. A checkpoint that remembers `head`
    detects a file that was put back to an earlier state.

    Make one by `create` or `open`. Use it as a context manager or call `close` for the clean stop. After a fork the
    parent keeps it, the child cannot use it.

    Attributes:
        path: The file.
        meta: What was declared when the ledger was created (N, q, ...), with every amendment.
        amendments: What was declared later, each with the number of the first step it is about.
        run_id: A random public name of the run.
        parents: The runs that this one was forked from, the oldest first.
        next_sequence: The number of the next step to be reserved.
    """

    _log: ChainedLog

    def __init__(self, path: Path) -> None:
        self.path = path
        self.meta: dict[str, Any] = {}
        self.amendments: list[tuple[int, dict[str, Any]]] = []
        self.run_id = ""
        self.parents: list[str] = []
        self.next_sequence = 0
        self._spent: list[tuple[dict[str, Any], int]] = []
        # The last reservation on file, if it is not closed: its first number and its count.
        self._unclosed: tuple[int, int] | None = None
        self._reservation: Reservation | None = None

    @classmethod
    def create(cls, path: str | os.PathLike[str], meta: Mapping[str, Any]) -> "Ledger":
        """Start a new ledger and open it for writing.

        Args:
            path: The file, or the existing run folder in which to make ``ledger.jsonl``.
            meta: What is declared before training (N, q, delta, ...): JSON values. It changes by `amend` alone.

        Returns:
            The ledger, its first line on disk. A file that exists is refused.
        """
        header = {
            "type": "ledger",
            "version": FORMAT_VERSION,
            "run": secrets.token_hex(16),
            "meta": _json("meta", meta),
        }
        ledger = cls(_file(path))
        ledger._log = ChainedLog.create(ledger.path, header)
        ledger._apply(header)
        return ledger

    @classmethod
    def open(
        cls, path: str | os.PathLike[str], *, read_only: bool = False, must_contain: str | None = None
    ) -> "Ledger":
        """Open an existing ledger and verify its chain. The file is not changed.

        An incomplete last line (no newline) is a write that a crash cut short: its step never began. It is cut off,
        and the cut is noted, at the next entry.

        Args:
            path: The file, or the run folder that holds ``ledger.jsonl``.
            read_only: For reports: takes no lock and works while a run is writing.
            must_contain: The `head` that a checkpoint remembers: a ledger without it is shorter than the checkpoint,
                or another run's.

        Returns:
            The ledger.

        Raises:
            LedgerError: If the file is missing, damaged or edited, does not contain ``must_contain``, or (as
                `LedgerLockedError`) is open for writing elsewhere.
        """
        ledger = cls(_file(path))
        heads: set[str] = set()

        def replay(head: str, entry: dict[str, Any]) -> None:
            heads.add(head)
            ledger._apply(entry)

        ledger._log = ChainedLog.open(ledger.path, replay, read_only=read_only)
        try:
            _refuse_shorter(ledger, heads, must_contain)
        except LedgerError:
            ledger._log.release()
            raise
        return ledger

    @classmethod
    def fork(
        cls,
        source: str | os.PathLike[str],
        path: str | os.PathLike[str],
        *,
        must_contain: str | None = None,
    ) -> "Ledger":
        """Start the ledger of a run that goes on from another run's checkpoint, in a folder of its own.

        Guarantee: the new ledger counts everything that the source had counted at that moment, an unclosed reservation
        in full; it is on disk, under its name, complete or not at all. The two then count apart: each is right about
        what ITS run releases. Who publishes both continuations pays for the composition over the UNION of their steps,
        those before the fork once. And a fork needs a new secret, which the caller draws: under the old one the two
        runs would draw the same batches and projections for the same sequence numbers.

        Args:
            source: The file, or the run folder that holds ``ledger.jsonl``; it is only read, and another process may
                be writing it.
            path: The new file, or the existing run folder in which to make ``ledger.jsonl``.
            must_contain: The `head` that the checkpoint remembers.

        Returns:
            The new ledger, open for writing, with a `run_id` of its own. A source that is missing, damaged, edited or
            does not contain ``must_contain`` is refused, and so is a file that exists (LedgerError).
        """
        ledger = cls(_file(source))
        heads: set[str] = set()

        def replay(head: str, entry: dict[str, Any]) -> None:
            heads.add(head)
            ledger._apply(entry)

        def last() -> dict[str, Any]:
            _refuse_shorter(ledger, heads, must_contain)
            run, sequence = secrets.token_hex(16), ledger.next_sequence
            entry = {"type": "fork", "run": run, "parent": ledger.run_id, "sequence": sequence}
            ledger._apply(entry)
            return entry

        ledger._log = ChainedLog.copy(ledger.path, _file(path), replay, last)
        ledger.path = ledger._log.path
        return ledger

    def reserve(self, event: Mapping[str, Any], count: int = 1) -> Reservation:
        """Write down that ``count`` steps of this kind may begin. They are on disk when this returns.

        A reservation that is still open counts in full from now on. More than one step at once saves waiting for a slow
        disk, and costs up to ``count - 1`` steps that are counted but not made if the process is killed.

        Args:
            event: The step as the accountant needs it (noise multiplier, sample rate, sketch dimension): JSON values.
            count: How many steps, at least 1.

        Returns:
            The reservation, which hands out the steps' sequence numbers.

        Raises:
            InvalidArgumentError: If ``count`` is not a positive integer.
        """
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise InvalidArgumentError("count", count, "an integer >= 1")
        entry = {"type": "reserve", "sequence": self.next_sequence, "count": count, "event": _json("event", event)}
        reservation = Reservation(self.next_sequence, count, self._log)
        self._write([entry])
        if self._reservation is not None:
            self._reservation._over = True
        self._reservation = reservation
        return reservation

    def amend(self, meta: Mapping[str, Any]) -> None:
        """Write down that something else is declared from now on. It is on disk when this returns.

        An open reservation stays open: the amendment spends nothing and gives nothing back.

        Args:
            meta: JSON values; they replace those of the same top-level names in `Ledger.meta`.
        """
        self._write([{"type": "amend", "meta": _json("meta", meta)}])

    def close(self, used: int | None = None) -> None:
        """Stop cleanly: give back the reserved steps that were not begun, and release the lock.

        Without it an open reservation counts in full. Closing twice does nothing. If the entry cannot be written
        (LedgerError) the reservation counts in full, and the lock is released all the same.

        Args:
            used: How many steps of the last reservation count; at least as many as were taken. None: those taken.

        Raises:
            InvalidArgumentError: If ``used`` is less than what was taken or more than what was reserved.
        """
        reservation = self._reservation
        taken, reserved = (0, 0) if reservation is None else (reservation.taken, reservation.count)
        if used is not None and (isinstance(used, bool) or not isinstance(used, int) or not taken <= used <= reserved):
            raise InvalidArgumentError("used", used, f"an integer from {taken} (taken) to {reserved} (reserved)")
        try:
            # An interrupt may have come between a reservation's entry and its object: that one counts in full.
            known = reservation is not None and self._unclosed == (reservation.first, reservation.count)
            if reservation is not None and known and self._log.writable:
                entry = {"type": "close", "sequence": reservation.first, "used": taken if used is None else used}
                self._write([entry])
        finally:
            self._log.release()

    def __enter__(self) -> "Ledger":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            # After an error nobody knows what was begun: the open reservation counts in full.
            self._log.release()

    @property
    def steps(self) -> int:
        """All steps that count: those begun, and those of reservations that were never closed."""
        return sum(count for _, count in self._spent)

    @property
    def head(self) -> str:
        """The hash of the last line: store it in a checkpoint and give it to `open` as ``must_contain``."""
        return self._log.head

    @property
    def torn_bytes(self) -> int:
        """Length of an incomplete last line that a crash left, until the next entry cuts it off."""
        return self._log.torn_bytes

    @property
    def writable(self) -> bool:
        """Whether steps can be reserved."""
        return self._log.writable

    def spent(self) -> list[tuple[dict[str, Any], int]]:
        """What the accountant has to compose.

        Returns:
            The events in order with their number of steps; equal neighbours are merged.
        """
        return [(dict(event), count) for event, count in self._spent]

    def _write(self, entries: list[dict[str, Any]]) -> None:
        head = self._log.head
        if self.torn_bytes:
            entries = [{"type": "torn", "bytes": self.torn_bytes}, *entries]
        try:
            self._log.append(entries)
            for entry in entries:
                self._apply(entry)
        except BaseException:
            # Interrupted (Ctrl-C) after the write: the file is ahead of this object, and only opening it anew helps.
            if self._log.head != head:
                self._log.release()
            raise

    def _apply(self, entry: Mapping[str, Any]) -> None:
        """Replay one entry: the only place where the state follows from the file.

        Args:
            entry: As it stands on file.

        Raises:
            ValueError: If it does not fit those before it.
        """
        kind = entry["type"]
        if (kind == "ledger") != (not self.run_id):
            raise ValueError("the header belongs in line 1, and only there")
        if kind == "ledger":
            if entry["version"] != FORMAT_VERSION:
                raise ValueError(f"version {entry['version']}: use the release of this package that wrote it")
            self.meta, self.run_id = entry["meta"], entry["run"]
        elif kind == "reserve":
            first, count, event = entry["sequence"], entry["count"], entry["event"]
            if first != self.next_sequence or count < 1:
                raise ValueError(f"step {self.next_sequence} was expected")
            self._count(event, count)
            self.next_sequence = first + count
            self._unclosed = (first, count)
        elif kind == "close":
            first, used = entry["sequence"], entry["used"]
            if self._unclosed is None or self._unclosed[0] != first or not 0 <= used <= self._unclosed[1]:
                raise ValueError("it closes no open reservation")
            self._count(self._spent[-1][0], used - self._unclosed[1])
            self.next_sequence = first + used
            # What was declared while the reservation was open is about the steps that were not begun then.
            self.amendments = [(min(number, self.next_sequence), meta) for number, meta in self.amendments]
            self._unclosed = None
        elif kind == "amend":
            if not isinstance(entry["meta"], dict):
                raise ValueError("its meta is no mapping")
            self.meta = {**self.meta, **entry["meta"]}
            self.amendments.append((self.next_sequence, entry["meta"]))
        elif kind == "fork":
            known = [*self.parents, self.run_id]
            if entry["parent"] != self.run_id or entry["sequence"] != self.next_sequence or entry["run"] in known:
                raise ValueError("it does not fit the run it was forked from")
            self.run_id, self.parents = entry["run"], known
            # It is the parent's, which alone knows what was begun: in this run nothing gives its steps back.
            self._unclosed = None
        elif kind != "torn":
            raise ValueError(f"unknown type {kind!r}")

    def _count(self, event: dict[str, Any], change: int) -> None:
        if self._spent and self._spent[-1][0] == event:
            change += self._spent.pop()[1]
        if change > 0:
            self._spent.append((event, change))

    def __repr__(self) -> str:
        return f"Ledger({str(self.path)!r}, steps={self.steps}, writable={self.writable})"


def _file(path: str | os.PathLike[str]) -> Path:
    file = Path(path)
    return file / LEDGER_NAME if file.is_dir() else file


def _refuse_shorter(ledger: Ledger, heads: set[str], must_contain: str | None) -> None:
    if must_contain is not None and must_contain not in heads:
        raise LedgerError(
            f"{ledger.path} ends at step {ledger.next_sequence} and does not contain the checkpoint's last entry: "
            "restore the ledger that was written with this checkpoint"
        )


def _json(name: str, value: Mapping[str, Any]) -> dict[str, Any]:
    """Return the mapping as it will be read back, so that a live ledger and a reopened one agree.

    Args:
        name: The argument, for the error.
        value: What the caller passed.

    Returns:
        A copy made of JSON types.

    Raises:
        InvalidArgumentError: If it is not a mapping of JSON values.
    """
    if not isinstance(value, Mapping):
        raise InvalidArgumentError(name, value, "a mapping")
    try:
        return json.loads(canonical(dict(value)))
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(name, value, f"JSON values and finite numbers only ({error})") from None
