"""The `dprc` command as a user types it."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dprc_lightning.accounting import Ledger
from dprc_lightning.cli import main
from dprc_lightning.report import read_report

MECHANISM = ["--delta", "1e-5", "--sample_rate", "0.05224", "--steps", "208", "--sketch_dim", "32"]


def test_light_commands_import_no_torch():
    code = (
        "import sys; from dprc_lightning.cli import main\n"
        f"main(['calibrate', '--epsilon', '0.7', *{MECHANISM!r}, '--format', 'json'])\n"
        "assert not {'torch', 'lightning', 'transformers'} & set(sys.modules), 'heavy'"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    # The paper's envelope needs 4.354 here (arXiv 2605.24879), the convex order 4.215.
    assert json.loads(done.stdout)["noise_multiplier"] == pytest.approx(4.215, rel=3e-3)


def test_epsilon(capsys):
    assert main(["epsilon", "--noise_multiplier", "4.35", *MECHANISM, "--bound", "envelope", "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)["epsilon"]
    assert found["lower"] <= found["estimate"] <= found["upper"] == pytest.approx(0.7001, rel=1e-3)


def test_the_table_names_everything(capsys):
    assert main(["epsilon", "--noise_multiplier", "4.35", *MECHANISM[:-2]]) == 0
    out = capsys.readouterr().out
    for part in ("epsilon lower", "epsilon upper", "sample_rate", "exact norms"):
        assert part in out


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["calibrate", "--epsilon", "-1", *MECHANISM], "epsilon=-1"),
        (["calibrate", "--epsilon", "1", *MECHANISM, "--projection", "rademacher"], "projection='rademacher'"),
        (["epsilon", "--noise_multiplier", "nan", *MECHANISM], "noise_multiplier=nan"),
        (["epsilon", "--noise_multiplier", "1", *MECHANISM, "--sample_rate", "1.5"], "sample_rate=1.5"),
        (["report", "/nowhere"], "/nowhere/report.json: not found"),
        (["bench", "step", "--rounds", "0"], "--rounds=0"),
    ],
)
def test_errors_are_one_line(arguments, name, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("dprc: error: ") and name in error and error.count("\n") == 1


def test_without_a_command_it_explains_itself(capsys):
    assert main([]) == 2
    assert "dprc fit --config" in capsys.readouterr().out


def test_bench_step(capsys):
    assert main(["bench", "step", "--tokens", "16", "--records", "2", "--rounds", "1", "--format", "json"]) == 0
    rows = {row["step"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    assert set(rows) == {"non-private", "exact", "hutchinson k=32"}
    assert 4 / 3 < rows["hutchinson k=32"]["flops_ratio"] < 1.45


TOY = """
seed_everything: 0
privacy: {{noise_multiplier: 1.0, delta: 1.0e-3, sample_rate: 0.25, steps: 4, max_grad_norm: 0.5, estimator: exact}}
performance: {{physical_batch_size: 3}}
model: {{class_path: toy.ToyModule}}
data: {{class_path: toy.ToyData}}
test_after_fit: true
trainer:
  accelerator: cpu
  enable_model_summary: false
  enable_progress_bar: false
  num_sanity_val_steps: 0
  logger:
    class_path: lightning.pytorch.loggers.TensorBoardLogger
    init_args: {{save_dir: {folder}, name: toy, version: ""}}
"""


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "toy.yaml"
    path.write_text(TOY.format(folder=tmp_path / "runs"))
    return str(path)


@pytest.mark.filterwarnings("ignore")
class TestLightningCommands:
    def test_fit_then_validate_and_test(self, config, tmp_path, capsys):
        run = tmp_path / "runs" / "toy"
        assert main(["fit", "--config", config, "--privacy.noise_multiplier", "2.5"]) == 0
        report = read_report(run)
        assert report["mechanism"]["noise_multiplier"] == 2.5 and report["steps"] == 4
        assert "test/accuracy" in report["metrics"]
        assert (run / "config.yaml").exists() and list(run.glob("events.out.tfevents.*"))
        assert Path(report["paths"]["checkpoint"]).exists()
        checkpoint = report["paths"]["checkpoint"]
        before = (run / "ledger.jsonl").read_bytes()
        # On another machine, with the report's figures gone, the same weights give the same figures.
        for command in ("validate", "test"):
            assert main([command, "--config", config, "--ckpt_path", checkpoint]) == 0
        again = read_report(run)
        assert again["metrics"]["test/accuracy"] == pytest.approx(report["metrics"]["test/accuracy"])
        assert "val/accuracy" in again["metrics"]
        assert (run / "ledger.jsonl").read_bytes() == before, "evaluation spends nothing"
        capsys.readouterr()
        assert main(["report", str(run), "--compare", str(run)]) == 0
        assert capsys.readouterr().out.count("| toy (") == 2
        assert main(["report", str(run), "--format", "json"]) == 0
        assert json.loads(capsys.readouterr().out)["epsilon"] == report["epsilon"]

    def test_a_second_fit_in_the_same_folder(self, config, tmp_path, capsys):
        assert main(["fit", "--config", config]) == 0
        capsys.readouterr()
        assert main(["fit", "--config", config]) == 2
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert error.startswith("dprc: error: ") and "choose another" in error
        assert Ledger.open(tmp_path / "runs" / "toy", read_only=True).steps == 4

    def test_contradictions_in_the_words_of_the_command_line(self, config, tmp_path, capsys):
        assert main(["fit", "--config", config, "--privacy.epsilon", "3", "--privacy.delta", "0.9"]) == 2
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert "privacy.epsilon or privacy.noise_multiplier: both are set" in error and "privacy.delta=0.9" in error
        assert not (tmp_path / "runs" / "toy" / "ledger.jsonl").exists()

    def test_an_unprotected_strategy(self, config, capsys):
        assert main(["fit", "--config", config, "--trainer.strategy", "auto"]) == 2
        assert "--trainer.strategy dprc_single" in capsys.readouterr().err

    def test_ctrl_c_in_the_middle(self, config, tmp_path):
        """The report and the ledger tell what was done; nothing but the step under way is lost."""
        run = tmp_path / "runs" / "toy"
        program = "import signal, sys, toy, time; from dprc_lightning.cli import main\n"
        # A shell gives its background jobs an ignored SIGINT, and what runs the tests may be one.
        program += "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        program += "step = toy.ToyModule.training_step\n"
        program += "def slow(self, batch, i): step(self, batch, i); print('stepped', flush=True); time.sleep(0.5)\n"
        program += "toy.ToyModule.training_step = slow; sys.exit(main())"
        arguments = ["fit", "--config", config, "--privacy.steps", "200", "--privacy.noise_multiplier", "4"]
        child = subprocess.Popen(
            [sys.executable, "-c", program, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parent,
        )
        assert child.stdout is not None
        for line in child.stdout:
            if line.startswith("stepped"):
                break
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=120)
        assert child.returncode != 0, errors
        report = read_report(run)
        assert report["status"] == "stopped by KeyboardInterrupt"
        with Ledger.open(run) as ledger:  # the lock is free
            assert 1 <= ledger.steps == report["steps"] < 200
        assert report["epsilon"]["upper"] > 0
