"""Whatever is wrong with a fit is found before any work, all of it together, under the names that the user typed."""

from datetime import timedelta
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch import callbacks
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from toy import ToyData, ToyModule, privacy, trainer

from dprc_lightning import DPRCDataModule, PerformanceConfig, PrivacyConfig, preflight
from dprc_lightning.errors import ConfigurationError, DatasetError, UnprotectedStrategyError
from dprc_lightning.strategies.private import check_schedulers


class Prepared(ToyData):
    """Its records are there after setup only."""

    def setup(self, stage):
        self.ready = True

    def train_dataset(self):
        assert self.ready, "asked for records before setup"
        return super().train_dataset()


class Stream(IterableDataset):
    def __iter__(self):
        return iter([])


def found(folder, settings=None, module=None, data=None, **kwargs):
    module = module or ToyModule(privacy(**kwargs.pop("privacy", {})))
    data = data if data is not None else ToyData()
    return preflight.problems(trainer(folder, **(settings or {})), module, data, **kwargs)


def test_nothing_wrong(tmp_path):
    assert found(tmp_path) == []
    assert preflight.warnings(trainer(tmp_path), ToyModule(privacy())) == []
    assert not list(tmp_path.glob("*")), "looking leaves nothing behind"


@pytest.mark.parametrize(
    ("settings", "says", "remedy"),
    [
        ({"gradient_clip_val": 0.5}, "trainer.gradient_clip_val=0.5", "privacy.max_grad_norm"),
        ({"accumulate_grad_batches": 4}, "trainer.accumulate_grad_batches=4", "performance.physical_batch_size"),
        ({"max_steps": 3}, "trainer.max_steps=3: privacy.steps=4 decides", "leave max_steps out"),
        ({"max_epochs": 3}, "trainer.max_epochs=3: privacy.steps=4 decides", "privacy.epochs"),
        ({"max_epochs": 1000}, "trainer.max_epochs=1000", "privacy.epochs"),
        ({"min_steps": 9}, "trainer.min_steps=9", "leave min_steps out"),
        ({"overfit_batches": 2}, "trainer.overfit_batches=2", "leave it out"),
        ({"limit_train_batches": 0.5}, "trainer.limit_train_batches=0.5", "leave limit_train_batches out"),
        # As an integer it means one batch, as a float all of them.
        ({"limit_train_batches": 1}, "trainer.limit_train_batches=1", "leave limit_train_batches out"),
        ({"fast_dev_run": True}, "trainer.fast_dev_run=True", "privacy.steps=1"),
        ({"fast_dev_run": 3}, "trainer.fast_dev_run=3", "privacy.steps=1"),
        ({"reload_dataloaders_every_n_epochs": 1}, "trainer.reload_dataloaders_every_n_epochs=1", "leave it out"),
        ({"precision": "16-true"}, "trainer.precision=16-true", "bf16-mixed"),
        (
            {"val_check_interval": 5, "limit_val_batches": 1.0},
            "trainer.val_check_interval=5: an epoch has 4 steps",
            "trainer.check_val_every_n_epoch=null",
        ),
        ({"strategy": "auto"}, "trainer.strategy=SingleDeviceStrategy", "--trainer.strategy dprc_single"),
        ({"callbacks": [callbacks.LearningRateFinder()]}, "LearningRateFinder", "public data"),
        ({"callbacks": [callbacks.BatchSizeFinder()]}, "BatchSizeFinder", "performance.physical_batch_size"),
        ({"callbacks": [callbacks.StochasticWeightAveraging(0.1)]}, "StochasticWeightAveraging", "leave it out"),
        (
            {"callbacks": [callbacks.GradientAccumulationScheduler({2: 4})]},
            "GradientAccumulationScheduler",
            "performance.physical_batch_size",
        ),
    ],
)
def test_what_the_trainer_must_not_do(tmp_path, settings, says, remedy):
    (line,) = found(tmp_path, settings)
    assert says in line and remedy in line and "\n" not in line


