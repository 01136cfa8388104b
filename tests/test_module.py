"""The private training step under Lightning, against hand-made DP-SGD."""

import copy
import json
import random

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from scipy import stats
from torch import nn
from toy import ToyData, ToyModule, ZeroNoise, checkpointing, privacy, trainer

from dprc_lightning import DPRCModule, PerformanceConfig
from dprc_lightning.accounting import Ledger
from dprc_lightning.datamodule import DPRCDataModule, LogicalBatch
from dprc_lightning.errors import (
    CheckpointError,
    ConfigurationError,
    LedgerError,
    StepOrderError,
    UnclippedGradientError,
    UnprotectedStrategyError,
    UnsupportedModuleError,
)
from dprc_lightning.keys import Domain, RunSecret
from dprc_lightning.report import read_report

pytestmark = pytest.mark.filterwarnings("ignore")


def clipped_sgd(net, data, batches, clip, expected):
    """One backward per record, clip, sum, divide by the EXPECTED batch size, SGD with learning rate 1."""
    for indices in batches:
        total = [torch.zeros_like(p) for p in net.parameters()]
        for i in indices:
            net.zero_grad()
            nn.functional.cross_entropy(net(data.x[i : i + 1]) * 5, data.y[i : i + 1]).backward()
            norm = torch.sqrt(sum(p.grad.square().sum() for p in net.parameters()))
            for t, p in zip(total, net.parameters(), strict=True):
                t += p.grad * min(clip / float(norm), 1.0)
        with torch.no_grad():
            for t, p in zip(total, net.parameters(), strict=True):
                p -= t / expected


class Batches(pl.Callback):
    def __init__(self):
        self.sampler = None

    def on_train_start(self, trainer, module):
        self.sampler = module.private_run.sampler()


@pytest.mark.parametrize("physical", [3, 100])
def test_steps_equal_dp_sgd_by_hand(tmp_path, physical):
    module, data, seen = ToyModule(privacy(), PerformanceConfig(physical_batch_size=physical)), ToyData(), Batches()
    reference = copy.deepcopy(module.net)
    trainer(tmp_path, ZeroNoise(), callbacks=[seen]).fit(module, datamodule=data)
    assert module.sequences == [0, 1, 2, 3]
    batches = [seen.sampler.batch(s).tolist() for s in range(4)]
    assert module.batch_sizes == [len(b) for b in batches] and len(set(map(tuple, batches))) > 1
    clipped_sgd(reference, data, batches, clip=0.5, expected=0.25 * 40)
    for p, q in zip(module.net.parameters(), reference.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=1e-5, atol=1e-6)


def test_the_threshold_changes_the_update(tmp_path):
    outcomes = []
    for clip in (0.5, 0.05):
        module = ToyModule(privacy(max_grad_norm=clip, sample_rate=1.0))
        start = copy.deepcopy(module.net.state_dict())
        trainer(tmp_path / str(clip), ZeroNoise()).fit(module, datamodule=ToyData())
        outcomes.append(sum((p - start[n]).square().sum() for n, p in module.net.state_dict().items()).sqrt())
    assert outcomes[1] < 0.3 * outcomes[0]


def test_noise_has_its_standard_deviation_and_one_draw_per_element(tmp_path):
    """Nothing but noise moves the parameters here: no record is ever drawn."""
    module = ToyModule(privacy(sample_rate=1e-9, noise_multiplier=0.8, steps=1), width=4000)
    start = copy.deepcopy(module.net.state_dict())
    trainer(tmp_path).fit(module, datamodule=ToyData())
    assert module.batch_sizes == [0]
    moved = torch.cat([(p - start[n]).flatten() for n, p in module.net.state_dict().items()]).double().numpy()
    std = 0.8 * 0.5 / (1e-9 * 40)  # sigma C / E[B], learning rate 1
    assert abs(moved.std() / std - 1) < 4 / np.sqrt(2 * len(moved))
    assert stats.kstest(moved / std, "norm").pvalue > 1e-4
    # float32 has 2^24 values per binade: a few of 24,002 draws coincide by chance, a repeated block would not.
    assert len(np.unique(moved)) > 0.99 * len(moved)


