"""A run that was stopped and goes on, in its own folder or elsewhere."""

import json
import os
import shutil
import signal
import time

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from toy import ToyData, ToyModule, privacy, share_secret, trainer

from dprc_lightning import PerformanceConfig
from dprc_lightning.accounting import Accountant, Ledger, StepEvent
from dprc_lightning.accounting.ledger import LedgerLockedError
from dprc_lightning.errors import ConfigurationError, InterruptedRun, LedgerError
from dprc_lightning.keys import Domain, RunSecret
from dprc_lightning.noise import NoiseStream
from dprc_lightning.report import read_report

pytestmark = pytest.mark.filterwarnings("ignore")


class Learner(ToyModule):
    """With everything that has a state: Adam's moments, a scheduler, dropout, sketches."""

    def __init__(self, settings=None, performance=None):
        super().__init__(settings or privacy(estimator="hutchinson", sketch_dim=8, steps=9), performance)
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.3), nn.Tanh(), nn.Linear(4, 2))
        self.validated = []

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))]

    def on_validation_start(self):
        self.validated.append(self.global_step)


class Interrupt(pl.Callback):
    """What Ctrl-C does, in the middle of a given step."""

    def __init__(self, step, number=signal.SIGINT):
        self.step, self.number = step, number

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_step == self.step - 1:
            os.kill(os.getpid(), self.number)


def fit(folder, module=None, ckpt_path=None, noise=None, **changes):
    module = module or Learner()
    noise = None if noise == "real" else noise or NoiseStream.for_testing(3)
    run = trainer(folder, noise, limit_val_batches=1.0, **changes)
    run.fit(module, datamodule=ToyData(), ckpt_path=ckpt_path)
    return module, run