@pytest.mark.parametrize(
    "settings",
    [
        {"max_steps": 4},
        {"max_epochs": -1},
        {"limit_train_batches": 1.0},
        {"val_check_interval": 4, "limit_val_batches": 1.0},
        {"val_check_interval": 5, "check_val_every_n_epoch": None, "limit_val_batches": 1.0},
        {"val_check_interval": 5},
        {"min_steps": 4},
        {"detect_anomaly": True},
        {"precision": "bf16-mixed"},
        {"callbacks": [callbacks.Timer()]},
        {"callbacks": [callbacks.LearningRateMonitor()], "logger": True},
    ],
)
def test_what_it_may(tmp_path, settings):
    assert found(tmp_path, settings) == []


def test_epochs_decide_where_they_are_given(tmp_path):
    (line,) = found(tmp_path, {"max_epochs": 3}, privacy={"steps": None, "epochs": 2.0})
    assert "privacy.epochs=2.0 decides" in line


def test_all_of_it_at_once(tmp_path):
    module = ToyModule(
        PrivacyConfig(delta=0.5, epsilon=1.0, noise_multiplier=1.0, expected_batch_size=100, steps=4),
        PerformanceConfig(physical_batch_size=0),
    )
    settings = {
        "gradient_clip_val": 1.0,
        "max_epochs": 2,
        "strategy": "auto",
        "callbacks": [callbacks.LearningRateFinder()],
    }
    with pytest.raises(ConfigurationError) as caught:
        preflight.check(trainer(tmp_path, **settings), module, ToyData(), ckpt_path=tmp_path / "no.ckpt")
    for part in (
        "privacy.delta=0.5: above 1/40",
        "privacy.epsilon or privacy.noise_multiplier: both",
        "privacy.expected_batch_size=100: more than the 40",
        "performance.physical_batch_size=0",
        "trainer.gradient_clip_val=1.0",
        "trainer.max_epochs=2",
        "trainer.strategy=",
        "LearningRateFinder",
        f"--ckpt_path {tmp_path / 'no.ckpt'}: no such file",
    ):
        assert part in str(caught.value)
    assert len(caught.value.problems) == 9


def test_an_unprotected_strategy_alone_has_its_own_type(tmp_path):
    with pytest.raises(UnprotectedStrategyError):
        preflight.check(trainer(tmp_path, strategy="auto"), ToyModule(privacy()), ToyData())


class TestData:
    def test_none(self, tmp_path):
        (line,) = found(tmp_path, data=[1, 2])
        assert "give it a DPRCDataModule" in line
        (line,) = found(tmp_path, data=pl.LightningDataModule())
        assert "give it a DPRCDataModule" in line

    def test_a_loader_of_ones_own(self, tmp_path):
        class Shuffled(ToyData):
            def train_dataloader(self):
                return DataLoader(self.train_dataset(), batch_size=4, shuffle=True)

        (line,) = found(tmp_path, data=Shuffled())
        assert line.startswith("Shuffled.train_dataloader: ") and "train_dataset" in line
        patched = ToyData()
        patched.train_dataloader = lambda: DataLoader(patched.train_dataset(), shuffle=True)
        (line,) = found(tmp_path, data=patched)
        assert line.startswith("ToyData.train_dataloader: ")

    @pytest.mark.parametrize("records", [Stream(), DataLoader(TensorDataset(torch.zeros(3))), iter([1]), {1, 2}])
    def test_records_that_have_no_index(self, tmp_path, records):
        class Unsized(ToyData):
            def train_dataset(self):
                return records

        (line,) = found(tmp_path, data=Unsized())
        assert line.startswith(f"Unsized.train_dataset: a {type(records).__name__} ") and "map-style" in line

    def test_one_that_is_not_written_or_not_there(self, tmp_path):
        (line,) = found(tmp_path, data=DPRCDataModule())
        assert "DPRCDataModule.train_dataset: not written" in line

        class Missing(ToyData):
            def train_dataset(self):
                raise DatasetError("data.path=x: no such file")

        assert found(tmp_path, {"max_steps": 2}, data=Missing()) == [
            "data.path=x: no such file",
            "trainer.max_steps=2: privacy.steps=4 decides; leave max_steps out",
        ]

    def test_their_number_waits_for_setup(self, tmp_path):
        """What does not need it is found all the same."""
        data, large = Prepared(), {"delta": 0.5, "sample_rate": None, "expected_batch_size": 99.0, "steps": 0}
        early = found(tmp_path, data=data, privacy=large)
        assert early == ["privacy.steps=0: expected an integer >= 1"]
        data.setup("fit")
        late = found(tmp_path, data=data, privacy=large, data_is_ready=True)
        assert [line.split(":")[0] for line in late] == [
            "privacy.steps=0",
            "privacy.expected_batch_size=99.0",
            "privacy.delta=0.5",
        ]

    def test_units_are_what_is_counted(self, tmp_path):
        class People(ToyData):
            def num_units(self, privacy):
                return 5 if privacy.group_column == "person" else 40

        assert found(tmp_path, data=People(), privacy={"delta": 0.1}) != []
        assert found(tmp_path, data=People(), privacy={"delta": 0.1, "group_column": "person"}) == []


