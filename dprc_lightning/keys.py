"""The run secret, the subkeys derived from it, and the cryptographic streams that they open.

One 256-bit secret from the operating system lies in the run folder. Everything random that must be repeatable within a
run (which records form a batch, the projection, dropout) is a pseudo-random function of it: one subkey per
`Domain`, then one key per **ledger sequence number**. The sequence number counts every step ever begun and never
repeats; a step counter that a checkpoint can set back would draw the same batch or projection twice. The user's seed
enters nowhere: it is known.

Gaussian noise is *not* derived from this secret. Its key is fresh in every process and never stored (`noise.py`):
noise that can be drawn again can be subtracted.

What may be published, and when:

====================  ==================================================================================================
run secret            never
sampling key          never: who knows which records were drawn has no amplification by sampling left to face
dropout key           never: known masks by batch position let one record change the others' gradients
augmentation key      never: likewise
group-record key      never: which of a person's records was drawn is as secret as whether one was
fingerprint key       never: a fingerprint whose key is known confirms a suspected record
checkpoint key        never: who has it can sign a checkpoint that runs code where it is loaded
noise state           never, and it is nowhere on disk
projection, one step  only after that step's noised sum is fixed
projection subkey     only after the last step of a run that will never be resumed, forked or extended
====================  ==================================================================================================

Who knows a projection before the data or the parameters are fixed can make a gradient invisible to the norm estimate.
"""

import builtins
import enum
import errno
import hashlib
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

from dprc_lightning.errors import InvalidArgumentError, SecretError

KEY_BYTES = 32
SECRET_NAME = "secret.key"

# Changing it changes every stream of every run: only together with the ledger's format version.
_PERSONALISATION = b"dprc-lightning/1"
# ChaCha20's block counter has 32 bits of 64-byte blocks.
_CHACHA_BLOCK = 64
_STREAM_LIMIT = 2**32 * _CHACHA_BLOCK


class Domain(enum.Enum):
    """What a subkey is for.

    An enum and not a free string: two purposes that share a label share their random bits, and the guarantee needs
    sampling, projection and dropout to be independent of each other. There is no noise here on purpose.
    """

    SAMPLING = "sampling"
    PROJECTION = "projection"
    DROPOUT = "dropout"
    AUGMENTATION = "augmentation"
    GROUP_RECORD = "group-record"
    DATA_FINGERPRINT = "data-fingerprint"
    CHECKPOINT = "checkpoint"


