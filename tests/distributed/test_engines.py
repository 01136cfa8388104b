"""Every engine on two to four gloo processes, against one process that clips by hand.

`make test-gpu` runs the same over nccl, each engine on as many of its processes as there are devices.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from cells import CELLS, CLIP, EXPECTED, LM, RATE, by_hand
from filelock import FileLock
from launcher import launch
from scipy import stats
from toy import share_secret
from worker import ON_GPUS, fit, noise_of

from dprc_lightning.accounting import Ledger
from dprc_lightning.report import read_report
from dprc_lightning.run import PrivateRun
from dprc_lightning.strategies import PrivateSingleDeviceStrategy

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(900)]
WORKER = str(Path(__file__).with_name("worker.py"))

_RESUMED = [name for name, cell in CELLS.items() if cell.stop is not None]
_UNREACHED = "parameters_that_few_records_use"
_ZERO = [name for name in CELLS if name != _UNREACHED]
# Refused there.
_ZERO3 = [name for name in _ZERO if name != "chunked_mlp"]
JOBS = {
    "ddp-2": list(CELLS),
    "ddp-3": list(CELLS),
    "fsdp2-2": list(CELLS),
    "fsdp2-4": [name for name in CELLS if name not in _RESUMED],
    "fsdp2_sharded-2": _RESUMED,
    "hsdp-4": ["plain", "uneven_ranks", "all_empty", "odd_sizes", "noise", "test_noise"],
    "fsdp2_offload-2": ["plain", "noise", "resumed_adam"],
    "zero2_offload-2": ["plain", "noise", "resumed_adam"],
    "zero3_offload-2": ["plain", "noise", "resumed_adam"],
    "fsdp-2": [name for name in CELLS if name not in (*_RESUMED, _UNREACHED)],
    "zero1-2": _ZERO,
    "zero2-2": _ZERO,
    "zero3-2": _ZERO3,
    "zero3-4": [name for name in _ZERO3 if name not in _RESUMED],
}


def on_gpus(jobs, devices):
    """The jobs as they can be run there, and none twice."""
    fitted = {}
    for job, names in jobs.items():
        engine, world_size = job.rsplit("-", 1)
        ranks = min(int(world_size), devices)
        # Two copies, each of a device at least.
        ranks -= ranks % 2 if engine == "hsdp" else 0
        # FSDP1 refuses to run alone.
        if ranks > (engine == "fsdp"):
            known = fitted.get(f"{engine}-{ranks}", [])
            fitted[f"{engine}-{ranks}"] = [*known, *(name for name in names if name not in known)]
    return fitted


if ON_GPUS:
    JOBS = on_gpus(JOBS, torch.cuda.device_count())
ALL = [(job, name) for job, names in JOBS.items() for name in names]


def those(wanted):
    return [(job, name) for job, name in ALL if wanted(job, CELLS[name])]


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory, worker_id):
    """Where a job's ranks leave their results. All cells in one launch, and each launch once for all test workers."""
    base = tmp_path_factory.getbasetemp()
    base = base if worker_id == "master" else base.parent

    def folder(job: str) -> Path:
        engine, world_size = job.rsplit("-", 1)
        place = base / f"engine-{job}"
        with FileLock(f"{place}.lock"):
            if not (place / "done").exists():
                command = [WORKER, engine, str(place), world_size, *JOBS[job]]
                launch(int(world_size), command, place / "logs", limit=800).check()
                (place / "done").touch()
        return place

    return folder


def results(place: Path, name: str):
    return [torch.load(file) for file in sorted((place / name).glob("rank*.pt"))]


def largest_difference(a, b):
    return max(float((a[key].double() - b[key].double()).abs().max()) for key in b)


@pytest.mark.parametrize(("job", "name"), ALL)
def test_all_ranks_have_the_same_parameters(folder_of, job, name):
    first, *others = (result["state"] for result in results(folder_of(job), name))
    assert len(others) == int(job.rsplit("-", 1)[1]) - 1
    for other in others:
        assert all(torch.equal(first[key], other[key]) for key in first)


