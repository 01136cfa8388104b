"""The examples run, learn, and keep the order that the guarantee rests on."""

import functools
import os
import re
import runpy
import shlex
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import torch

from dprc_lightning import PoissonBatchSampler
from dprc_lightning.accounting import Ledger, calibrate_noise_multiplier
from dprc_lightning.checkpoint import DurableCheckpointIO
from dprc_lightning.clipping import ClippingHandle
from dprc_lightning.errors import LedgerError
from dprc_lightning.report import read_report

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"


def lines(name: str) -> int:
    return len((EXAMPLES / name).read_text().splitlines())


def test_they_are_as_short_as_is_said():
    assert lines("custom_task/task.py") < 60
    assert lines("plain_torch.py") <= 100


# A model and data of one's own ---------------------------------------------------------------------------------------

README = (EXAMPLES / "custom_task" / "README.md").read_text()
COMMANDS = re.search(r"```bash\n(.*?)```", README, flags=re.DOTALL)[1].splitlines()


@pytest.mark.parametrize("command", COMMANDS, ids=["one device", "two processes"])
def test_the_custom_task_learns(command, tmp_path):
    program, *words = shlex.split(command)
    assert program == "dprc"
    done = subprocess.run(
        [Path(sys.executable).with_name("dprc"), *words, "--trainer.default_root_dir", tmp_path],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=250,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    report = read_report(tmp_path / "lightning_logs" / "version_0")
    assert report["steps"] == 20 and report["private"] and 1.95 < report["epsilon"]["upper"] <= 2.0
    assert report["metrics"]["val/accuracy"] > 0.55, "chance is .25"


# A loop of one's own -------------------------------------------------------------------------------------------------


calibrate = functools.cache(calibrate_noise_multiplier)


@pytest.fixture
def example(monkeypatch):
    """The script as a module, with few steps."""
    monkeypatch.syspath_prepend(str(ROOT))
    script = import_module("examples.plain_torch")
    monkeypatch.setattr(script, "STEPS", 13)
    monkeypatch.setattr(script, "CHECKPOINT_EVERY", 5)
    monkeypatch.setattr(script, "calibrate_noise_multiplier", calibrate)
    return script


class Crash(Exception):
    pass


def calls(monkeypatch, script, crash_at: int | None = None) -> list:
    """Everything that a step is made of, in order; the machine is switched off in the update of one of them."""
    seen: list = []

    def watch(owner, name):
        original = getattr(owner, name)

        def call(*arguments, **options):
            seen.append((name, next((a for a in arguments[1:2] if isinstance(a, int)), None)))
            if name == "step" and crash_at is not None and sum(n == "step" for n, _ in seen) == crash_at:
                raise Crash
            return original(*arguments, **options)

        monkeypatch.setattr(owner, name, call)

    watch(Ledger, "reserve")
    watch(PoissonBatchSampler, "batch")
    watch(ClippingHandle, "begin_step")
    watch(ClippingHandle, "clipped_backward")
    watch(script, "add_gaussian_noise")
    watch(torch.optim.Adam, "step")
    return seen


def test_the_script_learns_and_says_what_it_cost(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["plain_torch.py", str(tmp_path / "run")])
    runpy.run_path(str(EXAMPLES / "plain_torch.py"), run_name="__main__")
    first = capsys.readouterr().out
    assert 2.95 < float(re.search(r"epsilon at delta 1e-05: ([0-9.]+)", first)[1]) <= 3.0
    assert float(re.search(r"accuracy: ([0-9.]+)", first)[1]) > 0.6, "chance is .25"
    assert Ledger.open(tmp_path / "run", read_only=True).steps == 60
    before = (tmp_path / "run" / "checkpoints" / "last.ckpt").read_bytes()
    runpy.run_path(str(EXAMPLES / "plain_torch.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert "60 of 60 steps are spent, 60 of them are in the weights" in said and "give another folder" in said
    assert said.splitlines()[-3:] == first.splitlines()[-3:]
    assert (tmp_path / "run" / "checkpoints" / "last.ckpt").read_bytes() == before


def test_each_step_keeps_the_order_of_the_guarantee(example, tmp_path, monkeypatch):
    seen = calls(monkeypatch, example)
    example.main(tmp_path)
    text = " ".join(name for name, _ in seen)
    step = "reserve batch begin_step( clipped_backward)* add_gaussian_noise step"
    assert re.fullmatch(f"({step} ){{12}}{step}", text), text
    assert text.count("clipped_backward") > 2 * 13, "several micro-batches share one projection and one noise"
    numbers = {name: [number for n, number in seen if n == name] for name in ("batch", "begin_step")}
    assert numbers["batch"] == numbers["begin_step"] == list(range(13))


@pytest.mark.parametrize(("crash_at", "kept"), [(8, 5), (3, 0)])
def test_after_a_crash_it_goes_on_and_draws_no_batch_twice(example, tmp_path, monkeypatch, capsys, crash_at, kept):
    with monkeypatch.context() as patch:
        before = calls(patch, example, crash_at)
        with pytest.raises(Crash):
            example.main(tmp_path)
    capsys.readouterr()
    with monkeypatch.context() as patch:
        after = calls(patch, example)
        example.main(tmp_path)
    assert f"{crash_at} of 13 steps are spent, {kept} of them are in the weights" in capsys.readouterr().out
    drawn = [number for name, number in before + after if name == "batch"]
    assert drawn == list(range(13))
    assert Ledger.open(tmp_path, read_only=True).steps == 13
    saved = DurableCheckpointIO().load_checkpoint(tmp_path / "checkpoints" / "last.ckpt")
    assert saved["steps"] == 13 - crash_at + kept


def test_a_resumed_loop_has_the_weights_of_one_that_was_not_interrupted(example, tmp_path, monkeypatch):
    """Without noise, and with one secret: what is left of a difference would be a state that is not restored."""
    monkeypatch.setattr(example, "add_gaussian_noise", lambda *_: None)
    example.main(tmp_path / "whole")
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "secret.key").write_bytes((tmp_path / "whole" / "secret.key").read_bytes())
    (tmp_path / "parts" / "secret.key").chmod(0o600)
    with monkeypatch.context() as patch:
        # The machine is switched off right after the checkpoint of step 5: the ledger is where the checkpoint is.
        save = DurableCheckpointIO.save_checkpoint
        patch.setattr(DurableCheckpointIO, "save_checkpoint", _then_crash(save))
        with pytest.raises(Crash):
            example.main(tmp_path / "parts")
    example.main(tmp_path / "parts")
    whole, parts = (
        DurableCheckpointIO().load_checkpoint(tmp_path / name / "checkpoints" / "last.ckpt")
        for name in ("whole", "parts")
    )
    assert whole["steps"] == parts["steps"] == 13
    assert all(torch.equal(whole["model"][name], parts["model"][name]) for name in whole["model"])


def _then_crash(save):
    def call(*arguments):
        save(*arguments)
        raise Crash

    return call


def test_a_folder_that_does_not_fit_is_refused(example, tmp_path, monkeypatch):
    example.main(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(example, "EPSILON", 2.0)
        with pytest.raises(SystemExit, match="other settings.*give another folder"):
            example.main(tmp_path)
    (tmp_path / "ledger.jsonl").rename(tmp_path / "aside")
    with pytest.raises(LedgerError, match=r"ledger\.jsonl is missing: restore it"):
        example.main(tmp_path)
