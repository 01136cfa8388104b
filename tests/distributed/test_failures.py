"""What goes wrong on one rank ends all of them, soon, and the ledger is right."""

from pathlib import Path

import pytest
import torch
from launcher import launch

from dprc_lightning.accounting import Ledger

WORKER = str(Path(__file__).with_name("failing_worker.py"))


def run(what, folder):
    return launch(2, [WORKER, what, str(folder), "2"], folder / "logs", limit=200, grace=60)


def test_a_bad_record_on_one_rank(tmp_path):
    job = run("nonfinite", tmp_path)
    assert 0 not in job.codes and job.codes[1] == 2
    assert "NonFiniteRecordError" in job.outputs[1]
    # Rank 0 may have died of the lost connection without a word; its ledger has the step.
    assert Ledger.open(tmp_path, read_only=True).steps == 1


def test_a_bad_record_that_is_dropped(tmp_path):
    run("drop", tmp_path).check()
    states = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(2)]
    assert all(torch.equal(states[0][key], states[1][key]) and states[0][key].isfinite().all() for key in states[0])


def test_a_folder_in_use_stops_every_rank(tmp_path):
    (tmp_path / "ledger.jsonl").write_text("not mine")
    job = run("plain", tmp_path)
    assert job.codes == [2, 2]
    assert "ConfigurationError: run folder" in job.outputs[0] and "choose another" in job.outputs[0]
    assert "RankZeroError" in job.outputs[1] and "choose another" in job.outputs[1]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("unfreezes", "frozen or unfrozen after fit began"),
        ("bfloat16", "trainer.precision=bf16-true"),
        ("another_batch", "every rank at the same step"),
        ("another_rate", "the ranks have different optimizers"),
        ("another_order", "the ranks have different records"),
        ("another_estimator", "the ranks have different privacy settings"),
    ],
)
def test_what_the_engine_cannot_do_is_refused_on_every_rank(tmp_path, what, message):
    job = run(what, tmp_path)
    assert job.codes == [2, 2] and all(message in text for text in job.outputs), job.outputs
