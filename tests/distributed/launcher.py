"""Starts the ranks of a gloo job on this machine, and lets none of them outlive its time limit."""

import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

TESTS = Path(__file__).parents[1]


@dataclass
class Job:
    """What each rank left behind."""

    codes: list[int]
    outputs: list[str]

    def check(self) -> "Job":
        told = "\n".join(f"--- rank {i}\n{text[-3000:]}" for i, text in enumerate(self.outputs))
        assert not any(self.codes), f"exit status {self.codes}\n{told}"
        return self


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def launch(world_size: int, command: list[str], folder: Path, limit: float = 240, grace: float = 60) -> Job:
    """Run `python command...` on each rank.

    Args:
        world_size: How many processes.
        command: Arguments of python.
        folder: Where the output goes.
        limit: Seconds for all of it.
        grace: Seconds for the others once one rank has ended with an error.
    """
    environment = os.environ | {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(world_size),
        "NODE_RANK": "0",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS / "distributed"), os.environ.get("PYTHONPATH", "")]),
    }
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"rank{rank}.log" for rank in range(world_size)]
    processes = []
    for rank, file in enumerate(files):
        with file.open("w") as stream:
            processes.append(
                subprocess.Popen(
                    [sys.executable, *command],
                    env=environment | {"LOCAL_RANK": str(rank)},
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                )
            )
    deadline = time.monotonic() + limit
    try:
        while any(process.poll() is None for process in processes):
            if any(process.poll() for process in processes):
                deadline = min(deadline, time.monotonic() + grace)
                grace = limit
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
    return Job([process.returncode for process in processes], [file.read_text() for file in files])