def test_an_empty_batch_is_a_step_like_any_other(tmp_path):
    module = ToyModule(privacy(sample_rate=1e-9, steps=3))
    before = copy.deepcopy(module.net.state_dict())
    run = trainer(tmp_path)
    run.fit(module, datamodule=ToyData())
    assert module.batch_sizes == [0, 0, 0]
    assert run.global_step == 3
    assert Ledger.open(tmp_path, read_only=True).steps == 3
    assert all(not torch.equal(p, before[n]) for n, p in module.net.state_dict().items())


def test_huge_noise_destroys_accuracy(tmp_path):
    def accuracy(sigma, name):
        module = ToyModule(privacy(noise_multiplier=sigma, steps=20, sample_rate=0.5, allow_large_delta=True))
        trainer(tmp_path / name).fit(module, datamodule=ToyData(400))
        data = ToyData(400)
        with torch.no_grad():
            return float((module.net(data.x).argmax(-1) == data.y).float().mean())

    assert accuracy(0.3, "little") > 0.9
    # A random boundary is right by luck now and then, eight of them in a row are not.
    assert min(accuracy(300.0, f"huge{i}") for i in range(8)) < 0.7


def test_the_users_seed_decides_nothing_private(tmp_path):
    """Same seed, two runs: other batches, other noise, other projections."""
    ends = []
    for name in ("a", "b"):
        pl.seed_everything(7, verbose=False)
        module = ToyModule(privacy(estimator="hutchinson", sketch_dim=32))
        trainer(tmp_path / name).fit(module, datamodule=ToyData())
        ends.append(torch.cat([p.detach().flatten() for p in module.net.parameters()]))
    assert not torch.allclose(ends[0], ends[1], atol=1e-3)
    # With the noise gone, batches and projections still differ.
    ends = []
    for name in ("c", "d"):
        pl.seed_everything(7, verbose=False)
        module = ToyModule(privacy(estimator="hutchinson", sketch_dim=32, sample_rate=1.0, steps=1))
        trainer(tmp_path / name, ZeroNoise()).fit(module, datamodule=ToyData())
        ends.append(torch.cat([p.detach().flatten() for p in module.net.parameters()]))
    assert not torch.allclose(ends[0], ends[1], atol=1e-5)


def test_projection_batch_and_ledger_share_their_numbers(tmp_path):
    module = ToyModule(privacy(estimator="hutchinson", sketch_dim=32))
    begun = []

    class Watch(pl.Callback):
        def on_train_start(self, trainer, module):
            inner = module.handle._state.projections
            begin = inner.begin_step
            inner.begin_step = lambda index: (begun.append(index), begin(index))

    trainer(tmp_path, callbacks=[Watch()]).fit(module, datamodule=ToyData())
    assert begun == module.sequences == [0, 1, 2, 3]
    assert Ledger.open(tmp_path, read_only=True).next_sequence == 4


def test_dropout_masks_come_from_a_secret_stream(tmp_path):
    masks = []

    class Dropped(ToyModule):
        def per_sample_loss(self, batch):
            masks.append(nn.functional.dropout(torch.ones(64), 0.5))
            return super().per_sample_loss(batch)

    for name in ("a", "b"):
        pl.seed_everything(7, verbose=False)
        trainer(tmp_path / name, ZeroNoise()).fit(
            Dropped(privacy(sample_rate=1.0, steps=1), PerformanceConfig(physical_batch_size=40)), datamodule=ToyData()
        )
    # check_isolation draws as the step itself does, and uses nothing up.
    assert len(masks) == 10 and all(torch.equal(masks[0], mask) for mask in masks[1:5])
    assert not torch.equal(masks[0], masks[5])


@pytest.mark.parametrize("workers", [0, 1])
def test_what_the_data_set_draws_comes_from_a_secret_stream(tmp_path, workers):
    class Augmented(ToyData):
        def train_dataset(self):
            data = super().train_dataset()

            class Noisy:
                def __len__(self):
                    return len(data)

                def __getitem__(self, index):
                    x, y = data[index]
                    return x + torch.tensor([np.random.rand(), random.random(), torch.rand(()).item()]).float(), y

            return Noisy()

    seen = []

    class Looks(ToyModule):
        def per_sample_loss(self, batch):
            seen.append(batch[0].clone())
            return super().per_sample_loss(batch)

    performance = PerformanceConfig(physical_batch_size=40, num_workers=workers)
    settings = privacy(sample_rate=1.0, steps=2, check_isolation=False)
    for name in ("a", "b"):
        pl.seed_everything(7, verbose=False)
        trainer(tmp_path / name, ZeroNoise()).fit(Looks(settings, performance), datamodule=Augmented())
    assert len(seen) == 4
    for i in range(3):
        assert not (seen[i] == seen[3]).any(), "a step's draws must not repeat, whatever the seed"


