"""The bar as it is seen: on a terminal, in a plain log, after a resume, and without unprotected figures."""

import re
from io import StringIO

import lightning.pytorch as pl
import pytest
import torch
from rich.console import Console
from rich.text import Text
from torch import nn
from toy import ToyData, ToyModule, checkpointing, privacy, trainer

from dprc_lightning.callbacks.progress import LEGEND, StepProgressBar

FIGURES = r"epsilon \d\.\d{3} loss\* -?\d+\.\d{3} clip\* [01]\.\d{3}"


class Seconds:
    """A clock on which each look takes one second."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 1.0
        return self.now


def run(folder, terminal, module=None, ckpt_path=None, **changes):
    out = StringIO()
    bar = StepProgressBar(Console(file=out, force_terminal=terminal, width=120), clock=Seconds())
    settings = {"callbacks": [bar, *changes.pop("callbacks", [])], "enable_progress_bar": True}
    fitter = trainer(folder, **(settings | changes))
    fitter.fit(module or ToyModule(privacy()), datamodule=ToyData(), ckpt_path=ckpt_path)
    return out.getvalue(), fitter


def plain(text):
    """Every frame that the terminal showed, without colours; what moves the cursor begins a line."""
    return Text.from_ansi(re.sub(r"(\x1b\[\?25[lh]|\x1b\[\d*[AK]|\r)+", "\n", text)).plain


def test_a_plain_log_has_one_line_for_each_step_and_no_control_codes(tmp_path):
    out, fitter = run(tmp_path, terminal=False)
    assert "\x1b" not in out and "\r" not in out
    lines = out.splitlines()
    assert lines[0] == LEGEND and out.count(LEGEND) == 1
    assert len(lines) == 5
    for step, line in enumerate(lines[1:], 1):
        assert re.fullmatch(rf"Training {step}/4 ETA 0:00:0{4 - step} {FIGURES}", line), line
    assert fitter.progress_bar_callback.is_enabled


def test_epsilon_is_that_of_the_step_shown_and_rounded_up(tmp_path):
    logged = []

    class Watch(pl.Callback):
        def on_train_batch_start(self, trainer, *_):
            logged.append(trainer.callback_metrics.get("privacy/epsilon"))

        def on_train_end(self, trainer, *_):
            logged.append(trainer.callback_metrics.get("privacy/epsilon"))

    out, _ = run(tmp_path, terminal=False, callbacks=[Watch()])
    shown = [float(value) for value in re.findall(r"epsilon (\S+)", out)]
    assert len(shown) == 4
    for value, exact in zip(shown, logged[1:], strict=True):
        assert exact <= value < exact + 0.0011
    assert shown == sorted(set(shown))


def test_a_terminal_has_one_bar_that_ends_full(tmp_path):
    out, _ = run(tmp_path, terminal=True)
    assert "\x1b[?25l" in out and out.rstrip().endswith("\x1b[?25h"), "the cursor comes back"
    shown = plain(out)
    assert shown.count(LEGEND) == 1
    assert re.search(rf"Training +━+ 4/4 ETA 0:00:00 {FIGURES}", shown), shown
    assert "Validation" not in shown


@pytest.mark.parametrize("terminal", [True, False])
def test_after_a_resume_the_bar_begins_where_the_checkpoint_is(tmp_path, terminal):
    module = ToyModule(privacy())
    module.fail_at = 3
    with pytest.raises(RuntimeError, match="switched off"):
        trainer(tmp_path, **checkpointing(tmp_path)).fit(module, datamodule=ToyData())
    (checkpoint,) = tmp_path.glob("checkpoints/*step=2*.ckpt")
    out, fitter = run(tmp_path, terminal, ckpt_path=checkpoint)
    positions = re.findall(r"(\d+)/(\d+)(?: ETA (\S+))?", plain(out))
    # One step was lost with the crash: the run ends at step 3, and the bar knows.
    total = str(fitter.global_step)
    assert {position[1] for position in positions} == {total}
    assert positions[-1] == (total, total, "0:00:00")
    assert "1/" not in {f"{done}/" for done, *_ in positions}
    if terminal:
        assert positions[0] == ("2", total, "")
    else:
        assert positions[0][0] == "3"


@pytest.mark.parametrize("terminal", [True, False])
def test_without_unprotected_figures_it_shows_steps_epsilon_and_time_alone(tmp_path, terminal):
    out, _ = run(tmp_path, terminal, module=ToyModule(privacy(log_unprotected=False)))
    shown = plain(out)
    assert "4/4 ETA 0:00:00 epsilon" in shown
    assert "*" not in shown and "loss" not in shown and "clip" not in shown


def test_a_baseline_says_what_it_is(tmp_path):
    module = ToyModule(privacy(baseline_without_privacy=True, noise_multiplier=None))
    out, _ = run(tmp_path, terminal=False, module=module)
    lines = out.splitlines()[1:]
    assert len(lines) == 4 and all(line.startswith("NOT PRIVATE ") for line in lines)
    assert "epsilon" not in out and "loss* " in out


def test_validation_is_a_second_line_that_goes(tmp_path):
    out, _ = run(tmp_path, terminal=True, limit_val_batches=1.0, num_sanity_val_steps=1, val_check_interval=2)
    shown = plain(out)
    assert re.search(r"Validation +━+", shown) and re.search(r"Sanity Checking +━+", shown)
    assert shown.rstrip().splitlines()[-1].startswith("Training"), "it does not stay on the screen"
    out, _ = run(tmp_path / "plain", terminal=False, limit_val_batches=1.0, num_sanity_val_steps=1)
    assert "Validation" not in out


@pytest.mark.parametrize("kind", ["validate", "test"])
def test_evaluation_alone_has_a_line(tmp_path, kind):
    out = StringIO()
    bar = StepProgressBar(Console(file=out, force_terminal=True, width=120))
    changes = {"callbacks": [bar], "enable_progress_bar": True, "limit_val_batches": 1.0}
    evaluation = getattr(trainer(tmp_path, **changes), kind)
    evaluation(ToyModule(privacy()), datamodule=ToyData(), verbose=False)
    title = {"validate": "Validation", "test": "Testing"}[kind]
    assert re.search(rf"{title} +━+", plain(out.getvalue()))
    assert bar._bar is None


def test_what_others_print_stands_above_the_bar(tmp_path, capsys):
    class Talker(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            print("a line of another callback")
            pl_module.print("a line of the module")

    out, _ = run(tmp_path, terminal=True, callbacks=[Talker()])
    lines = [line.strip() for line in plain(out).splitlines()]
    assert lines.count("a line of another callback") == lines.count("a line of the module") == 4
    assert "a line" not in capsys.readouterr().out, "it went through the console, not through the bar"
    out, _ = run(tmp_path / "plain", terminal=False, callbacks=[Talker()])
    assert "a line" not in out and capsys.readouterr().out.count("a line of the module") == 4


def test_an_error_gives_the_terminal_back(tmp_path):
    module = ToyModule(privacy())
    module.fail_at = 2
    out = StringIO()
    bar = StepProgressBar(Console(file=out, force_terminal=True))
    with pytest.raises(RuntimeError, match="switched off"):
        trainer(tmp_path, callbacks=[bar], enable_progress_bar=True).fit(module, datamodule=ToyData())
    assert out.getvalue().rstrip().endswith("\x1b[?25h") and bar._bar is None


@pytest.mark.parametrize("terminal", [True, False])
def test_disabled_it_is_silent(tmp_path, terminal, monkeypatch):
    # What Lightning does on every rank but the first.
    monkeypatch.setattr(pl.Trainer, "is_global_zero", property(lambda _: False))
    out, fitter = run(tmp_path, terminal)
    assert out == "" and not fitter.progress_bar_callback.is_enabled
    fitter.progress_bar_callback.enable()
    assert fitter.progress_bar_callback.is_enabled


def test_it_serves_an_ordinary_module_too(tmp_path):
    class Plain(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 1)

        def training_step(self, batch, batch_idx):
            self.log("[mine]", 0.5, prog_bar=True)
            return self.layer(batch).sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    for terminal in (True, False):
        out = StringIO()
        bar = StepProgressBar(Console(file=out, force_terminal=terminal, width=120))
        fitter = pl.Trainer(
            default_root_dir=tmp_path, max_steps=3, callbacks=[bar], logger=False, enable_checkpointing=False
        )
        fitter.fit(Plain(), torch.ones(6, 2))
        assert re.search(r"3/3 ETA 0:00:00 \[mine\] 0.500", plain(out.getvalue()))
