"""Every command and every example of the README runs."""

import contextlib
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from dprc_lightning.report import read_report

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
FENCE = re.compile(r"^```(bash|python)\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)
BLOCKS = FENCE.findall(README)
COMMANDS = [line for kind, block in BLOCKS if kind == "bash" for line in block.splitlines() if line.strip()]
PAGES = sorted((ROOT / "docs").glob("*.md"))
EXAMPLES = [
    block
    for page in (ROOT / "README.md", *PAGES)
    for kind, block in FENCE.findall(page.read_text())
    if kind == "python"
]

# Two steps on few articles, elsewhere: what is tested is that the command works, not what it learns.
SHORT = "--privacy.steps 2 --privacy.expected_batch_size 8 --data.init_args.sizes [160,16,16]"


def test_the_readme_has_what_is_tested_here():
    assert COMMANDS[:2] == ["make quickstart", "make test"]
    assert {line.split()[1] for line in COMMANDS if line.startswith("dprc")} == {
        "--help", "calibrate", "epsilon", "plan", "fit", "validate", "report", "export", "bench",
    }  # fmt: skip
    assert len(EXAMPLES) == 4


@pytest.mark.parametrize("target", ["quickstart", "test", "test-gpu", "lint", "bench", "figures", "clean"])
def test_make_targets_exist(target):
    """CI runs `make lint`, `make test` and `make quickstart` for real, in a fresh environment."""
    done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr


def run(command: str, cwd: Path = ROOT) -> str:
    words = shlex.split(command)
    assert words[0] == "dprc"
    done = subprocess.run(
        # Not -c: with several devices Lightning starts the same command again.
        [sys.executable, "-m", "dprc_lightning.cli", *words[1:]],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=400,
        env=os.environ | {"COLUMNS": "120", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


# CI runs the make targets for real; what needs a run is below.
NEEDS_MORE = ("dprc fit", "dprc plan")
LIGHT = [c for c in COMMANDS if c.startswith("dprc") and "RUN" not in c and not c.startswith(NEEDS_MORE)]
PLANS = [c for c in COMMANDS if c.startswith("dprc plan")]


@pytest.mark.parametrize("command", LIGHT)
def test_light_commands(command):
    if "bench" in command:
        short = {
            "--tokens 512 --rounds 5": "--tokens 16 --rounds 1",
            "--devices 2 --tokens 64": "--devices 1 --tokens 16 --rounds 1",
            "--elements 4194304": "--elements 1000 --rounds 1",
            "--steps 1000": "--steps 50",
            "--tokens 131072": "--tokens 4096",
            "--sketch_dim 32 4096": "--sketch_dim 32 --rows 512 --other 64 --tokens 32",
        }
        given = next(words for words in short if words in command)
        command = command.replace(given, short[given])
    assert run(command)


def test_a_plan_for_a_folder_with_a_configuration():
    """Llama-3.2-1B by its numbers, with one of the rows."""
    (command,) = [c for c in PLANS if "--model" in c and "--memory" not in c]
    out = run(f"{command} --sketch_dim 64")
    # As the README shows them.
    for line in out.splitlines():
        if line.split()[:1] in (["64"], ["exact"]):
            assert re.sub(" +", " ", line.strip()) in re.sub(" +", " ", README)


def test_a_plan_of_memory():
    (command,) = [c for c in PLANS if "--memory" in c]
    assert "pick: nothing needs to be set" in run(command.replace("--tokens 32768", "--tokens 1024"))


@pytest.mark.data
def test_a_plan_for_the_quickstart():
    (command,) = [c for c in PLANS if "--config" in c]
    assert "pick: " in run(f"{command} --sketch_dim 64")


@pytest.mark.data
def test_commands_on_the_articles(tmp_path):
    fits = [c for c in COMMANDS if c.startswith("dprc fit") and "RUN" not in c]
    assert len(fits) == 4
    runs, places = [], []
    for i, command in enumerate(fits):
        places.append(f"--trainer.logger.init_args.save_dir {tmp_path / str(i)} --trainer.logger.init_args.version=")
        run(f"{command} {SHORT} {places[-1]}")
        (folder,) = [path.parent for path in (tmp_path / str(i)).rglob("report.json")]
        runs.append(folder)
    assert [read_report(folder)["private"] for folder in runs] == [True, False, True, True]
    assert [read_report(folder)["world_size"] for folder in runs] == [1, 1, 1, 2]
    (checkpoint,) = runs[0].rglob("*.ckpt")
    (validate,) = [c for c in COMMANDS if c.startswith("dprc validate")]
    run(
        validate.replace("RUN/checkpoints/epoch=1-step=13.ckpt", str(checkpoint))
        + " --data.init_args.sizes [160,16,16]"
    )
    assert "val/accuracy" in read_report(runs[0])["metrics"]
    compare, page = [c for c in COMMANDS if c.startswith("dprc report")]
    out = run(compare.replace("RUN", str(runs[0]), 1).replace("RUN", str(runs[1])))
    assert "not private" in out and "always the majority class" in out
    assert run(page.replace("RUN", str(runs[0]))).lstrip().lower().startswith("<!doctype html>")
    (resume,) = [c for c in COMMANDS if c.startswith("dprc fit") and "RUN" in c]
    more = SHORT.replace("--privacy.steps 2", "--privacy.steps 3")
    run(f"{resume.replace('RUN/checkpoints/interrupted.ckpt', str(checkpoint))} {more} {places[0]}")
    assert read_report(runs[0])["steps"] == 3
    (export,) = [c for c in COMMANDS if c.startswith("dprc export")]
    run(export.replace("RUN exported", f"{runs[0]} {tmp_path / 'exported'}"))
    assert (tmp_path / "exported" / "README.md").exists()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("example", EXAMPLES, ids=["own_module", "own_loop", "long_context", "own_rule"])
def test_examples(example, tmp_path, capsys):
    with contextlib.chdir(tmp_path):
        exec(compile(example, "README.md", "exec"), {"__name__": "__main__"})
    said = capsys.readouterr().out
    if "class Regression" in example:
        report = read_report(tmp_path / "my_run")
        assert report["steps"] == 40 and 3.9 < report["epsilon"]["upper"] <= 4.0
    elif "causal_lm_losses" in example:
        assert len(re.findall(r"tensor\(\[", said)) == 2
    elif "register_rule" in example:
        assert re.search(r"tensor\(\[[0-9., ]+\]\)", said)
    else:
        upper = float(re.search(r"upper=([0-9.]+)", said)[1])
        assert 3.9 < upper <= 4.0
