"""Checkpoint files: a crash never costs the last good one, and loading one never runs its code."""

import os
import pathlib
import pickle
import secrets
import sys
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.plugins.io import TorchCheckpointIO
from torch.serialization import get_unsafe_globals_in_checkpoint

from dprc_lightning.config import PerformanceConfig, PrivacyConfig
from dprc_lightning.errors import CheckpointError, InvalidArgumentError
from dprc_lightning.keys import fsync_directory
from dprc_lightning.manifest import MANIFEST

SAFE_CLASSES: tuple[type, ...] = (PrivacyConfig, PerformanceConfig, pathlib.PosixPath)
"""What `save_hyperparameters` puts into a checkpoint beyond tensors and plain values. Making one of these runs nothing:
they are plain values under names, and a run checks the values of its own settings, not of the checkpoint's."""

# For the whole process, because LightningCLI and load_from_checkpoint read files by themselves, weights_only too.
torch.serialization.add_safe_globals(list(SAFE_CLASSES))

CHECKPOINT_KEY = "dprc_lightning"
"""Where a checkpoint has what its run remembers of itself."""

_LISTED = 5
# What an intact archive with a wrong content raises. Not RuntimeError: that is a device that is full or not there.
_MALFORMED = (pickle.UnpicklingError, ValueError, LookupError, EOFError)


class DurableCheckpointIO(TorchCheckpointIO):
    """Checkpoints as local files, written so that a crash cannot cost more than the one that was being written.

    Guarantee: at every moment the file of a name is the last complete checkpoint of that name, or not there if there
    was none. When `save_checkpoint` returns, it is on disk; when it raises or the process is killed, the file before it
    is untouched. `load_checkpoint` runs no code of the file: it makes tensors, plain values and `SAFE_CLASSES`, by
    torch's restricted unpickler, and whatever else the file names is refused.

    The temporary file lies in the same folder, where a rename is atomic, and needs room for a second checkpoint. One
    that a kill left is removed by the next save of that name. No name holds "ckpt": Lightning counts such files.
    """

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Write a checkpoint. It is on disk when this returns.

        Args:
            checkpoint: Tensors and plain values. Other classes are refused now, not when the run needs the file.
            path: A local file; its folder is made if it is not there.
            storage_options: Must be None.

        Raises:
            CheckpointError: It cannot be written, or could not be loaded.
            InvalidArgumentError: ``storage_options`` or a URL was given.
        """
        if storage_options is not None:
            raise InvalidArgumentError("storage_options", storage_options, "checkpoints are local files: leave it out")
        file = _local(path)
        try:
            is_new = not file.parent.is_dir()
            file.parent.mkdir(parents=True, exist_ok=True)
            temporary = _make_way(file)
            try:
                _write(checkpoint, temporary)
                _refuse_unsafe(
                    temporary, f"{file} could not be loaded again", "keep it out of save_hyperparameters and states"
                )
                os.replace(temporary, file)
                fsync_directory(file.parent)
                if is_new:
                    fsync_directory(file.parent.parent)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
        except OSError as error:
            raise CheckpointError(
                f"{file} cannot be written ({error.strerror or error}): free space or repair the disk, then resume; "
                f"only the training since the last good checkpoint is lost: {_others(file)}"
            ) from error

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        map_location: Callable | str | torch.device | Mapping[str, str] | None = "cpu",
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Read a checkpoint without running anything that it contains.

        Args:
            path: A local file.
            map_location: As for ``torch.load``.
            weights_only: None or True, which are the same here.

        Returns:
            What was saved.

        Raises:
            CheckpointError: The file is missing, damaged, or holds what could run code.
            InvalidArgumentError: ``weights_only=False`` or a URL was given.
        """
        if weights_only is not None and weights_only is not True:
            raise InvalidArgumentError(
                "weights_only", weights_only, "a checkpoint is never allowed to run code: leave it out"
            )
        file = _local(path)
        if (file / MANIFEST).is_file():
            raise CheckpointError(
                f"{file} is a folder, which a strategy that shards wrote; load it with that one (dprc_fsdp2 or "
                "dprc_deepspeed_stage_1, _2, _3)"
            )
        self.check(file)
        # The check above names what is refused; the restricted unpickler is what keeps the promise.
        try:
            return torch.load(file, map_location=map_location, weights_only=True)  # type: ignore[arg-type]
        except _MALFORMED as error:
            raise CheckpointError(
                f"{file} is malformed ({_line(error)}), use an earlier one: {_others(file)}"
            ) from None

    def check(self, file: Path) -> None:
        """Refuse, by a CheckpointError, a file that is missing or damaged, or that holds what could run code.

        Args:
            file: The checkpoint.
        """
        _refuse_damaged(file)
        _refuse_unsafe(file, f"{file} is not loaded", "take a checkpoint of your own run")