def events(folder):
    return [json.loads(line)["type"] for line in (folder / "ledger.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Nine steps in three epochs, without a stop."""
    folder = tmp_path_factory.mktemp("whole")
    module, run = fit(folder)
    return folder, module, run


@pytest.fixture(autouse=True)
def _ctrl_c_is_heard():
    # A shell gives its background jobs an ignored SIGINT, and what runs the tests may be one.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("stops", [[2], [4], [1, 5, 6], [8]], ids=str)
def test_a_clean_resume_equals_the_uninterrupted_run(whole, tmp_path, stops, monkeypatch):
    folder, expected, expected_run = whole
    share_secret(monkeypatch, folder)
    sequences, sizes, validated, checkpoint = [], [], [], None
    for stop in [*stops, None]:
        callbacks = [] if stop is None else [Interrupt(stop)]
        module = Learner()
        try:
            run = trainer(tmp_path, NoiseStream.for_testing(3), limit_val_batches=1.0, callbacks=callbacks)
            run.fit(module, datamodule=ToyData(), ckpt_path=checkpoint)
        except InterruptedRun as error:
            assert error.code == 130 and f"after step {stop} of 9" in str(error)
            checkpoint = tmp_path / "checkpoints" / "interrupted.ckpt"
        sequences += module.sequences
        sizes += module.batch_sizes
        validated += module.validated
    assert sequences == expected.sequences == list(range(9))
    assert sizes == expected.batch_sizes
    # A validation that is due at the very step of a stop is not made.
    assert validated == [step for step in expected.validated if step not in stops] and validated[-1] == 9
    for p, q in zip(module.net.parameters(), expected.net.parameters(), strict=True):
        assert torch.equal(p, q)
    ours, theirs = run.optimizers[0].state_dict(), expected_run.optimizers[0].state_dict()
    assert ours["param_groups"] == theirs["param_groups"]
    for index, state in theirs["state"].items():
        assert all(torch.equal(state[key], ours["state"][index][key]) for key in state)
    schedulers = [r.strategy.lr_scheduler_configs[0].scheduler for r in (run, expected_run)]
    assert schedulers[0].get_last_lr() == schedulers[1].get_last_lr()
    assert schedulers[0].last_epoch == schedulers[1].last_epoch == 9
    assert run.global_step == expected_run.global_step == 9 and run.current_epoch == expected_run.current_epoch
    ledgers = [Ledger.open(place, read_only=True) for place in (tmp_path, folder)]
    assert ledgers[0].spent() == ledgers[1].spent() and ledgers[0].next_sequence == ledgers[1].next_sequence == 9
    assert module.private_run.applied == 9


def test_another_noise_stream_moves_the_parameters(whole, tmp_path, monkeypatch):
    """The comparison above can fail."""
    folder, expected, _ = whole
    share_secret(monkeypatch, folder)
    module, _ = fit(tmp_path, noise=NoiseStream.for_testing(4))
    assert module.batch_sizes == expected.batch_sizes
    assert any(not torch.equal(p, q) for p, q in zip(module.net.parameters(), expected.net.parameters(), strict=True))


def test_a_checkpoint_of_any_step_will_do(whole, tmp_path):
    """Behind the ledger the steps in between are spent, and the batches are new."""
    every = ModelCheckpoint(tmp_path / "checkpoints", save_top_k=-1, every_n_train_steps=1, filename="{step}")
    first, _ = fit(tmp_path, Learner(privacy(steps=6)), callbacks=[every], enable_checkpointing=True)
    again = Learner(privacy(steps=6, crash_allowance=4))
    with pytest.raises(ConfigurationError, match="privacy.steps=6"):
        fit(tmp_path, again, ckpt_path=tmp_path / "checkpoints" / "step=2.ckpt")
    with pytest.raises(LedgerError, match=r"6 steps are spent: epsilon [0-9.]+ at delta 0.001"):
        fit(tmp_path, Learner(privacy(steps=6)), ckpt_path=tmp_path / "checkpoints" / "step=2.ckpt")
    assert Ledger.open(tmp_path, read_only=True).steps == 6


class Dies(Learner):
    """The third step's update is made; what comes after it is not."""

    def training_step(self, batch, batch_idx):
        super().training_step(batch, batch_idx)
        if len(self.sequences) == 3:
            raise RuntimeError("the machine was switched off")


class TestCrashAllowance:
    def test_lost_steps_are_made_up_for(self, tmp_path):
        settings = privacy(epsilon=6.0, noise_multiplier=None, steps=5, crash_allowance=2)
        every = ModelCheckpoint(tmp_path / "checkpoints", save_top_k=-1, every_n_train_steps=1, filename="{step}")
        with pytest.raises(RuntimeError):
            fit(tmp_path, Dies(settings), callbacks=[every], enable_checkpointing=True)
        module, _ = fit(tmp_path, Learner(settings), ckpt_path=tmp_path / "checkpoints" / "step=2.ckpt")
        # Step 2 was lost; all five of the run are made all the same.
        assert module.sequences == [3, 4, 5] and module.private_run.applied == 5
        ledger = Ledger.open(tmp_path, read_only=True)
        assert ledger.steps == 6
        epsilon = Accountant((StepEvent.from_dict(e), n) for e, n in ledger.spent()).epsilon(1e-3)
        assert 5.0 < epsilon.upper < 6.0

    def test_without_it_the_run_is_shorter(self, tmp_path):
        every = ModelCheckpoint(tmp_path / "checkpoints", save_top_k=-1, every_n_train_steps=1, filename="{step}")
        with pytest.raises(RuntimeError):
            fit(tmp_path, Dies(privacy(steps=5)), callbacks=[every], enable_checkpointing=True)
        module, _ = fit(tmp_path, Learner(privacy(steps=5)), ckpt_path=tmp_path / "checkpoints" / "step=2.ckpt")
        assert module.sequences == [3, 4] and module.private_run.applied == 4

    def test_what_the_error_left_is_a_checkpoint_of_the_last_whole_step(self, tmp_path):
        with pytest.raises(RuntimeError):
            fit(tmp_path, Dies(privacy(steps=5)))
        module, _ = fit(tmp_path, Learner(privacy(steps=5)), ckpt_path=tmp_path / "checkpoints" / "interrupted.ckpt")
        assert module.sequences == [3, 4] and module.private_run.applied == 5


class TestMoreSteps:
    settings = {"noise_multiplier": None, "epsilon": 6.0}

    def stopped(self, folder, steps=6, at=4, **changes):
        module = Learner(privacy(**self.settings | changes, steps=steps))
        with pytest.raises(InterruptedRun):
            fit(folder, module, callbacks=[Interrupt(at)], noise="real")
        return folder / "checkpoints" / "interrupted.ckpt"

    def test_their_noise_pays_for_what_is_spent(self, tmp_path):
        checkpoint = self.stopped(tmp_path)
        module, _ = fit(tmp_path, Learner(privacy(**self.settings, steps=12)), ckpt_path=checkpoint, noise="real")
        assert module.private_run.applied == 12
        ledger = Ledger.open(tmp_path, read_only=True)
        (first, four), (second, eight) = ledger.spent()
        assert (four, eight) == (4, 8) and second["noise_multiplier"] > first["noise_multiplier"] * 1.05
        epsilon = Accountant((StepEvent.from_dict(e), n) for e, n in ledger.spent()).epsilon(1e-3)
        assert 5.98 < epsilon.upper <= 6.0
        assert "amend" in events(tmp_path)
        assert read_report(tmp_path)["epsilon"]["upper"] == pytest.approx(epsilon.upper)

    def test_fewer_steps_need_less_noise(self, tmp_path):
        checkpoint = self.stopped(tmp_path, at=2)
        module, _ = fit(tmp_path, Learner(privacy(**self.settings, steps=4)), ckpt_path=checkpoint)
        (first, _), (second, _) = Ledger.open(tmp_path, read_only=True).spent()
        assert second["noise_multiplier"] < first["noise_multiplier"] and module.private_run.applied == 4

    def test_without_a_target_they_are_refused(self, tmp_path):
        checkpoint = self.stopped(tmp_path, epsilon=None, noise_multiplier=1.0)
        lines = (tmp_path / "ledger.jsonl").read_bytes()
        with pytest.raises(ConfigurationError, match="privacy.steps=12.*give privacy.epsilon"):
            fit(tmp_path, Learner(privacy(noise_multiplier=1.0, steps=12)), ckpt_path=checkpoint)
        assert (tmp_path / "ledger.jsonl").read_bytes() == lines

    def test_the_noise_is_not_calibrated_anew_without_need(self, tmp_path, monkeypatch):
        checkpoint = self.stopped(tmp_path)
        monkeypatch.setattr("dprc_lightning.config.PrivacyConfig._calibrate", None)
        monkeypatch.setattr("dprc_lightning.resume.calibrate_noise_multiplier", None)
        module, _ = fit(tmp_path, Learner(privacy(**self.settings, steps=6)), ckpt_path=checkpoint)
        assert module.private_run.applied == 6

    def test_a_finished_run_is_refused_with_its_figures(self, tmp_path):
        every = ModelCheckpoint(tmp_path / "checkpoints", save_top_k=-1, every_n_train_steps=1, filename="{step}")
        settings = privacy(**self.settings, steps=3)
        fit(tmp_path, Learner(settings), callbacks=[every], enable_checkpointing=True)
        with pytest.raises(
            LedgerError, match=r"3 steps are spent: epsilon (5\.9|6\.0)[0-9]* at delta 0.001.*larger privacy.steps"
        ):
            fit(tmp_path, Learner(settings), ckpt_path=tmp_path / "checkpoints" / "step=3.ckpt")


class TestForks:
    def stopped(self, folder):
        with pytest.raises(InterruptedRun):
            fit(folder, callbacks=[Interrupt(3)])
        return folder / "checkpoints" / "interrupted.ckpt"

    def sampling(self, folder):
        return RunSecret.load(folder).subkey(Domain.SAMPLING)

    def test_another_folder_gets_the_ledger_and_a_new_secret(self, tmp_path):
        checkpoint = self.stopped(tmp_path / "a")
        module, _ = fit(tmp_path / "b", ckpt_path=checkpoint)
        assert module.sequences == list(range(3, 9))
        assert self.sampling(tmp_path / "a") != self.sampling(tmp_path / "b")
        parent, child = (Ledger.open(tmp_path / name, read_only=True) for name in "ab")
        assert (parent.steps, child.steps) == (3, 9)
        assert child.parents == [parent.run_id] and child.run_id != parent.run_id
        # The parent can go on too, by other batches.
        other, _ = fit(tmp_path / "a", ckpt_path=checkpoint)
        assert other.sequences == module.sequences and other.batch_sizes != module.batch_sizes

    def test_a_folder_in_use_is_refused(self, tmp_path):
        checkpoint = self.stopped(tmp_path / "a")
        fit(tmp_path / "b")
        before = (tmp_path / "b" / "ledger.jsonl").read_bytes()
        with pytest.raises(ConfigurationError, match="holds the ledger of an earlier run"):
            fit(tmp_path / "b", ckpt_path=checkpoint)
        assert (tmp_path / "b" / "ledger.jsonl").read_bytes() == before

    def test_a_copy_of_the_folder_draws_other_batches(self, tmp_path):
        self.stopped(tmp_path / "a")
        shutil.copytree(tmp_path / "a", tmp_path / "copy")
        fit(tmp_path / "a", ckpt_path=tmp_path / "a" / "checkpoints" / "interrupted.ckpt")
        module, _ = fit(tmp_path / "copy", ckpt_path=tmp_path / "copy" / "checkpoints" / "interrupted.ckpt")
        assert module.sequences == list(range(3, 9))
        assert self.sampling(tmp_path / "a") != self.sampling(tmp_path / "copy")
        assert Ledger.open(tmp_path / "copy", read_only=True).steps == 9

    def test_a_moved_folder_is_the_run_itself(self, tmp_path):
        self.stopped(tmp_path / "a")
        sampling = self.sampling(tmp_path / "a")
        (tmp_path / "a").rename(tmp_path / "b")
        fit(tmp_path / "b", ckpt_path=tmp_path / "b" / "checkpoints" / "interrupted.ckpt")
        assert self.sampling(tmp_path / "b") == sampling and "fork" not in events(tmp_path / "b")

    def test_a_lost_secret_starts_new_streams_and_the_ledger_counts_on(self, tmp_path):
        checkpoint = self.stopped(tmp_path)
        (tmp_path / "secret.key").unlink()
        module, _ = fit(tmp_path, ckpt_path=checkpoint)
        assert module.sequences == list(range(3, 9)) and Ledger.open(tmp_path, read_only=True).steps == 9


class TestSecrets:
    """No two continuations share their streams, whatever lies around."""

    def stopped(self, folder, at=3):
        with pytest.raises(InterruptedRun):
            fit(folder, callbacks=[Interrupt(at)])
        return folder / "checkpoints" / "interrupted.ckpt"

    def key(self, folder):
        return (folder / "secret.key").read_bytes()

    def test_a_fork_never_takes_a_copied_secret(self, tmp_path):
        checkpoint = self.stopped(tmp_path / "a")
        (tmp_path / "b").mkdir()
        shutil.copy2(tmp_path / "a" / "secret.key", tmp_path / "b")
        fit(tmp_path / "b", ckpt_path=checkpoint)
        assert self.key(tmp_path / "a") != self.key(tmp_path / "b")
        assert len(list((tmp_path / "b").glob("secret.key.unused-*"))) == 1

    def test_a_run_that_begins_never_takes_one_that_lies_there(self, tmp_path):
        fit(tmp_path)
        before = self.key(tmp_path)
        (tmp_path / "ledger.jsonl").unlink()
        fit(tmp_path)
        assert self.key(tmp_path) != before

    @pytest.mark.parametrize("how", ["replaced", "overwritten"])
    def test_a_backup_that_is_put_back_draws_other_batches(self, tmp_path, how):
        """As rsync does it (what is equal stays, what differs is replaced), and as cp does."""
        run, backup = tmp_path / "run", tmp_path / "backup"
        self.stopped(run)
        shutil.copytree(run, backup)
        fit(run, ckpt_path=run / "checkpoints" / "interrupted.ckpt")
        before = self.key(run)
        if how == "replaced":
            for name in ("ledger.jsonl", "checkpoints/interrupted.ckpt"):
                shutil.copy2(backup / name, run / "temporary")
                os.replace(run / "temporary", run / name)
        else:
            time.sleep(1.1)  # times are kept in whole seconds
            for name in ("ledger.jsonl", "secret.key", "checkpoints/interrupted.ckpt"):
                shutil.copy2(backup / name, run / name)
        fit(run, ckpt_path=run / "checkpoints" / "interrupted.ckpt")
        assert self.key(run) != before

    def test_the_ledger_is_locked_before_the_noise_is_calibrated(self, tmp_path, monkeypatch):
        """Another process could add steps to it in the meantime."""
        settings = {"noise_multiplier": None, "epsilon": 6.0}
        with pytest.raises(InterruptedRun):
            fit(tmp_path / "a", Learner(privacy(**settings, steps=6)), callbacks=[Interrupt(3)])
        checkpoint, seen = tmp_path / "a" / "checkpoints" / "interrupted.ckpt", []

        def calibrate(*, spent, **_):
            seen.append(sum(count for _, count in spent))
            with pytest.raises(LedgerLockedError):
                Ledger.open(seen_folder)
            return 2.0

        monkeypatch.setattr("dprc_lightning.resume.calibrate_noise_multiplier", calibrate)
        # A fork counts what it copied, whatever its parent does meanwhile.
        seen_folder = tmp_path / "b"
        with Ledger.open(tmp_path / "a") as running:
            running.reserve({"noise_multiplier": 1.0, "sample_rate": 0.25, "sketch_dim": None}, count=2)
            fit(tmp_path / "b", Learner(privacy(**settings, steps=12, crash_allowance=2)), ckpt_path=checkpoint)
        seen_folder = tmp_path / "a"
        fit(tmp_path / "a", Learner(privacy(**settings, steps=12, crash_allowance=2)), ckpt_path=checkpoint)
        assert seen == [5, 3]


class TestRepeatedResumes:
    def test_the_same_settings_calibrate_once(self, tmp_path, monkeypatch):
        """Also when the first change came after a loss, which the allowance on record then covers."""
        settings = {"noise_multiplier": None, "epsilon": 6.0}
        every = ModelCheckpoint(tmp_path / "checkpoints", save_top_k=-1, every_n_train_steps=1, filename="{step}")
        with pytest.raises(RuntimeError):
            fit(tmp_path, Dies(privacy(**settings, steps=5)), callbacks=[every], enable_checkpointing=True)
        more = Learner(privacy(**settings, steps=9))
        with pytest.raises(InterruptedRun):
            fit(tmp_path, more, ckpt_path=tmp_path / "checkpoints" / "step=2.ckpt", callbacks=[Interrupt(4)])
        monkeypatch.setattr("dprc_lightning.resume.calibrate_noise_multiplier", None)
        module, _ = fit(
            tmp_path, Learner(privacy(**settings, steps=9)), ckpt_path=tmp_path / "checkpoints" / "interrupted.ckpt"
        )
        assert module.private_run.applied == 9
        assert len(Ledger.open(tmp_path, read_only=True).spent()) == 2

    def test_fewer_steps_after_a_loss(self, tmp_path):
        every = ModelCheckpoint(tmp_path / "checkpoints", save_top_k=-1, every_n_train_steps=1, filename="{step}")
        with pytest.raises(RuntimeError):
            fit(tmp_path, Dies(privacy(steps=8)), callbacks=[every], enable_checkpointing=True)
        module, _ = fit(tmp_path, Learner(privacy(steps=7)), ckpt_path=tmp_path / "checkpoints" / "step=2.ckpt")
        assert module.private_run.applied == 7 and Ledger.open(tmp_path, read_only=True).steps == 8


class TestErrorsBeforeTraining:
    """They must not write over the checkpoint that is being resumed."""

    def stopped(self, folder):
        with pytest.raises(InterruptedRun):
            fit(folder, callbacks=[Interrupt(3)])
        return folder / "checkpoints" / "interrupted.ckpt"

    def test_a_resume_that_fails_when_fit_starts(self, tmp_path):
        class Fails(pl.Callback):
            def on_fit_start(self, trainer, module):
                raise RuntimeError("no room")

        checkpoint = self.stopped(tmp_path)
        before = checkpoint.read_bytes()
        with pytest.raises(RuntimeError, match="no room"):
            fit(tmp_path, ckpt_path=checkpoint, callbacks=[Fails()])
        assert checkpoint.read_bytes() == before
        module, _ = fit(tmp_path, ckpt_path=checkpoint)
        assert module.private_run.applied == 9


class TestReservations:
    def test_steps_are_written_down_several_at_a_time(self, tmp_path):
        fit(tmp_path, Learner(privacy(steps=7), PerformanceConfig(physical_batch_size=3, reserve_steps=3)))
        entries = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
        assert [e["count"] for e in entries if e["type"] == "reserve"] == [3, 3, 1]
        assert Ledger.open(tmp_path, read_only=True).steps == 7

    def test_a_clean_stop_gives_back_and_a_crash_does_not(self, tmp_path):
        performance = PerformanceConfig(physical_batch_size=3, reserve_steps=4)
        with pytest.raises(InterruptedRun):
            fit(tmp_path, Learner(privacy(steps=7), performance), callbacks=[Interrupt(2)])
        assert Ledger.open(tmp_path, read_only=True).steps == 2
        module, _ = fit(
            tmp_path, Learner(privacy(steps=7), performance), ckpt_path=tmp_path / "checkpoints" / "interrupted.ckpt"
        )
        assert module.sequences == [2, 3, 4, 5, 6]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_run_after_its_step(tmp_path, number):
    before = signal.getsignal(number)
    with pytest.raises(InterruptedRun) as caught:
        fit(tmp_path, callbacks=[Interrupt(2, number)])
    assert caught.value.code == 128 + number and caught.value.signal == number
    assert signal.getsignal(number) is before
    report = read_report(tmp_path)
    assert report["steps"] == 2 and report["status"] == f"stopped by {signal.Signals(number).name}"
    with Ledger.open(tmp_path) as ledger:  # the lock is free
        assert ledger.steps == 2


def test_a_signal_in_the_last_step(tmp_path):
    """Nothing is left to resume, but a script must not go on."""
    with pytest.raises(InterruptedRun, match="training is done") as caught:
        fit(tmp_path, callbacks=[AfterTheLastStep()])
    assert caught.value.code == 143
    assert read_report(tmp_path)["status"] == "finished"


class AfterTheLastStep(pl.Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step == 9:
            os.kill(os.getpid(), signal.SIGTERM)


def test_asked_twice_it_ends_at_once(tmp_path):
    class Twice(Learner):
        def per_sample_loss(self, batch):
            if len(self.sequences) == 3:
                os.kill(os.getpid(), signal.SIGINT)
                os.kill(os.getpid(), signal.SIGINT)
            return super().per_sample_loss(batch)

    with pytest.raises(SystemExit):
        fit(tmp_path, Twice())
    assert Ledger.open(tmp_path, read_only=True).steps == 3
    module, _ = fit(tmp_path, ckpt_path=tmp_path / "checkpoints" / "interrupted.ckpt")
    # Two whole steps were saved; the third is spent.
    assert module.sequences == list(range(3, 9)) and module.private_run.applied == 8
