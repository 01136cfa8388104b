"""The `dprc` command as a user types it."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from jsonargparse import Namespace
from lightning.pytorch.accelerators import CUDAAccelerator, MPSAccelerator
from toy import ToyData, ToyModule

from dprc_lightning import PerformanceConfig, PrivacyConfig
from dprc_lightning.accounting import Ledger, calibrate_noise_multiplier
from dprc_lightning.cli import main
from dprc_lightning.errors import DatasetError, DPRCError
from dprc_lightning.lightning_cli import _resume_in_place
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


def test_calibrate_tells_all_three_numbers(capsys):
    target = ["calibrate", "--epsilon", "0.7", *MECHANISM]
    assert main([*target, "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    bounds = found["epsilon_bounds"]
    assert 0.69 < bounds["lower"] <= bounds["estimate"] <= bounds["upper"] <= found["epsilon"] == 0.7
    assert found["certified"] is True
    # The same numbers for who asks the other way round.
    assert main(["epsilon", "--noise_multiplier", str(found["noise_multiplier"]), *MECHANISM, "--format", "json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["epsilon"] == bounds and again["certified"] is True


def test_what_is_not_certified_says_so(capsys):
    arguments = ["epsilon", "--noise_multiplier", "6", *MECHANISM, "--projection", "rademacher", "--format", "json"]
    assert main(arguments) == 0
    assert json.loads(capsys.readouterr().out)["certified"] is False


def test_the_table_is_aligned_and_sorted(capsys):
    assert main(["epsilon", "--noise_multiplier", "4.35", *MECHANISM]) == 0
    lines = [re.split("  +", line) for line in capsys.readouterr().out.splitlines()]
    assert all(len(line) == 2 for line in lines)
    names = [name for name, _ in lines]
    assert names[:4] == ["epsilon lower", "epsilon estimate", "epsilon upper", "certified"]
    assert names[4:] == sorted(names[4:]) and "noise_multiplier" in names


def test_help_says_what_best_is(capsys):
    with pytest.raises(SystemExit):
        main(["calibrate", "--help"])
    assert "best: the smaller" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["calibrate", "--epsilon", "-1", *MECHANISM], "epsilon=-1"),
        (["calibrate", "--epsilon", "1", *MECHANISM, "--projection", "countsketch"], "projection='countsketch'"),
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


def test_a_misspelt_command_is_answered_with_all_there_are(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["fitt"])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert "'fitt'" in error and all(f"'{name}'" in error for name in ("fit", "validate", "calibrate", "report"))


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


class Failing(ToyModule):
    """Dies after some steps of each start."""

    def __init__(
        self, privacy: PrivacyConfig, performance: PerformanceConfig | None = None, fail_at: int | None = None
    ) -> None:
        super().__init__(privacy, performance)
        self.fail_at = fail_at


class WithoutItsPackage(ToyModule):
    def __init__(self, privacy: PrivacyConfig, performance: PerformanceConfig | None = None) -> None:
        import dprc_no_such_package  # noqa: F401


class WithoutItsFile(ToyData):
    def __init__(self) -> None:
        raise DatasetError("data.path=articles.jsonl: no such file")


class Buggy(ToyData):
    def __init__(self) -> None:
        int("three")


class Terminated(ToyModule):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)
        if len(self.sequences) == 1:
            os.kill(os.getpid(), signal.SIGTERM)


class Impatient(ToyModule):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)
        if len(self.sequences) == 2:
            raise KeyboardInterrupt


@pytest.fixture
def failing(tmp_path: Path) -> str:
    """Runs get a version_N each."""
    path = tmp_path / "failing.yaml"
    text = TOY.format(folder=tmp_path / "runs").replace(', version: ""', "").replace("steps: 4", "steps: 8")
    path.write_text(text.replace("class_path: toy.ToyModule", "class_path: test_cli.Failing"))
    return str(path)


def only_line(capsys: pytest.CaptureFixture[str]) -> str:
    error = capsys.readouterr().err
    assert error.startswith("dprc: error: ") and error.count("\n") == 1, error
    return error


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

    @pytest.mark.parametrize(
        ("arguments", "says"),
        [
            (["--trainer.strategy", "dprc_sngle"], "trainer.strategy=dprc_sngle: no such strategy; use one of dprc_"),
            (["--model", "test_cli.WithoutItsPackage"], "No module named 'dprc_no_such_package'"),
            (["--data", "test_cli.WithoutItsFile"], "data.path=articles.jsonl: no such file"),
            (["--ckpt_path", "runs/no.ckpt"], "--ckpt_path runs/no.ckpt: no such file; runs has no checkpoints"),
            (
                ["--trainer.callbacks", "lightning.pytorch.callbacks.TQDMProgressBar"],
                "`enable_progress_bar=False` but found `TQDMProgressBar`",
            ),
            (["--trainer.limit_train_batches", "1.5"], "invalid value 1.5 for limit_train_batches"),
            (
                ["--trainer.callbacks", "EarlyStopping", "--trainer.callbacks.monitor=x", "--trainer.callbacks.mode=y"],
                "`mode` can be min, max",
            ),
            (
                ["--trainer.gradient_clip_val", "1", "--trainer.max_epochs", "2"],
                "trainer.max_epochs=2: privacy.steps=4",
            ),
        ],
    )
    def test_what_cannot_begin_is_told_in_one_line_and_leaves_nothing(self, config, tmp_path, capsys, arguments, says):
        assert main(["fit", "--config", config, *arguments]) == 2
        assert says in only_line(capsys)
        assert not (tmp_path / "runs").exists()

    def test_a_checkpoint_that_is_none(self, config, tmp_path, capsys):
        path = tmp_path / "broken.ckpt"
        path.write_bytes(b"not a checkpoint")
        assert main(["fit", "--config", config, "--ckpt_path", str(path)]) == 2
        assert str(path) in capsys.readouterr().err.splitlines()[-1]

    @pytest.mark.parametrize(
        ("arguments", "said"),
        [
            (["--privacy.epsilonn", "2"], "unrecognized arguments: --privacy.epsilonn 2"),
            (["--privacy.epsilon", "two"], "privacy.epsilon: not a value that it takes. Given value: two"),
            (["--config", "nowhere.yaml"], "config: File does not exist"),
            (["--model.class_path", "toy.Nope"], "model: not a value that it takes"),
        ],
    )
    def test_a_misspelt_setting(self, config, capsys, arguments, said):
        assert main(["fit", "--config", config, *arguments]) == 2
        error = capsys.readouterr().err.strip().splitlines()
        assert len(error) == 1 and error[0].startswith("dprc: error: ") and said in error[0], error
        assert error[0].endswith("dprc fit --help lists all settings")

    def test_no_gpu(self, config, capsys, monkeypatch):
        for kind in (CUDAAccelerator, MPSAccelerator):
            monkeypatch.setattr(kind, "is_available", staticmethod(lambda: False))
        for name in ("gpu", "cuda"):
            assert main(["fit", "--config", config, "--trainer.accelerator", name]) == 2
            assert f"trainer.accelerator={name}: there is none on this machine" in only_line(capsys)

    def test_a_bug_keeps_its_traceback(self, config, failing):
        with pytest.raises(ValueError) as caught:
            main(["fit", "--config", config, "--data", "test_cli.Buggy"])
        assert not isinstance(caught.value, DPRCError)
        assert "invalid literal" in str(caught.value.__cause__)
        with pytest.raises(RuntimeError, match="switched off"):
            main(["fit", "--config", failing, "--model.fail_at", "1"])

    def test_each_line_is_of_use(self, config, capsys):
        assert main(["fit", "--config", config, "--trainer.enable_progress_bar", "true"]) == 0
        said = capsys.readouterr()
        assert said.err == ""
        assert "Private run in" in said.out and "Training 4/4" in said.out
        assert not any(word in said.out for word in ("GPU", "TPU", "Seed", "litlogger", "`Trainer.fit`", "max_steps"))

    def test_a_resume_goes_on_in_its_own_folder(self, failing, tmp_path, capsys):
        """Twice, with what the first start has written left as it is."""
        versions, run = tmp_path / "runs" / "toy", tmp_path / "runs" / "toy" / "version_0"
        resume = ["fit", "--config", failing, "--ckpt_path", str(run / "checkpoints" / "interrupted.ckpt")]
        with pytest.raises(RuntimeError):
            main(["fit", "--config", failing, "--model.fail_at", "3"])
        first = (run / "config.yaml").read_text()
        with pytest.raises(RuntimeError):
            main([*resume, "--model.fail_at", "3"])
        assert Ledger.open(run, read_only=True).steps == 6
        # Refused: no settings are kept of what did not begin.
        assert main([*resume, "--privacy.max_grad_norm", "7"]) == 2
        assert main(resume) == 0
        assert [folder.name for folder in versions.iterdir()] == ["version_0"]
        assert Ledger.open(run, read_only=True).steps == read_report(run)["steps"] == 8
        assert sorted(file.name for file in run.glob("config*.yaml")) == [
            "config-2.yaml",
            "config-3.yaml",
            "config.yaml",
        ]
        assert (run / "config.yaml").read_text() == first
        assert "interrupted.ckpt" in (run / "config-2.yaml").read_text()

    def test_a_fork_is_asked_for_and_told(self, failing, tmp_path, capsys):
        run = tmp_path / "runs" / "toy" / "version_0"
        with pytest.raises(RuntimeError):
            main(["fit", "--config", failing, "--model.fail_at", "3"])
        resume = ["fit", "--config", failing, "--ckpt_path", str(run / "checkpoints" / "interrupted.ckpt")]
        assert main([*resume, "--fork", "true", "--trainer.logger.init_args.name", "fork"]) == 0
        assert "a fork, with batches of its own" in capsys.readouterr().out
        fork = tmp_path / "runs" / "fork" / "version_0"
        assert Ledger.open(fork, read_only=True).parents == [Ledger.open(run, read_only=True).run_id]
        assert (fork / "secret.key").read_bytes() != (run / "secret.key").read_bytes()

    def test_the_checkpoint_of_another_model(self, config, tmp_path, capsys):
        run = tmp_path / "runs" / "toy"
        assert main(["fit", "--config", config]) == 0
        (checkpoint,) = (run / "checkpoints").glob("*.ckpt")
        state = torch.load(checkpoint, weights_only=True)
        state["state_dict"]["head.weight"] = torch.zeros(1)
        torch.save(state, tmp_path / "other.ckpt")
        capsys.readouterr()
        assert main(["test", "--config", config, "--ckpt_path", str(tmp_path / "other.ckpt")]) == 2
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert "of another model ('head.weight' is only in the checkpoint)" in error

    def test_figures_without_a_checkpoint_are_nobodys(self, config, capsys):
        assert main(["test", "--config", config]) == 0
        assert "the weights that the model begins with" in capsys.readouterr().err

    def test_evaluation_leaves_no_folder(self, failing, tmp_path):
        assert main(["fit", "--config", failing]) == 0
        versions = tmp_path / "runs" / "toy"
        (checkpoint,) = (versions / "version_0" / "checkpoints").glob("*.ckpt")
        before = {file for file in tmp_path.rglob("*")}
        for command in ("validate", "test"):
            assert main([command, "--config", failing, "--ckpt_path", str(checkpoint)]) == 0
        assert {file for file in tmp_path.rglob("*")} == before
        assert "val/accuracy" in read_report(versions / "version_0")["metrics"]

    def test_a_csv_log_survives_a_resume(self, failing, tmp_path):
        run = tmp_path / "runs" / "toy" / "version_0"
        text = Path(failing).read_text().replace("TensorBoardLogger", "CSVLogger")
        Path(failing).write_text(f"{text}  log_every_n_steps: 1\n")
        with pytest.raises(RuntimeError):
            main(["fit", "--config", failing, "--model.fail_at", "3"])
        first = (run / "metrics.csv").read_text()
        assert main(["fit", "--config", failing, "--ckpt_path", str(run / "checkpoints" / "interrupted.ckpt")]) == 0
        assert (run / "metrics-1.csv").read_text() == first != (run / "metrics.csv").read_text()

    def test_sigterm(self, config, tmp_path, capsys):
        assert main(["fit", "--config", config, "--model", "test_cli.Terminated"]) == 128 + signal.SIGTERM
        last = capsys.readouterr().err.splitlines()[-1]
        checkpoint = tmp_path / "runs" / "toy" / "checkpoints" / "interrupted.ckpt"
        done = Ledger.open(tmp_path / "runs" / "toy", read_only=True).steps
        assert last == f"dprc: interrupted after step {done} of 4; resume with --ckpt_path {checkpoint}" and done < 4
        assert checkpoint.exists()

    def test_ctrl_c_within_a_step(self, config, tmp_path, capsys):
        """At once, as after a second Ctrl-C; Lightning would end with status 1."""
        before = signal.getsignal(signal.SIGINT)
        try:
            assert main(["fit", "--config", config, "--model", "test_cli.Impatient"]) == 130
        finally:
            # Lightning leaves it ignored.
            signal.signal(signal.SIGINT, before)
        last = capsys.readouterr().err.splitlines()[-1]
        assert last.startswith("dprc: interrupted after step 2 of 4; resume with --ckpt_path ")
        assert Path(last.split()[-1]).exists()

    def test_ctrl_c_in_the_middle(self, config, tmp_path):
        """The report and the ledger tell what was done; nothing is lost, and a shell sees why it ended."""
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
        assert child.returncode == 130, errors
        with Ledger.open(run) as ledger:  # the lock is free
            steps = ledger.steps
        assert 1 <= steps == read_report(run)["steps"] < 200
        last = errors.strip().splitlines()[-1]
        assert last.startswith(f"dprc: interrupted after step {steps} of 200; resume with --ckpt_path ")
        assert Path(last.split()[-1]).exists()


class TestWhereAResumeGoes:
    """The settings alone: which folder they name."""

    def settings(self, folder: Path, **logger: str | None) -> Namespace:
        values = Namespace(**({"save_dir": str(folder), "name": "toy", "version": None} | logger))
        path = "lightning.pytorch.loggers.TensorBoardLogger"
        return Namespace(logger=Namespace(class_path=path, init_args=values), default_root_dir=None)

    def checkpoint(self, run: Path) -> Path:
        (run / "checkpoints").mkdir(parents=True)
        (run / "ledger.jsonl").touch()
        (run / "checkpoints" / "x.ckpt").touch()
        return run / "checkpoints" / "x.ckpt"

    def place(self, trainer: Namespace) -> Path:
        values = trainer.logger.init_args
        return Path(values.save_dir, values.name, values.version or "version_new")

    @pytest.mark.parametrize("name", ["version_3", "mine"])
    def test_into_its_own_folder(self, tmp_path, name):
        trainer = self.settings(tmp_path)
        _resume_in_place(trainer, self.checkpoint(tmp_path / "toy" / name))
        assert self.place(trainer) == tmp_path / "toy" / name

    def test_of_several_loggers_the_first_decides(self, tmp_path):
        trainer = self.settings(tmp_path)
        other = Namespace(class_path="lightning.pytorch.loggers.CSVLogger", init_args=Namespace(save_dir="elsewhere"))
        trainer.logger = [trainer.logger, other]
        _resume_in_place(trainer, self.checkpoint(tmp_path / "toy" / "version_0"))
        assert trainer.logger[0].init_args.version == "version_0" and trainer.logger[1] == other

    def test_whatever_the_settings_name(self, tmp_path):
        """They may be those of the first start, without what its command line changed."""
        checkpoint = self.checkpoint(tmp_path / "toy" / "version_0")
        for trainer in (self.settings(tmp_path, version="other"), self.settings(tmp_path / "x", name="other")):
            _resume_in_place(trainer, checkpoint)
            assert self.place(trainer) == tmp_path / "toy" / "version_0"

    def test_the_trainers_default_logger(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        trainer = Namespace(logger=None, default_root_dir=None)
        _resume_in_place(trainer, self.checkpoint(tmp_path / "lightning_logs" / "version_2"))
        assert self.place(trainer) == tmp_path / "lightning_logs" / "version_2"

    def test_no_logger(self, tmp_path):
        checkpoint = self.checkpoint(tmp_path / "run")
        for given in (None, "elsewhere"):
            trainer = Namespace(logger=False, default_root_dir=given)
            _resume_in_place(trainer, checkpoint)
            assert trainer.default_root_dir == str(tmp_path / "run")

    def test_a_checkpoint_of_no_run(self, tmp_path):
        checkpoint = self.checkpoint(tmp_path / "toy" / "version_0")
        (tmp_path / "toy" / "version_0" / "ledger.jsonl").unlink()
        trainer = self.settings(tmp_path)
        before = trainer.clone()
        _resume_in_place(trainer, checkpoint)
        assert trainer == before


def test_a_bound_that_is_infinite_comes_with_its_reason_and_as_valid_json(capsys):
    setting = ["--delta", "1e-5", "--sample_rate", "0.05", "--steps", "200", "--sketch_dim", "1", "--format", "json"]
    assert main(["epsilon", "--noise_multiplier", "1", *setting]) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))
    assert found["epsilon"]["upper"] is None and "raise sketch_dim (now 1)" in found["reason"]


def test_calibrate_tells_what_the_sketch_costs_and_rounds_up(capsys):
    setting = ["--epsilon", "2", "--delta", "1e-5", "--sample_rate", "0.2", "--steps", "20", "--sketch_dim", "16"]
    assert main(["calibrate", *setting]) == 0
    table = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines() if "bounds" not in line)
    assert main(["calibrate", *setting, "--format", "json"]) == 0
    exactly = json.loads(capsys.readouterr().out)["noise_multiplier"]
    assert exactly <= float(table["noise_multiplier"]) < exactly * (1 + 1e-5)
    exact = calibrate_noise_multiplier(epsilon=2.0, delta=1e-5, sample_rate=0.2, steps=20)
    assert table["over_exact_norms"] == f"+{100 * (exactly / exact - 1):.1f} %"


def test_a_delta_above_one_over_the_records_is_refused(capsys):
    setting = ["--delta", "1e-3", "--sample_rate", "0.05", "--steps", "20"]
    assert main(["epsilon", "--noise_multiplier", "1", *setting, "--num_records", "1001"]) == 2
    assert "--delta=0.001: above 1 / num_records" in capsys.readouterr().err
    assert main(["epsilon", "--noise_multiplier", "1", *setting, "--num_records", "1000"]) == 0
