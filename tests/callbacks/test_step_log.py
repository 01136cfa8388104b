"""What reaches the log, with and without unprotected figures."""

import math

import lightning.pytorch as pl
import pytest
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from toy import ToyData, ToyModule, privacy, trainer

from dprc_lightning.callbacks.step_log import announce_unprotected
from dprc_lightning.diagnostics import PHASES, UNPROTECTED, is_unprotected

PROTECTED = {"privacy/epsilon", "epoch"}


class Watch(pl.Callback):
    """Keeps what each step logged."""

    def __init__(self):
        self.steps = []

    def on_train_batch_start(self, trainer, *_):
        self.steps.append(dict(trainer.logged_metrics))

    def on_train_end(self, trainer, *_):
        self.steps.append(dict(trainer.logged_metrics))


def fit(folder, **settings):
    logger, watch = TensorBoardLogger(folder, name=""), Watch()
    fitter = trainer(folder, logger=logger, log_every_n_steps=1, callbacks=[watch])
    module = ToyModule(privacy(**settings))
    fitter.fit(module, datamodule=ToyData())
    events = EventAccumulator(logger.log_dir)
    events.Reload()
    return events, watch.steps[1:], module


def test_every_step_has_its_figures(tmp_path):
    events, steps, module = fit(tmp_path)
    names = set(events.Tags()["scalars"])
    expected = {"train/loss", "clip/fraction", "clip/dropped", "time/step"} | {f"time/{name}" for name in PHASES}
    assert names == expected | PROTECTED
    assert len(steps) == 4
    for logged, seconds in zip(steps, module.clock.steps, strict=True):
        times = {name: float(logged[f"time/{name}"]) for name in PHASES}
        assert float(logged["time/step"]) == pytest.approx(seconds, rel=1e-5)
        assert math.isclose(sum(times.values()), seconds, rel_tol=1e-4)
        assert all(times[name] > 0 for name in ("data", "norm_pass", "forward", "clipped_backward", "optimizer"))
    assert float(steps[0]["time/check_isolation"]) > 0 == float(steps[1]["time/check_isolation"])


def test_one_setting_turns_all_of_it_off(tmp_path):
    events, steps, _ = fit(tmp_path, log_unprotected=False)
    assert set(events.Tags()["scalars"]) == PROTECTED
    assert not any(is_unprotected(name) for logged in steps for name in logged)
    assert events.Tags()["tensors"] == []


class Fitting:
    """As much of a module as the notice needs."""

    global_step = 7

    def __init__(self, **settings):
        self.privacy = privacy(**settings)


def test_the_log_says_what_is_unprotected(tmp_path):
    logger = TensorBoardLogger(tmp_path, name="")
    announce_unprotected(trainer(tmp_path, logger=[CSVLogger(tmp_path), logger]), Fitting())
    logger.finalize("success")
    events = EventAccumulator(logger.log_dir)
    events.Reload()
    (event,) = events.Tensors("unprotected/text_summary")
    text = event.tensor_proto.string_val[0].decode()
    assert event.step == 7 and all(name in text for name in UNPROTECTED)
    assert "without noise" in text and "privacy.log_unprotected=false" in text


def test_without_unprotected_figures_nothing_is_said(tmp_path):
    logger = TensorBoardLogger(tmp_path, name="")
    announce_unprotected(trainer(tmp_path, logger=logger), Fitting(log_unprotected=False))
    logger.finalize("success")
    events = EventAccumulator(logger.log_dir)
    events.Reload()
    assert events.Tags()["tensors"] == []
