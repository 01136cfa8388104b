"""Any checkpoint of this library as one dictionary, whichever engine wrote it: for export and evaluation."""

import tempfile
from pathlib import Path
from typing import Any

import torch

from dprc_lightning import manifest
from dprc_lightning.checkpoint import DurableCheckpointIO
from dprc_lightning.errors import CheckpointError
from dprc_lightning.keys import Domain
from dprc_lightning.run import own_folder, stored_secret

REST = "lightning.pt"
"""What of a folder is no engine's: loops, callbacks, schedulers, and what the run remembers of itself."""
TAG = "checkpoint"
"""DeepSpeed's part of a folder."""


def load_whole(path: Path, *, trust: bool = False) -> dict[str, Any]:
    """Read a checkpoint in one process, whole weights under ``state_dict``; no optimizer states of a folder.

    Guarantee: a folder, whose files could run code, is read only if the secret of the run in whose folder it lies
    signed it and nothing in it has changed since (see `dprc_lightning.manifest`).

    Args:
        path: A file, or a folder that ``dprc_fsdp2`` or a ``dprc_deepspeed`` strategy wrote.
        trust: Read a folder whoever wrote it.

    Returns:
        The checkpoint.
    """
    if not path.is_dir():
        return DurableCheckpointIO().load_checkpoint(path)
    if not trust:
        secret = stored_secret(own_folder(path))
        keys = [] if secret is None else [secret.subkey(Domain.CHECKPOINT)]
        content = manifest.check_signature(path, keys)
        manifest.check_files(path, content, sorted(content["files"]))
    return DurableCheckpointIO().load_checkpoint(path / REST) | {"state_dict": whole_weights(path)}


def whole_weights(path: Path) -> dict[str, Any]:
    """The weights in a folder that was checked.

    Args:
        path: The folder.

    Returns:
        Name -> tensor, on the CPU.

    Raises:
        CheckpointError: No engine's weights are in it.
    """
    if (path / TAG).is_dir():
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        return get_fp32_state_dict_from_zero_checkpoint(str(path), tag=TAG)
    if not list(path.glob("*.distcp")):
        raise CheckpointError(f"{path}: it holds no weights of a known engine; take another checkpoint")
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "whole.pt"
        dcp_to_torch_save(path, file)
        return torch.load(file, map_location="cpu", weights_only=True)["state_dict"]
