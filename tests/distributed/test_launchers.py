"""Whoever starts the processes: the command itself (test_commands.py), torchrun, or srun, one per task."""

import sys

import pytest
from commands import finish, fit_arguments, run
from launcher import free_port

from dprc_lightning.report import read_report


def check(folder, outputs):
    report = read_report(folder / "runs" / "toy" / "version_0")
    assert (report["world_size"], report["steps"], report["status"]) == (2, 4, "finished")
    said = "".join(outputs)
    assert said.count("Private run in") == said.count("epsilon at delta") == 1, "rank 0 alone speaks"
    assert [path.name for path in (folder / "runs" / "toy").iterdir()] == ["version_0"]


@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "deepspeed_stage_2"])
def test_torchrun(tmp_path, engine):
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        str(free_port()),
    ]
    process = run([*command, *fit_arguments(tmp_path, engine=engine)])
    said = finish(process)
    assert process.returncode == 0, said
    check(tmp_path, [said])


@pytest.mark.parametrize("engine", ["fsdp2", "deepspeed_stage_3"])
def test_srun(tmp_path, engine):
    """What srun sets for each of two tasks on one node; the tests with a Slurm of their own are elsewhere."""
    shared = {
        "SLURM_JOB_ID": "1001",
        "SLURM_JOB_NAME": "train",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_NNODES": "1",
        "SLURM_NODELIST": "localhost",
        "SLURM_NODEID": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    arguments = fit_arguments(tmp_path, engine=engine)
    tasks = [run([sys.executable, *arguments], SLURM_PROCID=rank, SLURM_LOCALID=rank, **shared) for rank in ("0", "1")]
    outputs = [finish(task) for task in tasks]
    assert [task.returncode for task in tasks] == [0, 0], "\n".join(outputs)
    check(tmp_path, outputs)
