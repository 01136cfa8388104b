"""DDP on two and three gloo processes against one process that clips by hand."""

from pathlib import Path

import numpy as np
import pytest
import torch
from cells import CELLS, CLIP, EXPECTED, LM, RATE, by_hand
from launcher import launch
from scipy import stats
from toy import share_secret
from worker import fit, noise_of

from dprc_lightning.accounting import Ledger
from dprc_lightning.report import read_report
from dprc_lightning.run import PrivateRun
from dprc_lightning.strategies import PrivateSingleDeviceStrategy

pytestmark = pytest.mark.filterwarnings("ignore")
WORKER = str(Path(__file__).with_name("worker.py"))


@pytest.fixture(scope="module", params=[2, 3], ids=["two", "three"])
def job(request, tmp_path_factory):
    """All cells in one launch."""
    folder = tmp_path_factory.mktemp(f"ddp{request.param}")
    launch(request.param, [WORKER, "ddp", str(folder), str(request.param), *CELLS], folder / "logs", limit=400).check()
    return request.param, folder


def states(job, name):
    world_size, folder = job
    return [torch.load(folder / name / f"rank{rank}.pt")["state"] for rank in range(world_size)]


def largest_difference(a, b):
    return max(float((a[key].double() - b[key].double()).abs().max()) for key in b)


@pytest.mark.parametrize("name", CELLS)
def test_replicas_are_equal(job, name):
    first, *others = states(job, name)
    for other in others:
        assert all(torch.equal(first[key], other[key]) for key in first)


@pytest.mark.parametrize("name", [n for n, c in CELLS.items() if c.reference == "brute"])
def test_parameters_equal_clipping_by_hand(job, name):
    start, expected = LM(CELLS[name]).net.state_dict(), by_hand(CELLS[name])
    assert largest_difference(start, expected) > 1e-3, "the steps must move something"
    for state in states(job, name):
        assert largest_difference(state, expected) < 1e-6


@pytest.mark.parametrize("name", [n for n, c in CELLS.items() if c.reference == "single"])
def test_parameters_equal_one_process_with_the_same_secret(job, name, tmp_path, monkeypatch):
    monkeypatch.setattr(PrivateRun, "sampler", PrivateRun.sampler)
    share_secret(monkeypatch, job[1] / name)
    module = fit(name, tmp_path, PrivateSingleDeviceStrategy(noise_stream=noise_of(name)))
    for state in states(job, name):
        assert largest_difference(state, module.net.state_dict()) < 1e-6


def test_gradients_are_reduced_in_the_last_micro_batch_alone(job):
    world_size, folder = job
    batches, physical = CELLS["three_micro_batches"].batches, CELLS["three_micro_batches"].physical
    counts = [-(-len(range(rank, len(batch), world_size)) // physical) for batch in batches for rank in [0]]
    for rank in range(world_size):
        found = torch.load(folder / "three_micro_batches" / f"rank{rank}.pt")["silent"]
        # One more for check_isolation, which reduces nothing either.
        assert found == sum(count - 1 for count in counts) + 1


def test_noise_is_one_draw_per_element(job):
    start = LM(CELLS["noise"]).net.state_dict()["weight"]
    moved = (states(job, "noise")[0]["weight"] - start).flatten().double().numpy()
    std = RATE * CLIP / EXPECTED
    assert abs(moved.std() / std - 1) < 5 / np.sqrt(2 * len(moved))
    assert stats.kstest(moved / std, "norm").pvalue > 1e-4
    assert len(np.unique(moved)) > 0.99 * len(moved)


@pytest.mark.parametrize("name", CELLS)
def test_rank_zero_alone_keeps_the_books(job, name):
    steps = len(CELLS[name].batches)
    with Ledger.open(job[1] / name) as ledger:
        assert ledger.steps == ledger.next_sequence == steps
    report = read_report(job[1] / name)
    assert report["steps"] == steps and report["private"] == (CELLS[name].noise == "real")
