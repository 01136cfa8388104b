"""`dprc fit` on two devices, as a user starts it, with each engine's file: the command starts the other process."""

import os
import signal

import pytest
from commands import finish, start

from dprc_lightning.accounting import Ledger
from dprc_lightning.report import read_report


# Those of the other engines are in the test of signals.
@pytest.mark.parametrize("engine", ["ddp", "fsdp", "deepspeed_stage_1", "deepspeed_stage_2"])
def test_fit_and_test_on_two_devices(tmp_path, engine):
    process = start(tmp_path, engine=engine)
    said = finish(process)
    assert process.returncode == 0, said
    run = tmp_path / "runs" / "toy" / "version_0"
    report = read_report(run)
    assert (report["world_size"], report["steps"], report["status"]) == (2, 4, "finished")
    assert "test/accuracy" in report["metrics"]
    assert said.count("Private run in") == said.count("epsilon at delta") == 1, "rank 0 alone speaks"


def test_a_wrong_setting_is_told_once_and_nothing_is_started(tmp_path):
    process = start(tmp_path, "--trainer.gradient_clip_val", "1", "--privacy.delta", "0.5")
    said = finish(process)
    assert process.returncode == 2
    assert said.count("dprc: error:") == 1 and "privacy.delta=0.5" in said and "gradient_clip_val" in said
    assert not (tmp_path / "runs").exists()


def test_what_an_engine_refuses_is_told_once_and_nothing_is_started(tmp_path):
    told = tmp_path / "deepspeed.yaml"
    settings = "{zero_optimization: {stage: 2}, gradient_clipping: 1.0, optimizer: {type: Adam}}"
    told.write_text(f"trainer: {{strategy: {{init_args: {{config: {settings}}}}}}}")
    process = start(tmp_path, "--config", str(told), "--privacy.delta", "0.5", engine="deepspeed_stage_2")
    said = finish(process)
    assert process.returncode == 2
    assert said.count("dprc: error:") == said.count("gradient_clipping=1.0: ") == said.count("optimizer={") == 1, said
    assert "strategy dprc_deepspeed_stage_2, " in said and "privacy.delta=0.5" in said
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("engine", "number", "everyone"),
    [
        ("ddp", signal.SIGINT, True),
        ("ddp", signal.SIGTERM, False),
        ("fsdp2", signal.SIGINT, True),
        ("deepspeed_stage_3", signal.SIGINT, True),
    ],
)
def test_a_signal_stops_all_ranks_and_the_run_goes_on(tmp_path, engine, number, everyone):
    """A terminal sends Ctrl-C to all processes; `kill` reaches the first alone."""
    process = start(tmp_path, steps=300, engine=engine)
    for line in process.stdout:
        if line.startswith("Training "):
            break
    (os.killpg if everyone else os.kill)(process.pid, number)
    said = finish(process)
    assert process.returncode == 128 + number, said
    assert said.count("resume with --ckpt_path") == 1, said
    run = tmp_path / "runs" / "toy" / "version_0"
    report = read_report(run)
    assert report["status"] == f"stopped by {signal.Signals(number).name}"
    with Ledger.open(run) as ledger:
        done = ledger.steps
    assert 2 <= done == report["applied_steps"] < 300
    # The noise of the run is fixed by its 300 steps; three more will do here.
    checkpoint = run / "checkpoints" / "interrupted.ckpt"
    further = ["--ckpt_path", str(checkpoint), "--privacy.steps", str(done + 3)]
    process = start(tmp_path, *further, steps=300, engine=engine)
    said = finish(process)
    assert process.returncode == 0, said
    assert Ledger.open(run, read_only=True).steps == done + 3
    assert "test/accuracy" in read_report(run)["metrics"]
    assert sorted(path.name for path in (tmp_path / "runs" / "toy").iterdir()) == ["version_0"]


def test_rank_zero_has_all_the_time_it_needs_to_end(tmp_path):
    """Lightning ends all processes once one of the others has ended with a status of its own."""
    process = start(tmp_path, steps=300, model="SlowToEnd")
    for line in process.stdout:
        if line.startswith("Training "):
            break
    os.killpg(process.pid, signal.SIGINT)
    said = finish(process)
    assert process.returncode == 130 and said.count("resume with --ckpt_path") == 1, said
    assert read_report(tmp_path / "runs" / "toy" / "version_0")["status"] == "stopped by SIGINT"