@pytest.mark.parametrize(("job", "name"), those(lambda job, cell: cell.reference == "brute"))
def test_parameters_equal_clipping_by_hand(folder_of, job, name):
    start, expected = LM(CELLS[name]).net.state_dict(), by_hand(CELLS[name])
    assert largest_difference(start, expected) > 1e-3, "the steps must move something"
    for result in results(folder_of(job), name):
        assert largest_difference(result["state"], expected) < CELLS[name].bound


@pytest.mark.parametrize(
    ("job", "name"),
    # A shard's noise is its own: only where there is none, or every rank has all of it, one process has the same.
    those(lambda job, cell: cell.reference == "single" and (cell.noise == "none" or job.startswith("ddp"))),
)
def test_parameters_equal_one_process_with_the_same_secret(folder_of, job, name, tmp_path, monkeypatch):
    place = folder_of(job)
    monkeypatch.setattr(PrivateRun, "sampler", PrivateRun.sampler)
    share_secret(monkeypatch, place / name)
    module = fit(name, tmp_path, PrivateSingleDeviceStrategy(noise_stream=noise_of(name)))
    for result in results(place, name):
        assert largest_difference(result["state"], module.net.state_dict()) < 1e-6


@pytest.mark.parametrize(("job", "name"), those(lambda job, cell: cell.stop is not None))
def test_a_resumed_run_equals_one_that_was_not_stopped(folder_of, job, name):
    for result in results(folder_of(job), name):
        assert largest_difference(result["straight"], LM(CELLS[name]).net.state_dict()) > 1e-2
        assert all(torch.equal(result["state"][key], value) for key, value in result["straight"].items())


@pytest.mark.parametrize("job", [job for job in JOBS if job.startswith("ddp")])
def test_gradients_are_reduced_in_the_last_micro_batch_alone(folder_of, job):
    world_size = int(job.rsplit("-", 1)[1])
    batches, physical = CELLS["three_micro_batches"].batches, CELLS["three_micro_batches"].physical
    counts = [-(-len(range(0, len(batch), world_size)) // physical) for batch in batches]
    for result in results(folder_of(job), "three_micro_batches"):
        # One more for check_isolation, which reduces nothing either.
        assert result["silent"] == sum(count - 1 for count in counts) + 1


@pytest.mark.parametrize("job", [job for job, name in ALL if name == "noise"])
def test_noise_is_one_draw_per_element(folder_of, job):
    """Normal with the right deviation, and no value twice: not across shards, nor across ranks that hold others."""
    start = LM(CELLS["noise"]).net.state_dict()["rows.weight"]
    moved = (results(folder_of(job), "noise")[0]["state"]["rows.weight"] - start).flatten().double().numpy()
    std = RATE * CLIP / EXPECTED
    assert abs(moved.std() / std - 1) < 5 / np.sqrt(2 * len(moved))
    assert stats.kstest(moved / std, "norm").pvalue > 1e-4
    assert len(np.unique(moved)) > 0.99 * len(moved)
    # Of two shards, one after the other: what they share would show as a correlation.
    halves = moved[: len(moved) // 2], moved[len(moved) // 2 : len(moved) // 2 * 2]
    assert abs(np.corrcoef(*halves)[0, 1]) < 5 / np.sqrt(len(halves[0]))


def test_each_engine_runs_on_whatever_devices_there_are():
    assert set(on_gpus(JOBS, 4)) == set(JOBS) or ON_GPUS
    one = on_gpus(JOBS, 1)
    assert "fsdp2-1" in one and "zero3-1" in one and not any("hsdp" in job for job in one)
    assert set(one["fsdp2-1"]) == set(JOBS.get("fsdp2-2", CELLS))


@pytest.mark.parametrize(("job", "name"), ALL)
def test_rank_zero_alone_keeps_the_books(folder_of, job, name):
    place = folder_of(job)
    with Ledger.open(place / name) as ledger:
        assert ledger.steps == ledger.next_sequence == len(CELLS[name].batches)
    report = read_report(place / name)
    assert report["steps"] == len(CELLS[name].batches) and report["private"] == (CELLS[name].noise == "real")
