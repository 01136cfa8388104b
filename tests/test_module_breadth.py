"""Under Lightning: precision, records that are not finite, isolation, freezing in the middle of a run."""

import copy

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from toy import ToyData, ToyModule, ZeroNoise, privacy, trainer

from dprc_lightning import PerformanceConfig
from dprc_lightning.clipping.two_pass import HALF_NORM_SLACK
from dprc_lightning.errors import (
    ConfigurationError,
    IsolationError,
    LossShapeError,
    NonFiniteRecordError,
    StepOrderError,
    UnusedParameterError,
)
from dprc_lightning.report import read_report


class TestPrecision:
    @pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
    def test_bfloat16(self, tmp_path, precision):
        class Float32Losses(ToyModule):
            def per_sample_loss(self, batch):
                x, y = batch
                return nn.functional.cross_entropy(self.net(x).float() * 5, y, reduction="none")

        outcomes = {}
        for chosen in ("32-true", precision):
            module = Float32Losses(privacy(sample_rate=1.0, steps=3))
            start = copy.deepcopy(module.net.state_dict())
            trainer(tmp_path / chosen, ZeroNoise(), precision=chosen).fit(module, datamodule=ToyData())
            report = read_report(tmp_path / chosen)
            outcomes[chosen] = torch.cat([(p.float() - start[n]).flatten() for n, p in module.net.state_dict().items()])
            assert report["mechanism"]["norm_slack"] == (0.0 if chosen == "32-true" else HALF_NORM_SLACK)
            assert report["private"] is False or report["epsilon"]["upper"] > 0
        full, half = outcomes["32-true"], outcomes[precision]
        assert float((full - half).norm() / full.norm()) < 0.05

    def test_float64(self, tmp_path):
        class Double(ToyModule):
            def per_sample_loss(self, batch):
                return super().per_sample_loss([batch[0].double(), batch[1]])

        module = Double(privacy(sample_rate=1.0, steps=1))
        trainer(tmp_path, precision="64-true").fit(module, datamodule=ToyData())
        assert module.net[0].weight.dtype is torch.float64

    def test_given_slack_is_reported_and_noise_stays(self, tmp_path):
        module = ToyModule(privacy(sample_rate=1.0, steps=1, norm_slack=0.5))
        start = copy.deepcopy(module.net.state_dict())
        trainer(tmp_path, ZeroNoise()).fit(module, datamodule=ToyData())
        assert read_report(tmp_path)["mechanism"]["norm_slack"] == 0.5
        moved = torch.cat([(p - start[n]).flatten() for n, p in module.net.state_dict().items()])
        assert float(moved.norm()) <= 0.5 * 0.5 * (1 + 1e-5)


class Broken(ToyModule):
    """Records of one value of x are not finite."""

    def per_sample_loss(self, batch):
        x, y = batch
        losses = super().per_sample_loss(batch)
        return losses * torch.where(x[:, 0] > 1.5, float("nan"), 1.0)


class TestNonFinite:
    def test_dropped_and_counted(self, tmp_path):
        data = ToyData()
        bad = data.x[:, 0] > 1.5
        assert 0 < int(bad.sum()) < 10
        settings = privacy(sample_rate=1.0, steps=1, on_nonfinite="drop")
        module = Broken(settings)
        run = trainer(tmp_path / "a", ZeroNoise())
        run.fit(module, datamodule=data)
        assert run.callback_metrics["clip/dropped"] == float(bad.sum())
        assert torch.isfinite(run.callback_metrics["train/loss"])
        report = read_report(tmp_path / "a")
        assert report["dropped_records"] == int(bad.sum()) and report["on_nonfinite"] == "drop"
        trainer(tmp_path / "noised").fit(Broken(settings), datamodule=data)
        assert f"are dropped: {int(bad.sum())} times" in (tmp_path / "noised" / "report.md").read_text()
        # The same as if those records had a loss of zero.
        reference = ToyModule(settings)
        reference.per_sample_loss = lambda batch: (
            ToyModule.per_sample_loss(reference, batch) * (batch[0][:, 0] <= 1.5).float()
        )
        trainer(tmp_path / "b", ZeroNoise()).fit(reference, datamodule=data)
        for p, q in zip(module.net.parameters(), reference.net.parameters(), strict=True):
            assert torch.allclose(p, q, rtol=1e-6, atol=1e-7)

    def test_raised_by_default(self, tmp_path):
        with pytest.raises(NonFiniteRecordError, match="on_nonfinite=drop"):
            trainer(tmp_path).fit(Broken(privacy(sample_rate=1.0)), datamodule=ToyData())


class Mixing(ToyModule):
    def per_sample_loss(self, batch):
        x, y = batch
        return super().per_sample_loss([x - x.mean(0), y])


class TestIsolation:
    def test_found_in_the_first_step(self, tmp_path):
        module = Mixing(privacy(sample_rate=1.0))
        start = copy.deepcopy(module.net.state_dict())
        with pytest.raises(IsolationError, match="ANOTHER record"):
            trainer(tmp_path).fit(module, datamodule=ToyData())
        assert all(torch.equal(p, start[n]) for n, p in module.net.state_dict().items())

    def test_turned_off(self, tmp_path):
        trainer(tmp_path).fit(Mixing(privacy(sample_rate=1.0, check_isolation=False)), datamodule=ToyData())

    def test_it_waits_for_two_records(self, tmp_path):
        """Micro-batches of one record cannot mix; the check stays due."""
        module = Mixing(privacy(sample_rate=1.0, steps=2), PerformanceConfig(physical_batch_size=1))
        trainer(tmp_path).fit(module, datamodule=ToyData())
        assert not module._isolation_checked

    def test_the_step_is_what_it_would_be_without(self, tmp_path):
        class Dropout(ToyModule):
            def per_sample_loss(self, batch):
                x, y = batch
                return super().per_sample_loss([nn.functional.dropout(x, 0.5), y])

        outcomes = []
        for checked in (True, False):
            module = Dropout(privacy(sample_rate=1.0, steps=1, check_isolation=checked))
            run = trainer(tmp_path / str(checked), ZeroNoise())
            original = module._begin_step

            def begin(batch, module=module, original=original):
                micro_batches = original(batch)
                # One secret for both runs.
                torch.manual_seed(0)
                return micro_batches

            module._begin_step = begin
            module.training_step = _with_fixed_dropout(module)
            run.fit(module, datamodule=ToyData())
            outcomes.append(torch.cat([p.detach().flatten() for p in module.net.parameters()]))
        assert torch.equal(*outcomes)


