"""A mark of a training set that tells whether two processes number the same records alike, and nothing else."""

import hashlib
import pickle
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch

from dprc_lightning.dropout import secret_dropout
from dprc_lightning.keys import Domain, KeyStream, RunSecret
from dprc_lightning.sampling.groups import Groups

_LOOKED_AT = 64
"""Records that are read. A shuffled set differs in nearly all of them."""


class _Sized(Protocol):
    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


def fingerprint(dataset: _Sized, groups: Groups | None, secret: RunSecret) -> bytes:
    """A keyed hash of the number of records, of some of them, and of whose all of them are.

    Guarantee: without the run's secret the mark confirms nothing of a suspected record.

    Args:
        dataset: The records.
        groups: Whose they are, if that matters.
        secret: The run's.

    Returns:
        32 bytes.
    """
    key = secret.subkey(Domain.DATA_FINGERPRINT)
    digest = hashlib.blake2b(str(len(dataset)).encode(), key=key, digest_size=32)
    if groups is not None:
        digest.update(groups.numbers().tobytes())
    places = KeyStream(secret.subkey(Domain.DATA_FINGERPRINT, "places")).uint64(_LOOKED_AT)
    with secret_dropout(secret.subkey(Domain.DATA_FINGERPRINT, "draws")):
        for index in sorted({int(place) % len(dataset) for place in places}):
            _update(digest, dataset[index])
    return digest.digest()


def _update(digest: Any, value: Any) -> None:
    # Not by pickle alone: that of a tensor holds all of the storage that it is a part of.
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        if value.dtype is torch.bfloat16:
            value = value.float()
        value = value.numpy()
    if isinstance(value, np.ndarray) and value.dtype != object:
        digest.update(f"{value.dtype}{value.shape}".encode())
        digest.update(np.ascontiguousarray(value).tobytes())
    elif isinstance(value, Mapping):
        for key in value:
            digest.update(repr(key).encode())
            _update(digest, value[key])
    elif isinstance(value, list | tuple):
        digest.update(str(len(value)).encode())
        for item in value:
            _update(digest, item)
    elif isinstance(value, str | bytes | int | float | bool | None):
        digest.update(repr(value).encode())
    else:
        digest.update(pickle.dumps(value))
