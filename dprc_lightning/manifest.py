"""A checkpoint of many files: which files it has, what is in them, and who wrote it.

Engines that shard write folders, and read parts of them with `pickle`, which runs whatever a file says. So a folder is
loaded only if nothing in it has changed since the run itself wrote it.
"""

import hashlib
import hmac
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dprc_lightning.errors import CheckpointError
from dprc_lightning.keys import fsync_directory

MANIFEST = "manifest.json"
_VERSION = 1


def files_of(folder: Path) -> list[str]:
    """Every file of a checkpoint but the manifest, as sorted paths relative to the folder.

    Args:
        folder: The checkpoint.

    Returns:
        The paths.

    Raises:
        CheckpointError: One of them is a link, whose target can change after it was looked at, or no file (a pipe).
    """
    found = []
    for path in folder.rglob("*"):
        if path.is_symlink():
            raise CheckpointError(f"{path} is a link, and a checkpoint holds files alone: copy the file to its place")
        if not path.is_dir() and not path.is_file():
            raise CheckpointError(f"{path} is no file, and a checkpoint holds files alone: take it away")
        if path.is_file() and path != folder / MANIFEST:
            found.append(path.relative_to(folder).as_posix())
    return sorted(found)


def digest(path: Path, *, durable: bool = False) -> str:
    """BLAKE2b of a file's content.

    Args:
        path: The file.
        durable: Whether to wait until it is on disk.

    Returns:
        64 hexadecimal digits.
    """
    with path.open("rb") as stream:
        found = hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=32)).hexdigest()
        if durable:
            os.fsync(stream.fileno())
    return found


def sign(folder: Path, digests: Mapping[str, str], key: bytes) -> None:
    """Write the manifest. It is on disk when this returns.

    Guarantee: without the key nobody can change a file, add one, or take one away so that `check` accepts the folder
    (HMAC with BLAKE2b). The key says that the run wrote it, not that its content is right.

    Args:
        folder: The checkpoint.
        digests: Path relative to the folder -> `digest`, of every file.
        key: 32 secret bytes, used for nothing else.
    """
    content = {"version": _VERSION, "files": dict(sorted(digests.items()))}
    signed = content | {"mac": _mac(content, key)}
    path = folder / MANIFEST
    with path.open("w") as stream:
        json.dump(signed, stream, indent=1, sort_keys=True)
        stream.flush()
        os.fsync(stream.fileno())
    for inner in (folder, *(child for child in folder.rglob("*") if child.is_dir())):
        fsync_directory(inner)


def _read(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_text())
        usable = content["version"] == _VERSION and isinstance(content["files"], dict) and "mac" in content
    except FileNotFoundError:
        raise CheckpointError(
            f"{folder} has no {MANIFEST}: it is no checkpoint of this library, or was not finished; take another one"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); take another checkpoint") from None
    if not usable:
        raise CheckpointError(f"{path} is of another format; take another checkpoint")
    return content


def check_signature(folder: Path, keys: Iterable[bytes]) -> dict[str, Any]:
    """That a run whose key is known wrote the manifest.

    Args:
        folder: The checkpoint.
        keys: Of the runs that may have written it.

    Returns:
        The manifest.

    Raises:
        CheckpointError: None of them did, or there is no manifest.
    """
    content = _read(folder)
    # As bytes: of text with other letters the comparison raises.
    told = str(content.pop("mac")).encode()
    if not any(hmac.compare_digest(told, _mac(content, key).encode()) for key in keys):
        raise CheckpointError(
            f"{folder}: this run's secret did not sign it (it was copied, changed, or is another run's), and loading "
            "its files could run code; give --trust_checkpoint if you know who wrote it"
        )
    return content


def check_files(folder: Path, content: Mapping[str, Any], names: Sequence[str]) -> None:
    """That files are what the manifest says, and that there are no others.

    Args:
        folder: The checkpoint.
        content: Its manifest.
        names: Those to read; all ranks together read all.

    Raises:
        CheckpointError: They are not.
    """
    told = content["files"]
    odd = sorted(set(files_of(folder)) ^ set(told))
    if odd:
        raise CheckpointError(f"{folder}: {odd[0]} is {'missing' if odd[0] in told else 'not of it'}; take another one")
    for name in names:
        if digest(folder / name) != told[name]:
            raise CheckpointError(f"{folder}: {name} is damaged or was changed; take another checkpoint")


def _mac(content: Mapping[str, Any], key: bytes) -> str:
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    return hashlib.blake2b(canonical, key=key, digest_size=32, person=b"dprc-manifest").hexdigest()