def _with_fixed_dropout(module):
    import dprc_lightning.module as module_file

    def step(batch, batch_idx):
        original = module_file.secret_dropout
        module_file.secret_dropout = lambda key, device: original(bytes(32), device)
        try:
            return ToyModule.training_step(module, batch, batch_idx)
        finally:
            module_file.secret_dropout = original

    return step


class TestShapes:
    @pytest.mark.parametrize("shape", ["per token", "mean", "column"])
    def test_one_loss_per_record(self, tmp_path, shape):
        class Wrong(ToyModule):
            def per_sample_loss(self, batch):
                losses = super().per_sample_loss(batch)
                return {"per token": losses.repeat(2), "mean": losses.mean(), "column": losses.unsqueeze(1)}[shape]

        with pytest.raises(LossShapeError, match=r"per_sample_loss returned shape .* for 3 records"):
            trainer(tmp_path).fit(Wrong(privacy(sample_rate=1.0, check_isolation=False)), datamodule=ToyData())


class TestUnused:
    def test_named_at_once_or_noised(self, tmp_path):
        class Spare(ToyModule):
            def __init__(self, *args, **kwargs):
                super().__init__(*args, **kwargs)
                self.spare = nn.Linear(2, 2)

        with pytest.raises(UnusedParameterError, match=r"'spare\.weight', 'spare\.bias'"):
            trainer(tmp_path / "a").fit(Spare(privacy(sample_rate=1.0)), datamodule=ToyData())
        module = Spare(privacy(sample_rate=1.0, steps=1, unused="zero"))
        before = copy.deepcopy(module.spare.weight)
        trainer(tmp_path / "b").fit(module, datamodule=ToyData())
        assert not torch.equal(before, module.spare.weight)


class Thaw(pl.callbacks.BaseFinetuning):
    """Lightning's own callback: the first layer joins with the second epoch."""

    def freeze_before_training(self, module):
        self.freeze(module.net[0])

    def finetune_function(self, module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.net[0], optimizer, lr=1.0)


class TestFreezing:
    def test_a_layer_joins_in_the_second_epoch(self, tmp_path):
        class Followed(ToyModule):
            def __init__(self, *args):
                super().__init__(*args)
                self.changed = []

            def training_step(self, batch, batch_idx):
                before = copy.deepcopy(self.net.state_dict())
                super().training_step(batch, batch_idx)
                self.changed.append({n for n, p in self.net.state_dict().items() if not torch.equal(p, before[n])})

        module = Followed(privacy(sample_rate=0.5, steps=4))
        trainer(tmp_path, callbacks=[Thaw()]).fit(module, datamodule=ToyData())
        top = {"2.weight", "2.bias"}
        assert module.changed == [top, top, top | {"0.weight", "0.bias"}, top | {"0.weight", "0.bias"}]
        report = read_report(tmp_path)
        assert report["epsilon"]["upper"] > 0
        assert {row["parameter"] for row in report["parameters"]} == {f"net.{n}" for n in module.changed[-1]}

    def test_a_layer_that_freezes_keeps_still(self, tmp_path):
        class Freeze(pl.Callback):
            def on_train_batch_start(self, trainer, module, batch, batch_idx):
                module.net[2].requires_grad_(trainer.global_step < 1)

        module = ToyModule(privacy(sample_rate=0.5, steps=3))
        seen = []

        class Look(pl.Callback):
            def on_train_batch_end(self, trainer, module, *_):
                seen.append(module.net[2].weight.detach().clone())

        trainer(tmp_path, callbacks=[Freeze(), Look()]).fit(module, datamodule=ToyData())
        assert torch.equal(seen[0], seen[1]) and torch.equal(seen[1], seen[2])

    def test_a_layer_that_freezes_after_its_backward_gets_its_noise(self, tmp_path):
        class Freeze(pl.Callback):
            def on_after_backward(self, trainer, module):
                module.net[0].requires_grad_(False)

        module = ToyModule(privacy(sample_rate=1.0, steps=1, noise_multiplier=1e6), PerformanceConfig(64))
        start = copy.deepcopy(module.net.state_dict())
        trainer(tmp_path, callbacks=[Freeze()]).fit(module, datamodule=ToyData())
        moved = [float((p - start[n]).norm()) for n, p in module.net.state_dict().items()]
        assert min(moved) > 1e3, moved


def test_a_training_step_of_ones_own(tmp_path):
    class Own(ToyModule):
        def training_step(self, batch, batch_idx):
            return None

    with pytest.raises(StepOrderError, match=r"Own\.training_step made no private step"):
        trainer(tmp_path).fit(Own(privacy()), datamodule=ToyData())


def test_settings_are_checked_together(tmp_path):
    with pytest.raises(ConfigurationError) as caught:
        trainer(tmp_path).fit(ToyModule(privacy(norm_slack=1.0, max_grad_norm=0.0)), datamodule=ToyData())
    assert len(caught.value.problems) == 2 and "privacy.norm_slack=1.0" in str(caught.value)
