"""An append-only file of JSON lines, each chained to the one before by SHA-256 and on disk before it counts.

It knows nothing of privacy: what the lines mean is the ledger's business.

Each line is the entry's canonical JSON with one more key at its end, ``"hash"``: the SHA-256 of the previous line's
hash and of this line's text without it. The chain shows damage and careless editing. It is not a signature: who can
write the file can compute a new chain.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dprc_lightning.errors import LedgerError
from dprc_lightning.keys import fsync_directory

# What the first line is chained to.
_GENESIS = hashlib.sha256(b"dprc-lightning ledger").hexdigest()
_HASH_KEY = ',"hash":"'
_TAIL = len(_HASH_KEY) + len(_GENESIS) + len('"}')


class LedgerLockedError(LedgerError):
    """Another process has the ledger open for writing: two writers would use the same sequence numbers."""


class ChainedLog:
    """The file, open for writing by this process alone, or read once.

    Guarantee: when `append` returns, its lines are on disk; when it raises, either the file is as before, or this
    object refuses every further append. Lines that a failed append left on disk are read when the file is opened again.

    Attributes:
        path: The file.
        head: The hash of the last complete line.
        torn_bytes: Length of an incomplete last line that was found when the file was opened. It is cut off at the
            next append, whose caller is expected to note it.
    """

    def __init__(self, path: Path, descriptor: int | None) -> None:
        self.path = path
        self.head = _GENESIS
        self.torn_bytes = 0
        self._descriptor = descriptor
        self._size = 0  # of the complete lines
        self._beyond = 0  # bytes after them
        self._failure = ""
        if descriptor is not None:
            _writers.add(self)

    @classmethod
    def create(cls, path: Path, first: Mapping[str, Any]) -> "ChainedLog":
        """Start a new file and open it for writing.

        Args:
            path: The file; its folder must exist.
            first: The first entry.

        Returns:
            The log, its first line and its name in the folder on disk.

        Raises:
            LedgerError: If the file exists or cannot be written.
        """
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        except FileExistsError:
            raise LedgerError(f"{path} exists: open it to go on, or choose another run folder") from None
        except OSError as error:
            raise LedgerError(f"{path} cannot be created ({error.strerror}): choose a writable run folder") from None
        log = cls(path, descriptor)
        try:
            _lock(path, descriptor)
            log.append([first])
            fsync_directory(path.parent)
        except BaseException as error:
            # Nothing was reserved yet, so nothing is lost, and a partial first line would block every later start.
            path.unlink(missing_ok=True)
            log.release()
            if isinstance(error, OSError):
                raise LedgerError(f"{path} cannot be made durable ({error.strerror}): use another disk") from None
            raise
        return log

    @classmethod
    def open(cls, path: Path, replay: Callable[[str, dict[str, Any]], None], *, read_only: bool) -> "ChainedLog":
        """Open an existing file and verify its chain. The file is not changed.

        Args:
            path: The file.
            replay: Called with the hash and the entry of each line; a ValueError, KeyError or TypeError from it is
                reported as a damaged line.
            read_only: Take no lock and read once: works while another process is writing.

        Returns:
            The log.

        Raises:
            LedgerError: If the file is missing, damaged or edited.
        """
        try:
            descriptor = os.open(path, (os.O_RDONLY if read_only else os.O_RDWR) | os.O_CLOEXEC)
        except FileNotFoundError:
            raise LedgerError(f"{path} is missing: restore it; without it nobody knows what was spent") from None
        except OSError as error:
            raise LedgerError(f"{path} cannot be opened ({error.strerror}): make it readable and writable") from None
        log = cls(path, descriptor)
        try:
            if not read_only:
                _lock(path, descriptor)
            with os.fdopen(os.dup(descriptor), "rb") as stream:
                log._verify(stream.read(), replay)
        except BaseException as error:
            log.release()
            if isinstance(error, OSError):
                raise LedgerError(f"{path} cannot be read ({error.strerror}): restore it from a copy") from None
            raise
        if read_only:
            log.release()
        return log

    @property
    def writable(self) -> bool:
        """Whether entries can be appended."""
        return self._descriptor is not None and not self._failure

    def append(self, entries: Sequence[Mapping[str, Any]]) -> None:
        """Write entries and fsync.

        Args:
            entries: JSON values; all of them are written at once.

        Raises:
            LedgerError: If it cannot be written, or if the file changed behind this object's back.
        """
        descriptor = self._descriptor
        if descriptor is None:
            raise LedgerError(f"{self.path} is not open for writing: open it without read_only")
        if self._failure:
            raise LedgerError(f"{self.path} failed before ({self._failure}): repair the cause, then open it again")
        head, lines = self.head, []
        for entry in entries:
            body = canonical(entry)
            head = _chained(head, body.encode())
            lines.append(f'{body[:-1]}{_HASH_KEY}{head}"}}\n')
        data = "".join(lines).encode()
        # From here to the last line, whatever is raised (KeyboardInterrupt too) leaves the file in an unknown state.
        self._failure = "an append was interrupted"
        status = os.fstat(descriptor)
        if status.st_nlink == 0 or status.st_size != self._size + self._beyond:
            self._failure = "it was changed or deleted while it was open"
            raise LedgerError(f"{self.path} was changed or deleted while it was open: restore it, then open it again")
        try:
            self._cut(descriptor)
            self._write(descriptor, data)
            # After a failed fsync the kernel may have dropped the data, so that a second fsync proves nothing.
            os.fsync(descriptor)
        except OSError as error:
            if self._failure:
                self._failure = error.strerror or str(error)
            raise LedgerError(
                f"{self.path} cannot be written ({error.strerror}): no step may begin; free space or repair the disk"
            ) from error
        self.head, self._size, self.torn_bytes, self._failure = head, self._size + len(data), 0, ""

    def release(self) -> None:
        """Close the file and give up the lock. Doing it twice does no harm."""
        if self._descriptor is not None:
            # Closing the last copy of the descriptor drops the lock; after a fork the parent's copy keeps it.
            descriptor, self._descriptor = self._descriptor, None
            os.close(descriptor)

    def __del__(self) -> None:
        # In a notebook, an object that is gone must not keep the lock against its successor.
        self.release()

    def _damaged(self, number: int, what: str) -> LedgerError:
        return LedgerError(f"{self.path} line {number} {what}; restore the file from a copy, or start a new run")

    def _cut(self, descriptor: int) -> None:
        if self._beyond:
            os.ftruncate(descriptor, self._size)
            self._beyond = 0

    def _write(self, descriptor: int, data: bytes) -> None:
        position = self._size
        try:
            while data:
                written = os.pwrite(descriptor, data, position)
                data, position = data[written:], position + written
        except OSError:
            # Disk full: take the partial line back. If that works, the file is as before and may be tried again.
            os.ftruncate(descriptor, self._size)
            self._failure = ""
            raise

    def _verify(self, data: bytes, replay: Callable[[str, dict[str, Any]], None]) -> None:
        self._size = data.rfind(b"\n") + 1
        self.torn_bytes = self._beyond = len(data) - self._size
        lines = data[: self._size].split(b"\n")[:-1]
        if not lines:
            raise LedgerError(f"{self.path} has no complete first line: no step was recorded; delete it and start anew")
        for number, line in enumerate(lines, start=1):
            # The hash is over the text as it stands, so there is no question of how a number was formatted.
            body = line[:-_TAIL] + b"}"
            head = _chained(self.head, body)
            if line[-_TAIL:] != f'{_HASH_KEY}{head}"}}'.encode():
                raise self._damaged(number, "does not follow from the line before: it was edited, moved or damaged")
            try:
                replay(head, json.loads(body.decode()))
            except (ValueError, KeyError, TypeError) as error:
                raise self._damaged(number, f"cannot be understood ({error})") from None
            self.head = head


def canonical(entry: Mapping[str, Any]) -> str:
    """Return the JSON text of an entry: the same for equal entries.

    Args:
        entry: JSON values; numbers must be finite.

    Returns:
        One line of ASCII.
    """
    return json.dumps(entry, sort_keys=True, separators=(",", ":"), allow_nan=False)


_writers: "weakref.WeakSet[ChainedLog]" = weakref.WeakSet()


def _close_after_fork() -> None:
    # A data loader's worker that outlives a killed run would otherwise hold the lock against the restart.
    for log in list(_writers):
        log.release()


os.register_at_fork(after_in_child=_close_after_fork)


def _lock(path: Path, descriptor: int) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in {errno.EAGAIN, errno.EACCES}:
            raise LedgerLockedError(f"{path} is being written by another process: wait for that run to end") from None
        raise LedgerError(f"{path} cannot be locked ({error.strerror}): use a file system with flock") from None
    # The file may have been replaced between opening and locking: then the lock guards nothing.
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(descriptor), os.stat(path)):
            return
    raise LedgerError(f"{path} was replaced while it was opened: open it again")


def _chained(previous: str, body: bytes) -> str:
    return hashlib.sha256(previous.encode() + body).hexdigest()