def test_schedulers_step_once_per_logical_step(tmp_path):
    class Scheduled(ToyModule):
        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]

    module = Scheduled(privacy())
    run = trainer(tmp_path, ZeroNoise())
    run.fit(module, datamodule=ToyData())
    assert run.strategy.lr_scheduler_configs[0].scheduler.get_last_lr() == [0.5**4]


class TestBaseline:
    def test_it_neither_clips_nor_spends_and_says_so(self, tmp_path, capsys):
        module, data = ToyModule(privacy(baseline_without_privacy=True, sample_rate=1.0, steps=1)), ToyData()
        reference = copy.deepcopy(module.net)
        trainer(tmp_path).fit(module, datamodule=data)
        nn.functional.cross_entropy(reference(data.x) * 5, data.y).backward()
        with torch.no_grad():
            for p, q in zip(module.net.parameters(), reference.parameters(), strict=True):
                assert torch.allclose(p, q - q.grad, atol=1e-6)
        report = read_report(tmp_path)
        assert report["private"] is False and report["epsilon"] is None
        assert not (tmp_path / "ledger.jsonl").exists() and not (tmp_path / "secret.key").exists()
        assert "NOT PRIVATE" in capsys.readouterr().out
        assert "NOT PRIVATE" in (tmp_path / "report.md").read_text()


class TestReport:
    def test_what_it_holds(self, tmp_path, capsys):
        module = ToyModule(privacy(estimator="hutchinson", sketch_dim=32))
        run = trainer(tmp_path, limit_val_batches=1.0)
        run.fit(module, datamodule=ToyData())
        run.test(module, datamodule=ToyData(), verbose=False)
        report = read_report(tmp_path)
        epsilon = report["epsilon"]
        assert 0 < epsilon["lower"] <= epsilon["estimate"] <= epsilon["upper"] and epsilon["delta"] == 1e-3
        assert report["steps"] == 4 and report["private"] and report["status"] == "finished"
        assert {p["parameter"]: p["estimator"] for p in report["parameters"]} == {
            "net.0.weight": "hutchinson",
            "net.0.bias": "exact",
            "net.2.weight": "hutchinson",
            "net.2.bias": "exact",
        }
        assert {"val/accuracy", "test/accuracy"} <= set(report["metrics"])
        assert report["cost"]["measured_steps"] == 4 and report["cost"]["peak_memory_bytes"] > 1e7
        text = (tmp_path / "report.md").read_text()
        assert f"{epsilon['upper']:.4f}" in text and "net.{0,2}.weight" in text
        said = capsys.readouterr().out
        assert f"upper {epsilon['upper']:.4f}" in said

    def test_a_test_stream_is_named(self, tmp_path):
        trainer(tmp_path, ZeroNoise()).fit(ToyModule(privacy()), datamodule=ToyData())
        report = read_report(tmp_path)
        assert not report["private"] and "tests" in report["not_private_because"]

    def test_an_error_in_the_middle(self, tmp_path):
        module = ToyModule(privacy())
        module.fail_at = 2
        with pytest.raises(RuntimeError, match="switched off"):
            trainer(tmp_path).fit(module, datamodule=ToyData())
        report = read_report(tmp_path)
        assert report["steps"] == 2 and report["status"] == "stopped by RuntimeError"
        assert report["epsilon"]["upper"] > 0

    def test_no_secret_leaves_its_file(self, tmp_path):
        module = ToyModule(privacy())
        trainer(tmp_path, **checkpointing(tmp_path)).fit(module, datamodule=ToyData())
        secret = (tmp_path / "secret.key").read_bytes()
        assert len(secret) == 32
        files = [f for f in tmp_path.rglob("*") if f.is_file() and f.name != "secret.key"]
        assert any(f.suffix == ".ckpt" for f in files)
        for file in files:
            content = file.read_bytes()
            assert secret not in content and secret.hex().encode() not in content, file