def derive(key: bytes, *parts: int | str | bytes) -> bytes:
    """Derive a 32-byte key by keyed BLAKE2b.

    Guarantee: the encoding of ``parts`` is injective (each part carries its type and its length), so different part
    lists are different inputs of the pseudo-random function: ``("a", "bc")``, ``("ab", "c")``, ``(1,)`` and ``("1",)``
    give independent keys.

    Args:
        key: 32 bytes, secret.
        *parts: The labels and numbers that name the derived key. Integers may have any size and sign.

    Returns:
        32 bytes.

    Raises:
        InvalidArgumentError: If the key has another length or a part another type.
    """
    digest = hashlib.blake2b(key=_checked(key), digest_size=KEY_BYTES, person=_PERSONALISATION)
    for part in parts:
        # bool is an int in Python: derive(key, True) would silently equal derive(key, 1).
        if isinstance(part, bool) or not isinstance(part, int | str | bytes):
            raise InvalidArgumentError("part", part, "int, str or bytes (convert a NumPy integer by int())")
        if isinstance(part, int):
            tag, data = b"i", part.to_bytes(part.bit_length() // 8 + 1, "big", signed=True)
        elif isinstance(part, str):
            tag, data = b"s", part.encode()
        else:
            tag, data = b"b", part
        digest.update(tag + len(data).to_bytes(8, "big") + data)
    return digest.digest()


class KeyStream:
    """The ChaCha20 key stream of one key: cryptographic random bytes, the same on every machine.

    Random access is by key, one ``KeyStream(derive(key, sequence, block))`` per block; `position` is for what is made
    again in parts. Two streams of one key are the same stream, so a key serves one purpose once.

    Guarantee: without the key the bytes are computationally indistinguishable from uniform ones, whatever other bytes
    of this stream or streams of other keys are known.

    Args:
        key: 32 bytes, secret.
        position: How many bytes of the stream to leave out: a multiple of 64, ChaCha20's block.

    Raises:
        InvalidArgumentError: If the key has another length, or the position lies elsewhere.
    """

    def __init__(self, key: builtins.bytes, position: int = 0) -> None:
        if position % _CHACHA_BLOCK or not 0 <= position < _STREAM_LIMIT:
            raise InvalidArgumentError("position", position, "a multiple of 64 in [0, 2^38)")
        # Block counter (32 bits) and nonce. The nonce may be constant because every key is used for one stream only.
        start = (position // _CHACHA_BLOCK).to_bytes(4, "little") + bytes(12)
        self._encryptor = Cipher(ChaCha20(_checked(key), start), mode=None).encryptor()
        self._position = position

    def fill(self, buffer: bytearray) -> None:
        """Overwrite the buffer with the next bytes of the stream.

        Args:
            buffer: Any length.

        Raises:
            InvalidArgumentError: If the stream would exceed 2^38 bytes, where ChaCha20's block counter wraps.
        """
        self._position += len(buffer)
        if self._position > _STREAM_LIMIT:
            raise InvalidArgumentError("n", len(buffer), "one key gives 2^38 bytes: derive one key per block")
        self._encryptor.update_into(builtins.bytes(len(buffer)), buffer)

    def uint64(self, n: int) -> np.ndarray:
        """Return the next n uniform 64-bit words (little-endian, so equal on every machine).

        Args:
            n: How many words.

        Returns:
            A writable array of dtype uint64 and shape [n].
        """
        buffer = bytearray(8 * n)
        self.fill(buffer)
        return np.frombuffer(buffer, dtype="<u8").astype(np.uint64, copy=False)

    def bytes(self, n: int) -> builtins.bytes:
        """Return the next n bytes.

        Args:
            n: How many bytes.

        Returns:
            n bytes.
        """
        buffer = bytearray(n)
        self.fill(buffer)
        return builtins.bytes(buffer)

    def __repr__(self) -> str:
        return "KeyStream(<hidden>)"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise SecretError("a key stream cannot be pickled or copied: it would be read twice; derive a key per use")


class RunSecret:
    """The 256-bit secret of one run folder.

    Guarantee: the key comes from the operating system's generator, is written once (never over an existing file) into
    a file that only its owner can read, and appears in no ``repr``, pickle, checkpoint or log; only subkeys leave this
    object. If the file is lost, a new secret starts new streams; the ledger still counts every earlier step.

    Make one by `create`, `load` or (tests only) `for_testing`.

    Attributes:
        is_test: True if the secret came from `for_testing`: whatever a run with it releases is NOT PRIVATE.
    """

    __slots__ = ("__key", "is_test")

    def __init__(self, key: bytes, *, is_test: bool = False) -> None:
        self.__key = _checked(key)
        self.is_test = is_test

    @classmethod
    def create(cls, folder: str | os.PathLike[str]) -> "RunSecret":
        """Draw a new secret and store it as ``secret.key`` in the run folder, mode 0600, on disk before this returns.

        Args:
            folder: The run folder; it must exist.

        Returns:
            The secret.

        Raises:
            SecretError: If there is a secret already, or if it cannot be stored privately.
        """
        path = Path(folder) / SECRET_NAME
        key = os.urandom(KEY_BYTES)
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            raise SecretError(
                f"{path} exists: load it, or choose another run folder (a secret is never replaced)"
            ) from None
        except OSError as error:
            raise SecretError(f"{path} cannot be created ({error.strerror}): choose a writable run folder") from None
        try:
            try:
                os.fchmod(descriptor, 0o600)
                _refuse_readable_by_others(path, os.fstat(descriptor))
                _write_key(descriptor, key)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            fsync_directory(path.parent)
        except BaseException as error:
            # A partial secret would block every later start of this folder.
            path.unlink(missing_ok=True)
            if isinstance(error, OSError):
                raise SecretError(
                    f"{path} cannot be written ({error.strerror}): free space, then start again"
                ) from None
            raise
        return cls(key)

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> "RunSecret":
        """Read the secret of a run folder.

        Args:
            folder: The run folder.

        Returns:
            The secret.

        Raises:
            SecretError: If the file is missing, a symbolic link, not a regular file, readable by others, or of the
                wrong length.
        """
        path = Path(folder) / SECRET_NAME
        try:
            # O_NONBLOCK: opening a named pipe of that name must not hang.
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            raise SecretError(f"{path} is missing: create a new secret; the ledger still counts the steps") from None
        except OSError as error:
            if path.is_symlink():
                raise SecretError(f"{path} is a symbolic link: put the file itself into the run folder") from None
            raise SecretError(f"{path} cannot be read ({error.strerror}): make it readable for its owner") from None
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise SecretError(f"{path} is not a regular file: put the file itself into the run folder")
            _refuse_readable_by_others(path, status)
            key = os.read(descriptor, KEY_BYTES + 1)
        finally:
            os.close(descriptor)
        if len(key) != KEY_BYTES:
            raise SecretError(
                f"{path} holds {status.st_size} bytes instead of {KEY_BYTES}: move it away and create a new secret; "
                "the ledger still counts the steps"
            )
        return cls(key)

    @classmethod
    def replicated(cls, secret: "RunSecret | None", broadcast: Callable[[bytes | None], bytes | None]) -> "RunSecret":
        """The secret of rank 0 on every rank of a run.

        The key crosses the network as it is: the processes of a run, and what lies between them, are trusted.

        Args:
            secret: On rank 0 the secret, None elsewhere.
            broadcast: Takes rank 0's value and returns it on every rank; a collective.

        Returns:
            The same secret everywhere.
        """
        key = broadcast(None if secret is None else secret.__key)
        if secret is not None:
            return secret
        assert key is not None, "rank 0 has the secret"
        return cls(key)

    @classmethod
    def for_testing(cls, seed: int) -> "RunSecret":
        """Return a known secret. Tests only: whatever is released under it is NOT PRIVATE.

        Args:
            seed: Any integer.

        Returns:
            A secret with ``is_test`` set.
        """
        return cls(derive(bytes(KEY_BYTES), "for testing", seed), is_test=True)

    def subkey(self, domain: Domain, *parts: int | str | bytes) -> bytes:
        """Return the key of a domain, or of something within it.

        Guarantee: subkeys of different domains are computationally independent, and none tells the run secret.

        Args:
            domain: What the key is for.
            *parts: Narrow it, usually by ledger sequence number; ``subkey(d, n)`` is not ``derive(subkey(d), n)``.

        Returns:
            32 bytes. See the module's table for what may be published when.

        Raises:
            InvalidArgumentError: If ``domain`` is not a `Domain`.
        """
        if not isinstance(domain, Domain):
            raise InvalidArgumentError("domain", domain, f"one of {[str(known) for known in Domain]}")
        return derive(self.__key, domain.value, *parts)

    def __repr__(self) -> str:
        return f"RunSecret(<{'TEST, NOT PRIVATE' if self.is_test else 'hidden'}>)"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise SecretError("the run secret cannot be pickled or copied: load it from the run folder where it is needed")


def secret_identity(folder: str | os.PathLike[str]) -> dict[str, int]:
    """What tells the secret's own file from a copy: a copied run folder must not draw the same batches as its original.

    Args:
        folder: The run folder.

    Returns:
        Inode and time of the last change of its status, which a copy cannot take along; in seconds because some network
        file systems keep no more. Neither is secret.
    """
    status = os.stat(Path(folder) / SECRET_NAME)
    return {"inode": status.st_ino, "changed": int(status.st_ctime)}


def fsync_directory(folder: str | os.PathLike[str]) -> None:
    """Make the creation of a file in this folder survive a power loss.

    Args:
        folder: The directory whose entries changed.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_key(descriptor: int, key: bytes) -> None:
    if os.write(descriptor, key) != KEY_BYTES:
        raise OSError(errno.ENOSPC, "short write")


def _refuse_readable_by_others(path: Path, status: os.stat_result) -> None:
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077:
        raise SecretError(f"{path} has mode {mode:04o}, others can use it: run `chmod 600 {path}`")


def _checked(key: bytes) -> bytes:
    # The value stays out of the message: it is a key, or close to one.
    if not isinstance(key, bytes) or len(key) != KEY_BYTES:
        raise InvalidArgumentError("key", type(key).__name__, f"{KEY_BYTES} bytes")
    return key
