"""What goes wrong on one rank ends all of them, soon, and the ledger is right; under every engine."""

import re
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from launcher import Job, launch

from dprc_lightning.accounting import Ledger

pytestmark = pytest.mark.timeout(600)
WORKER = str(Path(__file__).with_name("failing_worker.py"))

# What every rank is told, as a pattern.
WORDS = {
    "bfloat16": "trainer.precision=bf16-true",
    "another_rate": "the ranks have different optimizers",
    "another_order": "the ranks have different records",
    "another_estimator": "the ranks have different privacy settings",
    "another_batch": "every rank at the same step",
    "unfreezes": "frozen or unfrozen after fit began|became trainable after attach",
    "hidden": "in which it finds them",
    "unused_zero": "privacy.unused=zero: ZeRO reduces gradients in the order",
}
EVERYWHERE = ["bfloat16", "another_rate", "another_order", "another_estimator", "another_batch", "unfreezes"]
ENGINES = {
    "ddp": [*EVERYWHERE],
    "fsdp2": [*EVERYWHERE, "hidden"],
    "zero2": [*EVERYWHERE, "unused_zero"],
    "zero3": ["another_rate", "unfreezes", "unused_zero"],
}


def run(engine: str, folder: Path, *everything: str) -> Job:
    return launch(2, [WORKER, engine, str(folder), "2", *everything], folder / "logs", limit=300, grace=60)


@pytest.fixture(scope="session")
def refusals(tmp_path_factory, worker_id):
    """All that an engine refuses on every rank, in one launch of it, for all test workers."""
    base = tmp_path_factory.getbasetemp()
    base = base if worker_id == "master" else base.parent

    def folder(engine: str) -> Path:
        place = base / f"refusals-{engine}"
        with FileLock(f"{place}.lock"):
            if not (place / "done").exists():
                job = run(engine, place, *ENGINES[engine])
                assert job.codes == [2, 2], job.outputs
                (place / "done").touch()
        return place

    return folder


@pytest.mark.parametrize(("engine", "what"), [(engine, what) for engine, names in ENGINES.items() for what in names])
def test_what_the_engine_cannot_do_is_refused_on_every_rank(refusals, engine, what):
    place = refusals(engine) / what
    told = [(place / f"rank{rank}.txt").read_text() for rank in range(2)]
    assert all(re.search(WORDS[what], text) and "\n" not in text for text in told), told


@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "zero2", "zero3"])
def test_a_bad_record_on_one_rank(engine, tmp_path):
    job = run(engine, tmp_path, "nonfinite")
    assert 0 not in job.codes and job.codes[1] == 2, job
    assert (tmp_path / "nonfinite" / "rank1.txt").read_text().startswith("NonFiniteRecordError: ")
    # Rank 0 may have died of the lost connection without a word; its ledger has the step.
    assert Ledger.open(tmp_path / "nonfinite", read_only=True).steps == 1


@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "zero2", "zero3"])
def test_a_bad_record_that_is_dropped(engine, tmp_path):
    run(engine, tmp_path, "drop", "plain").check()
    states = [torch.load(tmp_path / "drop" / f"rank{rank}.pt") for rank in range(2)]
    assert all(torch.equal(states[0][key], states[1][key]) and states[0][key].isfinite().all() for key in states[0])
    # The others were summed, without it.
    plain = torch.load(tmp_path / "plain" / "rank0.pt")
    assert any(not torch.equal(plain[key], states[0][key]) for key in plain)


def test_a_folder_in_use_stops_every_rank(tmp_path):
    place = tmp_path / "plain"
    place.mkdir()
    (place / "ledger.jsonl").write_text("not mine")
    job = run("ddp", tmp_path, "plain")
    assert job.codes == [2, 2]
    told = [(place / f"rank{rank}.txt").read_text() for rank in range(2)]
    assert told[0].startswith("ConfigurationError: run folder") and "choose another" in told[0]
    assert told[1].startswith("RankZeroError") and "choose another" in told[1]