class TestResume:
    def interrupted(self, folder):
        module = ToyModule(privacy())
        module.fail_at = 3
        with pytest.raises(RuntimeError):
            trainer(folder, **checkpointing(folder)).fit(module, datamodule=ToyData())
        return module

    def test_it_goes_on_with_new_numbers_and_stops_within_the_budget(self, tmp_path):
        self.interrupted(tmp_path)
        sampling = RunSecret.load(tmp_path).subkey(Domain.SAMPLING)
        again = ToyModule(privacy())
        # Step 2 is in the ledger but in no checkpoint: it is spent, and must not be drawn again.
        checkpoint = tmp_path / "checkpoints" / "step=2.ckpt"
        assert checkpoint.exists() and not (tmp_path / "checkpoints" / "step=3.ckpt").exists()
        run = trainer(tmp_path, **checkpointing(tmp_path))
        run.fit(again, datamodule=ToyData(), ckpt_path=checkpoint, weights_only=True)
        assert again.sequences == [3]
        assert Ledger.open(tmp_path, read_only=True).steps == 4
        assert RunSecret.load(tmp_path).subkey(Domain.SAMPLING) == sampling, "the same run goes on with its own secret"

    @pytest.mark.parametrize("failed_at", [5, 9])
    def test_the_whole_budget_is_used_over_epochs(self, tmp_path, failed_at):
        """Four steps an epoch, twelve in the budget; the run dies in its second or third epoch."""
        module = ToyModule(privacy(steps=12))
        module.fail_at = failed_at
        every_epoch = {"callbacks": [ModelCheckpoint(tmp_path / "checkpoints", filename="{step}")]}
        with pytest.raises(RuntimeError):
            trainer(tmp_path, enable_checkpointing=True, **every_epoch).fit(module, datamodule=ToyData())
        (checkpoint,) = (tmp_path / "checkpoints").glob("step=*.ckpt")
        again = ToyModule(privacy(steps=12))
        trainer(tmp_path).fit(again, datamodule=ToyData(), ckpt_path=checkpoint, weights_only=True)
        assert again.sequences == list(range(failed_at, 12))
        assert "1 steps were lost" in read_report(tmp_path)["status"]

    def test_a_fresh_start_in_a_used_folder_is_refused(self, tmp_path):
        self.interrupted(tmp_path)
        with pytest.raises(Exception, match="choose another"):
            trainer(tmp_path).fit(ToyModule(privacy()), datamodule=ToyData())
        assert Ledger.open(tmp_path, read_only=True).steps == 3

    def test_another_mechanism_is_refused(self, tmp_path):
        self.interrupted(tmp_path)
        for changes in ({"noise_multiplier": 0.5}, {"sample_rate": 0.1}):
            with pytest.raises(ConfigurationError, match="configuration it began with"):
                trainer(tmp_path).fit(
                    ToyModule(privacy(**changes)),
                    datamodule=ToyData(),
                    ckpt_path=tmp_path / "checkpoints" / "step=2.ckpt",
                    weights_only=True,
                )

    def test_a_missing_or_shortened_ledger_is_refused(self, tmp_path):
        self.interrupted(tmp_path)
        checkpoint = tmp_path / "checkpoints" / "step=2.ckpt"
        ledger = tmp_path / "ledger.jsonl"
        lines = ledger.read_text().splitlines(keepends=True)
        ledger.write_text("".join(lines[:2]))
        with pytest.raises(LedgerError, match="does not contain"):
            trainer(tmp_path).fit(ToyModule(privacy()), datamodule=ToyData(), ckpt_path=checkpoint, weights_only=True)
        ledger.unlink()
        with pytest.raises(LedgerError, match=r"no ledger\.jsonl"):
            trainer(tmp_path).fit(ToyModule(privacy()), datamodule=ToyData(), ckpt_path=checkpoint, weights_only=True)

    def test_a_checkpoint_that_is_not_of_a_private_run(self, tmp_path):
        self.interrupted(tmp_path / "a")
        other = ToyModule(privacy(baseline_without_privacy=True))
        trainer(tmp_path / "b", **checkpointing(tmp_path / "b")).fit(other, datamodule=ToyData())
        with pytest.raises(ConfigurationError, match="not a checkpoint of a private run"):
            trainer(tmp_path / "a").fit(
                ToyModule(privacy()),
                datamodule=ToyData(),
                ckpt_path=tmp_path / "b" / "checkpoints" / "step=4.ckpt",
                weights_only=True,
            )

    def test_a_start_that_failed_does_not_spoil_its_folder(self, tmp_path):
        class Bad(ToyModule):
            def configure_optimizers(self):
                return [torch.optim.SGD(self.parameters(), lr=1.0) for _ in range(2)]

        with pytest.raises(ConfigurationError, match="max_steps"):
            trainer(tmp_path, max_steps=3).fit(Bad(privacy()), datamodule=ToyData())
        with pytest.raises(ConfigurationError, match="exactly one"):
            trainer(tmp_path).fit(Bad(privacy()), datamodule=ToyData())
        assert not (tmp_path / "ledger.jsonl").exists()
        trainer(tmp_path).fit(ToyModule(privacy()), datamodule=ToyData())


