"""Starts the ranks of a small job on this machine; none of them outlives the command."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Never

from dprc_lightning.errors import BenchError, DPRCError, RankZeroError

# Seconds that the others get to end by themselves once one rank has failed: they may know more than it.
GRACE = 10.0
_FOREIGN = ("SLURM_", "TORCHELASTIC_", "PMI_", "OMPI_")


def run_ranks(module: str, spec: dict[str, Any], world_size: int, folder: Path, limit: float) -> list[dict[str, Any]]:
    """Run ``python -m MODULE FOLDER`` on each rank. It calls `rank_main`.

    Args:
        module: What to run.
        spec: What it is given.
        world_size: How many processes.
        folder: Where the ranks leave their results, and their output in ``rankN.log``.
        limit: Seconds for all of it.

    Returns:
        What each rank returned.

    Raises:
        BenchError: A rank failed, or the time was up.
    """
    (folder / "spec.json").write_text(json.dumps(spec))
    # The job of which this process may be a part is none of theirs.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
    inherited |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": str(world_size)}
    inherited |= {"NODE_RANK": "0", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    if sys.platform == "linux":
        inherited.setdefault("GLOO_SOCKET_IFNAME", "lo")
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(world_size):
            with (folder / f"rank{rank}.log").open("wb") as log:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-m", module, str(folder)],
                        env=inherited | {"LOCAL_RANK": str(rank), "RANK": str(rank)},
                        # Its end tells the rank that this process is gone, however that came about.
                        stdin=subprocess.PIPE,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                    )
                )
        in_time = _wait(processes, limit)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
            if process.stdin is not None:
                process.stdin.close()
    return _results(folder, [process.returncode for process in processes], in_time, limit)


def rank_main(run: Callable[[dict[str, Any], Path], dict[str, Any]]) -> Never:
    """A rank: ends with the process that started it, and leaves there what it found, or why it failed.

    Args:
        run: From the spec and the folder to the result.
    """
    folder, rank = Path(sys.argv[1]), os.environ["LOCAL_RANK"]
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        found = run(json.loads((folder / "spec.json").read_text()), folder)
    except RankZeroError:
        sys.exit(2)
    except DPRCError as error:
        _leave(folder, rank, {"error": str(error)})
        sys.exit(2)
    _leave(folder, rank, found)
    sys.exit(0)


def _leave(folder: Path, rank: str, found: dict[str, Any]) -> None:
    part = folder / f"rank{rank}.part"
    part.write_text(json.dumps(found))
    part.rename(folder / f"rank{rank}.json")


def _end_with_parent() -> None:
    # Not sys.stdin: a thread that waits in it cannot be ended with the interpreter.
    while os.read(0, 1):
        pass
    os._exit(3)


def _wait(processes: list[subprocess.Popen[bytes]], limit: float) -> bool:
    deadline, failed = time.monotonic() + limit, False
    while any(process.poll() is None for process in processes):
        if not failed and any(process.poll() for process in processes):
            failed = True
            deadline = min(deadline, time.monotonic() + GRACE)
        if time.monotonic() > deadline:
            return failed
        time.sleep(0.05)
    return True


def _results(folder: Path, codes: list[int], in_time: bool, limit: float) -> list[dict[str, Any]]:
    files = [folder / f"rank{rank}.json" for rank in range(len(codes))]
    found = [json.loads(file.read_text()) if file.exists() else {} for file in files]
    for result in found:
        if "error" in result:
            raise BenchError(result["error"])
    if not in_time:
        raise BenchError(
            f"--timeout={limit:g}: the ranks did not end in time and were killed; give more, or less to do"
        )
    if any(codes):
        # Those that ended by themselves say why; one that was killed, by its peers' end too, may say nothing.
        failed = [rank for rank, code in enumerate(codes) if code > 0] or [r for r, code in enumerate(codes) if code]
        told = [f"rank {rank}: {_last_line(folder / f'rank{rank}.log') or 'no output'}" for rank in failed]
        raise BenchError(f"exit status {codes} of the ranks; {'; '.join(told)}")
    return found


def _last_line(log: Path) -> str:
    """The line of the exception, in which its name stands at the beginning."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    raised = [line for line in lines if line.split(":")[0].split(".")[-1].endswith(("Error", "Exception"))]
    return (raised or lines or [""])[-1][:300]


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