class TestModule:
    def test_automatic_optimization(self, tmp_path):
        module = ToyModule(privacy())
        module.automatic_optimization = True
        (line,) = found(tmp_path, module=module)
        assert "ToyModule.automatic_optimization=True" in line

    def test_no_optimizer(self, tmp_path):
        class Bare(ToyModule):
            configure_optimizers = pl.LightningModule.configure_optimizers

        (line,) = found(tmp_path, module=Bare(privacy()))
        assert "Bare.configure_optimizers: not written" in line

    def test_matmul_precision(self, tmp_path):
        torch.set_float32_matmul_precision("medium")
        try:
            (line,) = found(tmp_path)
            assert "set_float32_matmul_precision('medium')" in line
            assert found(tmp_path, privacy={"baseline_without_privacy": True}) == []
        finally:
            torch.set_float32_matmul_precision("highest")

    def test_a_scheduler_that_waits_for_a_metric(self):
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
        by_step = LRSchedulerConfig(torch.optim.lr_scheduler.StepLR(optimizer, 1))
        by_metric = LRSchedulerConfig(torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer), monitor="val/loss")
        check_schedulers([by_step])
        with pytest.raises(ConfigurationError, match=r"ReduceLROnPlateau: .*LambdaLR") as caught:
            check_schedulers([by_step, by_metric])
        assert len(caught.value.problems) == 1


class TestCheckpoint:
    def test_the_ones_that_are_there_are_named(self, tmp_path):
        folder = tmp_path / "checkpoints"
        folder.mkdir()
        wrong = folder / "step=3.ckpt"
        assert preflight.checkpoint_problem(wrong) == f"--ckpt_path {wrong}: no such file; {folder} has no checkpoints"
        (folder / "step=2.ckpt").touch()
        for path, said in ((wrong, "no such file"), (tmp_path / "step=2.ckpt", "no such file")):
            assert preflight.checkpoint_problem(path) == f"--ckpt_path {path}: {said}; {folder} has: step=2.ckpt"
        for path in (tmp_path, folder):
            assert "name one of them" in str(preflight.checkpoint_problem(path))
            assert "step=2.ckpt" in str(preflight.checkpoint_problem(path))
        assert preflight.checkpoint_problem(folder / "step=2.ckpt") is None

    def test_what_is_left_to_lightning(self, tmp_path):
        (tmp_path / "sharded").mkdir()
        assert "no checkpoint of this library" in str(preflight.checkpoint_problem(tmp_path / "sharded"))
        (tmp_path / "sharded" / "lightning.pt").touch()
        for path in (tmp_path / "sharded", "last", "best", "hpc", "registry:x", "s3://bucket/x.ckpt"):
            assert preflight.checkpoint_problem(path) is None

    def test_a_used_folder(self, tmp_path):
        (tmp_path / "ledger.jsonl").touch()
        (line,) = found(tmp_path)
        assert "choose another" in line
        (tmp_path / "x.ckpt").touch()
        assert found(tmp_path, ckpt_path=tmp_path / "x.ckpt") == []


