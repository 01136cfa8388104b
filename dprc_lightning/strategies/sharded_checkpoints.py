"""Checkpoints that all ranks write together: whole or not there, and loaded only if this run wrote them."""

import abc
import ctypes
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch.distributed

from dprc_lightning import manifest
from dprc_lightning.checkpoint import DurableCheckpointIO
from dprc_lightning.errors import CheckpointError, InvalidArgumentError
from dprc_lightning.keys import KEY_BYTES, Domain, RunSecret, derive, fsync_directory
from dprc_lightning.run import own_folder, stored_secret
from dprc_lightning.strategies.ranks import ManyRanks
from dprc_lightning.whole_checkpoint import REST


class ShardedCheckpoints(ManyRanks):
    """Mixed into a strategy whose engine writes a folder, and loads it into a model that is sharded already.

    Lightning would load a checkpoint after such a strategy's set-up; but how a run goes on must be known before its
    model is instrumented. So `load_checkpoint` comes first and reads only what is no engine's; the engine loads at the
    end of set-up.

    Guarantee: at every moment the folder of a name is the last complete checkpoint of that name, or not there if there
    was none; it is made under another name and renamed once all its files and its manifest are on disk. (Where two
    folders cannot change places at once, as on NFS, the last one lies beside it under a name that ends in ``.old`` for
    a moment.) No file that could run code is opened unless this run's secret signed it, or that of
    the run in whose folder it lies, made by the user who now reads it. This holds where nobody else can write to the
    folder: the engine opens the files by name after they were looked at. The signature says which files and what is in
    them, not which of the run's steps they are: an older checkpoint under a newer one's name loads, and costs nothing
    but its steps, which the ledger has counted.
    """

    trust_checkpoint = False
    """Whether to load a folder that this run's secret did not sign."""
    _waiting: Path | None = None

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Before: see the class."""
        return False

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Write a folder. A collective.

        Args:
            checkpoint: Lightning's.
            filepath: Where.
            storage_options: Must be None.

        Raises:
            InvalidArgumentError: ``storage_options`` was given.
        """
        self.refuse_unnoised()
        if storage_options is not None:
            raise InvalidArgumentError("storage_options", storage_options, "checkpoints are local files: leave it out")
        rest = {key: value for key, value in checkpoint.items() if key not in {"state_dict", "optimizer_states"}}

        def write(folder: Path) -> None:
            self._save_engine(checkpoint, folder)
            if self.global_rank == 0:
                DurableCheckpointIO().save_checkpoint(rest, folder / REST)

        self._save_folder(Path(self.broadcast(filepath)), write)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read all of a checkpoint but weights and optimizer states, which the engine loads at the end of set-up.

        Args:
            checkpoint_path: The folder.
            weights_only: None or True, which are the same here.

        Returns:
            The rest of the checkpoint.

        Raises:
            CheckpointError: It is no folder that this engine can load.
        """
        path = Path(self.broadcast(checkpoint_path))
        if not path.is_dir():
            raise CheckpointError(
                f"{path} is a single file, and strategy {self.strategy_name} loads folders that it wrote; load it with "
                "dprc_single, dprc_ddp or dprc_fsdp2"
            )
        problem = self._engine_problem(path)
        if problem is not None:
            raise CheckpointError(f"strategy {self.strategy_name}, ckpt_path={path}: {problem}")
        self._waiting = path
        return DurableCheckpointIO().load_checkpoint(path / REST)

    def _restore_engine(self) -> None:
        """Called at the end of set-up."""
        path, self._waiting = self._waiting, None
        if path is None:
            return
        self._check_folder(path)
        with self._loading():
            self._load_engine(path)

    def _loading(self) -> AbstractContextManager[None]:
        hook = getattr(self, "noise_hook", None)
        return nullcontext() if hook is None else hook.rehearsal()

    @abc.abstractmethod
    def _engine_problem(self, path: Path) -> str | None:
        """Why this engine, with as many processes, cannot go on from a folder; told by the names of its files alone.

        Args:
            path: The checkpoint.

        Returns:
            Reason and remedy, or None.
        """

    @abc.abstractmethod
    def _save_engine(self, checkpoint: dict[str, Any], folder: Path) -> None:
        """Write weights and optimizer states.

        Args:
            checkpoint: Lightning's, not to be changed.
            folder: Where.
        """

    @abc.abstractmethod
    def _load_engine(self, path: Path) -> None:
        """Load them.

        Args:
            path: The checkpoint.
        """

    def _save_folder(self, path: Path, write: Callable[[Path], None]) -> None:
        """Write a checkpoint. A collective.

        Args:
            path: Where, the same on every rank.
            write: Called on every rank with the folder to write to.
        """
        temporary = path.with_name(f".{path.name.replace('ckpt', 'partial')}.tmp")
        self.on_rank_zero(lambda: _make_way(temporary))
        with self._together(f"{path} cannot be written"):
            write(temporary)
        names = self.from_rank_zero(lambda: manifest.files_of(temporary))
        own: dict[str, str] = {}
        with self._together(f"{path} cannot be written"):
            own = {name: manifest.digest(temporary / name, durable=True) for name in self._share(names)}
        parts: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(parts, own)
        digests = {name: found for part in parts for name, found in part.items()}

        def finish() -> None:
            manifest.sign(temporary, digests, self._signing_key())
            _put_in_place(temporary, path)

        self.on_rank_zero(finish)

    def _check_folder(self, path: Path) -> None:
        """Refuse a folder that this run did not write, or that has changed. A collective, before anything is loaded.

        Args:
            path: The checkpoint.
        """
        if self.trust_checkpoint:
            return
        content = self.from_rank_zero(lambda: manifest.check_signature(path, self._known_keys(path)))
        with self._together(f"{path} is not loaded"):
            manifest.check_files(path, content, self._share(sorted(content["files"])))

    def _signing_key(self) -> bytes:
        run = getattr(getattr(self, "lightning_module", None), "private_run", None)
        secret: RunSecret | None = run.secret if run is not None else None
        # Without a run nobody can vouch for the folder later; it is still told from a damaged one.
        return secret.subkey(Domain.CHECKPOINT) if secret is not None else derive(bytes(KEY_BYTES), "unsigned")

    def _known_keys(self, path: Path) -> list[bytes]:
        run = getattr(getattr(self, "lightning_module", None), "private_run", None)
        secrets = [run.secret if run is not None else None, stored_secret(own_folder(path))]
        return [secret.subkey(Domain.CHECKPOINT) for secret in secrets if secret is not None]

    def _share(self, names: list[str]) -> list[str]:
        """The files that this rank reads: reading all of a large checkpoint takes one rank minutes."""
        return names[torch.distributed.get_rank() :: torch.distributed.get_world_size()]

    @contextmanager
    def _together(self, what: str) -> Iterator[None]:
        """If one rank fails inside, all do.

        Args:
            what: The beginning of the message.

        Raises:
            CheckpointError: One has failed.
        """
        failure: str | None = None
        cause: BaseException | None = None
        try:
            yield
        except (OSError, RuntimeError, CheckpointError) as error:
            failure, cause = str(error) if isinstance(error, CheckpointError) else f"{what} ({error})", error
        told: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(told, failure)
        first = next((line for line in told if line), None)
        if first is not None:
            raise CheckpointError(first.splitlines()[0]) from cause


def _make_way(temporary: Path) -> None:
    """Remove what a killed save of this name left, and make the folder."""
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)


def _put_in_place(temporary: Path, path: Path) -> None:
    """A rename cannot replace a folder that has files: both change places, or the old one steps aside first."""
    if os.path.lexists(path) and _exchange(temporary, path):
        fsync_directory(path.parent)
        _remove(temporary)
        return
    aside = path.with_name(f".{path.name.replace('ckpt', 'partial')}.old")
    shutil.rmtree(aside, ignore_errors=True)
    if os.path.lexists(path):
        os.rename(path, aside)
    os.rename(temporary, path)
    fsync_directory(path.parent)
    _remove(aside)


def _remove(old: Path) -> None:
    if old.is_dir():
        shutil.rmtree(old)
    else:
        old.unlink(missing_ok=True)


def _exchange(one: Path, other: Path) -> bool:
    """Let two names change places at once, so that a kill finds either the old or the new under each.

    Args:
        one: A file or folder.
        other: Another, on the same file system.

    Returns:
        Whether that was done: Linux can, on its own file systems.
    """
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    if rename is None:
        return False
    here, exchange = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
    return rename(here, os.fsencode(one), here, os.fsencode(other), exchange) == 0
