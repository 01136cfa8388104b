"""The small op that DeepSpeed compiles at its first start on a CPU: built in set-up, and never waited for in vain.

``python -m dprc_lightning.strategies.deepspeed_op`` builds it; `make` calls that.
"""

import os
import shutil
import signal
import sys
import sysconfig
import time
from pathlib import Path

from torch.utils import cpp_extension

from dprc_lightning.errors import ConfigurationError

NAME = "deepspeed_shm_comm"
STALE_AFTER = 15 * 60
"""Seconds. The build takes about two minutes."""


def missing_tools() -> list[str]:
    """What it takes to compile, and is not there.

    Returns:
        Names of programs.
    """
    # The ninja that pip installs lies beside a python that nobody may have put on the path.
    scripts = sysconfig.get_path("scripts")
    if shutil.which("ninja") is None and shutil.which("ninja", path=scripts) is not None:
        os.environ["PATH"] = f"{os.environ.get('PATH', os.defpath)}{os.pathsep}{scripts}"
    # torch takes "c++" where CXX is not set: another name of g++, or of clang.
    compiler = os.environ.get("CXX") or ("c++" if shutil.which("c++") else "g++")
    return [tool for tool in (compiler, "ninja") if shutil.which(tool) is None]


def lock_file() -> Path:
    """What torch makes while it builds the op, and waits for without end if it is there.

    Returns:
        Its path.
    """
    return Path(cpp_extension._get_build_directory(NAME, verbose=False)) / "lock"


def stale_lock() -> Path | None:
    """The lock that a killed build has left: old, and open in no process that can be seen.

    Returns:
        Its path, or None.
    """
    lock = lock_file()
    try:
        age = time.time() - lock.stat().st_mtime
    except FileNotFoundError:
        return None
    return lock if age > STALE_AFTER and not _is_open(lock) else None


def _is_open(file: Path) -> bool:
    """Whether a process holds it, where the system tells (/proc); processes of others are not seen."""
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if os.readlink(link) == str(file):
                return True
        except OSError:
            # The process, or its file, has gone meanwhile; or it is another user's.
            continue
    return False


def check_can_start(strategy: str, on_cpu: bool) -> None:
    """Refuse what would hang, or end in a page of a compiler's words.

    Args:
        strategy: Its alias.
        on_cpu: Whether the op is needed: only there.

    Raises:
        ConfigurationError: A stale lock, or a tool that is not there.
    """
    if not on_cpu:
        return
    problems = []
    lock = stale_lock()
    if lock is not None:
        problems.append(
            f"strategy {strategy}, {lock}: a build that was killed left this lock more than 15 minutes ago, and "
            "DeepSpeed would wait for it; delete the file"
        )
    missing = missing_tools()
    if missing:
        problems.append(
            f"strategy {strategy}: DeepSpeed compiles a small op on a CPU, and {' and '.join(missing)} cannot be "
            "found; install g++ and ninja (on Debian or Ubuntu: apt install g++ ninja-build), or train with dprc_fsdp2"
        )
    if problems:
        raise ConfigurationError(problems)


def main() -> int:
    """Build the op, once; say what is done.

    Returns:
        0; without the tools too, because all but DeepSpeed works without it.
    """
    import torch

    if torch.cuda.is_available():
        print("DeepSpeed: on a GPU nothing needs to be built")
        return 0
    missing = missing_tools()
    if missing:
        print(
            f"DeepSpeed: {' and '.join(missing)} cannot be found, so its communication op is not built and its tests "
            "are skipped; to have them: apt install g++ ninja-build, then make again"
        )
        return 0
    lock = stale_lock()
    if lock is not None:
        print(f"DeepSpeed: removing {lock}, which a killed build left")
        lock.unlink(missing_ok=True)
    print(f"DeepSpeed: building its communication op in {lock_file().parent} (about two minutes, once)", flush=True)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    # As an exit, a time limit's SIGTERM lets torch take its lock away.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder

    ShareMemCommBuilder().load(verbose=False)
    print("DeepSpeed: built")
    return 0


if __name__ == "__main__":
    sys.exit(main())