def _local(path: str | os.PathLike[str]) -> Path:
    if "://" in os.fspath(path):
        raise InvalidArgumentError(
            "checkpoint path", os.fspath(path), "checkpoints are local files: give a folder of a local disk or a mount"
        )
    return Path(path)


def _make_way(file: Path) -> Path:
    """Remove what killed saves of this name left.

    Args:
        file: The checkpoint.

    Returns:
        The name of a temporary file that is not there.
    """
    prefix = f".{file.name.replace('ckpt', 'partial')}."
    for name in os.listdir(file.parent):
        if name.startswith(prefix) and name.endswith(".tmp"):
            (file.parent / name).unlink(missing_ok=True)
    return file.parent / f"{prefix}{secrets.token_hex(4)}.tmp"


def _write(checkpoint: dict[str, Any], temporary: Path) -> None:
    # 0666 less the umask: a temporary file of the tempfile module would be readable by its owner alone.
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    checksums, outer = torch.serialization.get_crc32_options(), sys.exception()
    torch.serialization.set_crc32_options(True)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            torch.save(checkpoint, stream)
            stream.flush()
            os.fsync(stream.fileno())
    except RuntimeError as error:
        # torch's writer turns what interrupted it into a RuntimeError of its own.
        raise _interruption(error, outer) or error from None
    finally:
        torch.serialization.set_crc32_options(checksums)


def _interruption(error: BaseException, outer: BaseException | None) -> BaseException | None:
    """The full disk, the Ctrl-C or the SIGTERM behind an error, unless it was there before (``outer``)."""
    behind = error.__context__
    while behind is not None and behind is not outer:
        if isinstance(behind, OSError) or not isinstance(behind, Exception):
            return behind
        behind = behind.__context__
    return None


def _refuse_damaged(file: Path) -> None:
    """Read all of it: torch does not look at the checksums, and a flipped bit would be trained on."""
    try:
        with zipfile.ZipFile(file) as archive:
            damaged = archive.testzip() is not None
    except FileNotFoundError:
        raise CheckpointError(f"{file} is missing: {_others(file)}") from None
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read ({error.strerror or error}): {_others(file)}") from None
    except (zipfile.BadZipFile, zlib.error, RuntimeError, *_MALFORMED):
        damaged = True
    if damaged:
        raise CheckpointError(f"{file} is truncated or damaged, use an earlier one: {_others(file)}")


def _refuse_unsafe(archive: Path, what: str, remedy: str) -> None:
    try:
        unsafe = sorted(get_unsafe_globals_in_checkpoint(str(archive)))
    except (RuntimeError, *_MALFORMED) as error:
        raise CheckpointError(f"{what}: it is no checkpoint of torch ({_line(error)})") from None
    if unsafe:
        raise CheckpointError(
            f"{what}: it holds {', '.join(unsafe)}, and no code of a checkpoint is run; {remedy}, or allow the class "
            "by torch.serialization.add_safe_globals before training and before resuming"
        )


def _others(file: Path) -> str:
    """The remedy: the other checkpoints there are, newest first."""
    if not file.parent.is_dir():
        return f"there is no folder {file.parent}"
    # A link (last.ckpt) is another name of one of the others, or of the file itself.
    found = [other for other in file.parent.glob("*.ckpt") if other.name != file.name and not other.is_symlink()]
    found.sort(key=lambda other: other.stat().st_mtime, reverse=True)
    if not found:
        return f"{file.parent} has no other checkpoint"
    return f"{file.parent} has {', '.join(other.name for other in found[:_LISTED])}"


def _line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