class TestWarnings:
    @pytest.mark.parametrize("monitor", ["train/loss", "clip/fraction", "loss", "validity_of_records"])
    def test_a_leak_has_a_name(self, tmp_path, monitor):
        both = [
            callbacks.EarlyStopping(monitor=monitor),
            callbacks.ModelCheckpoint(tmp_path / "checkpoints", monitor=monitor),
        ]
        run = trainer(tmp_path, callbacks=both, enable_checkpointing=True)
        stopping, keeping = preflight.warnings(run, ToyModule(privacy()))
        assert stopping.startswith(f"EarlyStopping(monitor='{monitor}'): when training stops depends on private data")
        assert keeping.startswith(f"ModelCheckpoint(monitor='{monitor}'): which checkpoint is kept depends on private")
        assert all("epsilon does not cover it" in line for line in (stopping, keeping))
        assert preflight.warnings(run, ToyModule(privacy(baseline_without_privacy=True))) == []

    @pytest.mark.parametrize("monitor", ["val/accuracy", "val_loss", "test/accuracy"])
    def test_other_data(self, tmp_path, monitor):
        both = [callbacks.EarlyStopping(monitor=monitor), callbacks.ModelCheckpoint(tmp_path, monitor=monitor)]
        (line,) = preflight.warnings(trainer(tmp_path, callbacks=both, enable_checkpointing=True), ToyModule(privacy()))
        assert "the validation set is not protected" in line

    def test_the_clock(self, tmp_path):
        (line,) = preflight.warnings(trainer(tmp_path, max_time=timedelta(hours=1)), ToyModule(privacy()))
        assert line.startswith("trainer.max_time: training ends by the clock")

    def test_they_are_printed_by_the_first_rank(self, tmp_path, capsys, monkeypatch):
        run = trainer(tmp_path, max_time=timedelta(hours=1))
        preflight.warn(run, ToyModule(privacy()))
        assert capsys.readouterr().err.startswith("dprc: warning: trainer.max_time")
        monkeypatch.setattr(preflight.rank_zero_only, "rank", 1)
        preflight.warn(run, ToyModule(privacy()))
        assert capsys.readouterr().err == ""

    def test_a_metric_that_is_not_logged_is_an_error(self, tmp_path):
        stop = callbacks.EarlyStopping(monitor="train/loss")
        (line,) = found(tmp_path, {"callbacks": [stop]}, privacy={"log_unprotected": False})
        assert "privacy.log_unprotected=false leaves this metric out" in line


@pytest.mark.filterwarnings("ignore:.*max_epochs.*")
class TestInFit:
    """Within `trainer.fit`, where Lightning would otherwise raise first and in its own words."""

    def test_lightnings_own_limits_are_not_taken_for_the_users(self, tmp_path):
        run = trainer(tmp_path)
        run.state.fn = "fit"
        run.fit_loop.max_epochs = 1000
        assert preflight.problems(run, ToyModule(privacy()), ToyData()) == []

    def test_nor_are_the_librarys(self, tmp_path):
        module = ToyModule(privacy())
        run = trainer(tmp_path)
        run.fit_loop.max_epochs, run.fit_loop.epoch_loop.max_steps = 1, 2
        assert len(preflight.problems(run, module, ToyData())) == 2
        module.private_run = SimpleNamespace(resolved=None)
        assert preflight.problems(run, module, ToyData()) == []

    def test_before_lightnings_words_and_before_any_folder(self, tmp_path):
        run = trainer(tmp_path / "new", gradient_clip_val=1.0, accumulate_grad_batches=2)
        with pytest.raises(ConfigurationError) as caught:
            run.fit(ToyModule(privacy()), datamodule=ToyData())
        assert len(caught.value.problems) == 2
        assert not (tmp_path / "new").exists()

    def test_the_learning_rate_tuner(self, tmp_path):
        from lightning.pytorch.tuner import Tuner

        module = ToyModule(privacy())
        module.lr = 0.1
        with pytest.raises(ConfigurationError, match="LearningRateFinder"):
            Tuner(trainer(tmp_path)).lr_find(module, datamodule=ToyData())
        assert not (tmp_path / "ledger.jsonl").exists()