def test_gradients_from_elsewhere_do_not_enter_a_step(tmp_path):
    class Stale(pl.Callback):
        def on_train_batch_start(self, trainer, module, *_):
            for p in module.parameters():
                p.grad = torch.full_like(p, 1e3)

    module = ToyModule(privacy(sample_rate=1e-9, steps=1))
    before = copy.deepcopy(module.net.state_dict())
    trainer(tmp_path, ZeroNoise(), callbacks=[Stale()]).fit(module, datamodule=ToyData())
    assert all(torch.equal(p, before[n]) for n, p in module.net.state_dict().items())


class TestRefusals:
    def test_an_unprotected_strategy(self, tmp_path):
        with pytest.raises(UnprotectedStrategyError, match="dprc_single"):
            trainer(tmp_path, strategy="auto").fit(ToyModule(privacy()), datamodule=ToyData())

    def test_a_module_that_is_none_of_ours(self, tmp_path):
        class Ordinary(pl.LightningModule):
            def training_step(self, batch, batch_idx):
                return None

            def configure_optimizers(self):
                return None

        with pytest.raises(ConfigurationError, match="DPRCModule"):
            trainer(tmp_path).fit(Ordinary(), train_dataloaders=[0])

    def test_all_problems_at_once(self, tmp_path):
        bad = privacy(delta=0.5, max_grad_norm=-1.0, epochs=3, noise_multiplier=None)
        module = ToyModule(bad, PerformanceConfig(physical_batch_size=0))
        with pytest.raises(ConfigurationError) as caught:
            trainer(tmp_path, max_steps=2).fit(module, datamodule=ToyData())
        message = str(caught.value)
        for part in (
            "privacy.delta=0.5",
            "privacy.max_grad_norm=-1.0",
            "privacy.steps or privacy.epochs: both",
            "privacy.epsilon or privacy.noise_multiplier: neither",
            "performance.physical_batch_size=0",
            "trainer.max_steps=2",
        ):
            assert part in message
        assert not list(tmp_path.glob("*"))

    def test_a_plain_loader(self, tmp_path):
        with pytest.raises(ConfigurationError, match="DPRCDataModule"):
            trainer(tmp_path).fit(ToyModule(privacy()), train_dataloaders=[0])

    def test_two_optimizers(self, tmp_path):
        class Two(ToyModule):
            def configure_optimizers(self):
                return [torch.optim.SGD(m.parameters(), lr=1.0) for m in (self.net[0], self.net[2])]

        with pytest.raises(ConfigurationError, match="exactly one"):
            trainer(tmp_path).fit(Two(privacy()), datamodule=ToyData())

    def test_a_step_of_the_users_own(self, tmp_path):
        class Own(pl.Callback):
            def on_train_batch_end(self, trainer, module, *_):
                trainer.optimizers[0].step()

        with pytest.raises(UnclippedGradientError, match="outside of the library"):
            trainer(tmp_path, callbacks=[Own()]).fit(ToyModule(privacy()), datamodule=ToyData())

    def test_a_backward_of_the_users_own(self, tmp_path):
        class Own(ToyModule):
            def per_sample_loss(self, batch):
                super().per_sample_loss(batch).sum().backward()
                return super().per_sample_loss(batch)

        with pytest.raises(UnclippedGradientError, match="not clipped"):
            trainer(tmp_path).fit(Own(privacy(sample_rate=1.0)), datamodule=ToyData())

    def test_an_optimizer_that_does_not_fit(self, tmp_path):
        class Short(ToyModule):
            def configure_optimizers(self):
                stranger = nn.Parameter(torch.zeros(2))
                return torch.optim.SGD([*self.net[0].parameters(), stranger], lr=1.0)

        with pytest.raises(ConfigurationError) as caught:
            trainer(tmp_path).fit(Short(privacy()), datamodule=ToyData())
        for part in ("'net.2.bias' is trainable but not in the optimizer", "'of no module'"):
            assert part in str(caught.value)

    def test_a_layer_that_joins_without_the_optimizer(self, tmp_path):
        """LoRA attached after set-up, say: it would be clipped and never stepped."""

        class Grow(pl.Callback):
            def on_train_batch_start(self, trainer, module, *_):
                module.net.append(nn.Linear(2, 2))

        with pytest.raises(UnclippedGradientError, match="2 trainable parameters are not in the optimizer"):
            trainer(tmp_path, callbacks=[Grow()]).fit(ToyModule(privacy(sample_rate=1.0)), datamodule=ToyData())

    def test_a_parameter_unfrozen_within_the_step(self, tmp_path):
        class Late(ToyModule):
            def per_sample_loss(self, batch):
                self.net[0].requires_grad_(True)
                return super().per_sample_loss(batch)

        module = Late(privacy(sample_rate=1.0))
        module.net[0].requires_grad_(False)
        with pytest.raises(UnsupportedModuleError, match=r"'net\.0\.weight' became trainable"):
            trainer(tmp_path).fit(module, datamodule=ToyData())

    def test_float16(self, tmp_path):
        with pytest.raises(ConfigurationError, match=r"trainer\.precision=16-true: .*loss scaling.*bf16-mixed"):
            trainer(tmp_path, precision="16-true").fit(ToyModule(privacy()), datamodule=ToyData())

    def test_a_batch_of_another_step(self, tmp_path):
        class Foreign(ToyModule):
            def training_step(self, batch, batch_idx):
                super().training_step(LogicalBatch(batch.sequence + 1, batch.micro_batches, batch.counts), batch_idx)

        with pytest.raises(StepOrderError, match="ledger is at step 0"):
            trainer(tmp_path).fit(Foreign(privacy()), datamodule=ToyData())

    def test_what_must_be_written(self):
        with pytest.raises(ConfigurationError, match="per_sample_loss"):
            DPRCModule(privacy()).per_sample_loss(None)
        with pytest.raises(ConfigurationError, match="train_dataset"):
            DPRCDataModule().train_dataset()


