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
import secrets
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
        log = cls(path, _create(path, path))
        try:
            _lock(path, log._descriptor)
            log.append([first])
            fsync_directory(path.parent)
        except BaseException as error:
            # Nothing was reserved yet, so nothing is lost, and a partial first line would block every later start.
            path.unlink(missing_ok=True)
            log.release()
            if isinstance(error, OSError):
                raise LedgerError(_not_made(path, error)) from None
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
        log = cls(path, _open(path, os.O_RDONLY if read_only else os.O_RDWR))
        try:
            if not read_only:
                _lock(path, log._descriptor)
            log._read(replay)
        except BaseException:
            log.release()
            raise
        if read_only:
            log.release()
        return log

    @classmethod
    def copy(
        cls,
        source: Path,
        path: Path,
        replay: Callable[[str, dict[str, Any]], None],
        last: Callable[[], Mapping[str, Any]],
    ) -> "ChainedLog":
        """Start a new file with the complete lines of another one and one entry more, and open it for writing.

        Guarantee: the new file appears under its name with all its lines on disk, or not at all, under kill -9 too: a
        copy without its last entry would pass for the source. What is copied is what was verified.

        Args:
            source: The file to copy. It is read once and not changed; another process may be writing it.
            path: The new file; its folder must exist.
            replay: As for `open`, with the lines of the source.
            last: Called once the source is verified, for the entry to append; what it raises stops the copy.

        Returns:
            The log.

        Raises:
            LedgerError: If the source is missing, damaged or edited, or the new file exists or cannot be written.
        """
        original = cls(source, _open(source, os.O_RDONLY))
        try:
            lines = original._read(replay)
        finally:
            original.release()
        entry = last()
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
        log = cls(path, _create(temporary, path))
        try:
            _lock(temporary, log._descriptor)
            log._start(lines, original.head)
            log.append([entry])
            # Unlike a rename it never replaces a file.
            os.link(temporary, path)
            temporary.unlink()
            fsync_directory(path.parent)
        except BaseException as error:
            temporary.unlink(missing_ok=True)
            log._unlink_own()
            log.release()
            if isinstance(error, OSError):
                raise LedgerError(_not_made(path, error)) from None
            raise
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

    def _start(self, lines: bytes, head: str) -> None:
        """Fill a new file with lines whose chain was verified; the next append makes them durable."""
        assert self._descriptor is not None
        self._write(self._descriptor, lines)
        self.head, self._size = head, len(lines)

    def _unlink_own(self) -> None:
        # Asked of the file system and not of a flag, which an interrupt could leave behind the truth.
        with contextlib.suppress(FileNotFoundError):
            if self._descriptor is not None and os.path.samestat(os.fstat(self._descriptor), os.stat(self.path)):
                self.path.unlink()

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

    def _read(self, replay: Callable[[str, dict[str, Any]], None]) -> bytes:
        """Returns the complete lines, after their verification."""
        assert self._descriptor is not None
        try:
            with os.fdopen(os.dup(self._descriptor), "rb") as stream:
                data = stream.read()
        except OSError as error:
            raise LedgerError(f"{self.path} cannot be read ({error.strerror}): restore it from a copy") from None
        self._verify(data, replay)
        return data[: self._size]

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


def _open(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_CLOEXEC)
    except FileNotFoundError:
        raise LedgerError(f"{path} is missing: restore it; without it nobody knows what was spent") from None
    except OSError as error:
        raise LedgerError(f"{path} cannot be opened ({error.strerror}): make it readable and writable") from None


def _create(file: Path, path: Path) -> int:
    try:
        if os.path.lexists(path):
            raise FileExistsError
        return os.open(file, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    except FileExistsError as error:
        raise LedgerError(_not_made(path, error)) from None
    except OSError as error:
        raise LedgerError(f"{path} cannot be created ({error.strerror}): choose a writable run folder") from None


def _not_made(path: Path, error: OSError) -> str:
    if isinstance(error, FileExistsError):
        return f"{path} exists: open it to go on, or choose another run folder"
    return f"{path} cannot be made durable ({error.strerror}): use another disk"


def _lock(path: Path, descriptor: int | None) -> None:
    assert descriptor is not None
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
