"""Checkpoints of engines that shard: on other numbers of processes, tampered with, half written, exported."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from cells import Data
from checkpoint_worker import LAST, WAYS, Momentum, WithTest
from launcher import launch
from toy import ZeroNoise, share_secret, trainer
from transformers import AutoModelForCausalLM

from dprc_lightning.accounting import Ledger
from dprc_lightning.cli import main
from dprc_lightning.whole_checkpoint import load_whole

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]
WORKER = str(Path(__file__).with_name("checkpoint_worker.py"))
SHARDED = ["fsdp2_sharded", "zero2", "zero3"]


def run(action, folder, world_size, engines, **limits):
    command = [WORKER, action, str(folder), str(world_size), *engines]
    return launch(world_size, command, folder / f"logs-{action}-{world_size}", limit=400, **limits)


def largest_difference(a, b):
    assert a.keys() == b.keys()
    return max(float((a[key] - b[key]).abs().max()) for key in a)


def straight(folder, tmp_path, monkeypatch):
    """The same run in one process that is not stopped."""
    share_secret(monkeypatch, folder)
    module = Momentum()
    trainer(tmp_path, ZeroNoise()).fit(module, datamodule=Data())
    monkeypatch.undo()
    return module.net.state_dict()


def test_fsdp2_goes_on_with_any_number_of_processes(tmp_path, monkeypatch):
    names = [f"{engine}@{target}" for engine in ("fsdp2", "fsdp2_sharded") for target in (4, 1)]
    run("write", tmp_path, 2, [*names, "fsdp2@single"]).check()
    for target in (4, 1):
        run("resume", tmp_path, target, [name for name in names if name.endswith(f"@{target}")]).check()
    single, place = Momentum(), tmp_path / "fsdp2-to-single"
    trainer(place, ZeroNoise()).fit(single, datamodule=Data(), ckpt_path=place / LAST)
    torch.save(single.net.state_dict(), place / "resumed.pt")
    for name in [*names, "fsdp2@single"]:
        place = tmp_path / name.replace("@", "-to-")
        stopped, resumed = (torch.load(place / f"{what}.pt") for what in ("stopped", "resumed"))
        expected = straight(place, tmp_path / "straight" / name, monkeypatch)
        # Another batch, or a momentum that began anew, would move it by more than a hundredth.
        assert largest_difference(stopped, expected) > 1e-2
        assert largest_difference(resumed, expected) < 1e-6
        with Ledger.open(place) as ledger:
            assert ledger.steps == ledger.next_sequence == 4


def test_deepspeed_goes_on_with_as_many_processes_alone(tmp_path):
    """Fitting is refused before anything of it is loaded; its weights can be tested by any number."""
    engines = ["zero1", "zero2", "zero3"]
    run("write", tmp_path, 2, engines).check()
    ledgers = {engine: (tmp_path / engine / "ledger.jsonl").read_bytes() for engine in engines}
    run("resume", tmp_path, 1, engines).check()
    for engine in engines:
        place = tmp_path / engine
        said = torch.load(place / "refused.pt")
        assert said.startswith(f"CheckpointError: strategy dprc_deepspeed_stage_{engine[-1]}, ckpt_path={place / LAST}")
        assert "2 processes wrote it" in said and "set trainer.devices" in said and "\n" not in said
        assert (place / "ledger.jsonl").read_bytes() == ledgers[engine]
        module = Momentum()
        module.net.load_state_dict(torch.load(place / "stopped.pt"))
        (found,) = trainer(tmp_path, ZeroNoise()).test(module, datamodule=WithTest(), verbose=False)
        assert torch.load(place / "tested.pt") == pytest.approx(found["loss"], abs=1e-6)


@pytest.mark.parametrize("engine", SHARDED)
def test_what_the_run_did_not_write_is_not_unpickled(engine, tmp_path):
    run("tamper", tmp_path, 2, [engine]).check()
    place = tmp_path / engine
    found = json.loads((place / "found.json").read_text())
    path = place / "first" / "checkpoints"
    says = {
        "a_flipped_byte": "is damaged or was changed",
        "another_file": "extra_optim_states.pt is not of it",
        "code_in_a_file": "is damaged or was changed",
        "fit": "is damaged or was changed",
        "the_manifest_of_another_run": "secret did not sign it",
        "no_manifest": "has no manifest.json",
    }
    assert set(says) == {way.__name__ for way in WAYS} | {"fit"}
    for name, words in says.items():
        told = found[name]["told"]
        assert told.startswith(("CheckpointError", "RankZeroError")) and "\n" not in told
        assert words in told and str(path) in told, told
        assert not found[name]["ran"]
    assert "secret did not sign it" in found["copied"]["told"] and "--trust_checkpoint" in found["copied"]["told"]
    assert found["untouched"]["told"] == "loaded"
    # The code would have run, had it been loaded.
    assert found["trusted"] == {"told": "loaded", "ran": True}
    with Ledger.open(place / "first") as ledger:
        assert ledger.steps == 2


@pytest.mark.parametrize("engine", ["fsdp2_sharded", "zero2"])
def test_kill_9_in_the_middle_of_a_save_keeps_the_last_good_one(engine, tmp_path):
    job = run("kill", tmp_path, 2, [engine], grace=15)
    assert job.codes[1] == -9 and job.codes[0] != 0, job
    folder = tmp_path / engine / "checkpoints"
    assert [path.name for path in folder.glob("*.ckpt")] == ["same.ckpt"]
    content = load_whole(folder / "same.ckpt")
    assert content["global_step"] == 1
    assert Ledger.open(tmp_path / engine, read_only=True).steps == 2
    # A half-written one has no manifest, and the next save of the name takes it away.
    (left,) = folder.glob(".*")
    assert not (left / "manifest.json").exists()


@pytest.mark.parametrize("engine", ["fsdp2", *SHARDED])
def test_export_from_a_folder_of_shards(engine, tmp_path, capsys):
    run("export", tmp_path, 2, [engine]).check()
    place, out = tmp_path / engine, tmp_path / "out"
    assert main(["export", str(place), str(out)]) == 0, capsys.readouterr().err
    weights = torch.load(place / "weights.pt")
    assert largest_difference(AutoModelForCausalLM.from_pretrained(out).state_dict(), weights) == 0
    if engine == "fsdp2":
        return
    # A copied run is not the run: whoever made the copy could have made the files.
    copy = tmp_path / "copy"
    shutil.copytree(place, copy)
    capsys.readouterr()
    assert main(["export", str(copy), str(tmp_path / "from copy")]) == 2
    assert "--trust_checkpoint" in capsys.readouterr().err
    assert main(["export", str(copy), str(tmp_path / "from copy"), "--trust_checkpoint"]) == 0