def test_the_model_is_an_ordinary_one_afterwards(tmp_path):
    module = ToyModule(privacy())
    trainer(tmp_path).fit(module, datamodule=ToyData())
    assert type(module.net[0]) is nn.Linear
    module.net(torch.randn(2, 3)).sum().backward()


def test_the_ledger_is_written_before_anything_of_the_step_happens(tmp_path):
    seen = []

    class Watch(ToyModule):
        def per_sample_loss(self, batch):
            lines = (tmp_path / "ledger.jsonl").read_text().splitlines()
            seen.append((len(self.sequences), json.loads(lines[-1])["sequence"]))
            return super().per_sample_loss(batch)

    trainer(tmp_path).fit(Watch(privacy(sample_rate=1.0)), datamodule=ToyData())
    assert {s for s in seen} == {(i, i - 1) for i in range(1, 5)}


def test_workers_prepare_the_same_batches(tmp_path):
    module = ToyModule(privacy(), PerformanceConfig(physical_batch_size=3, num_workers=1))
    seen = Batches()
    trainer(tmp_path, ZeroNoise(), callbacks=[seen]).fit(module, datamodule=ToyData())
    assert module.sequences == [0, 1, 2, 3]
    assert module.batch_sizes == [len(seen.sampler.batch(s)) for s in range(4)]


def test_weights_whose_noise_is_missing_are_not_saved(tmp_path):
    """The update comes before the look at its noise: what it left must not reach the disk."""

    class Unhooked(ToyModule):
        def on_train_start(self):
            # As an engine does that puts an optimizer of its own in the place of this one.
            self.optimizers().optimizer._optimizer_step_pre_hooks.clear()

    saving = ModelCheckpoint(tmp_path / "checkpoints", save_on_exception=True)
    run = trainer(tmp_path, enable_checkpointing=True, callbacks=[saving])
    with pytest.raises((StepOrderError, CheckpointError)):
        run.fit(Unhooked(privacy()), datamodule=ToyData())
    assert not list(tmp_path.rglob("*.ckpt"))
    with pytest.raises(CheckpointError, match="may hold one without noise"):
        run.save_checkpoint(tmp_path / "by_hand.ckpt")
