"""Code of one's own that reaches into a step: what could add something without noise is refused."""

import copy

import pytest
import torch
from toy import ToyData, ToyModule, ZeroNoise, privacy, trainer

from dprc_lightning.accounting import Ledger
from dprc_lightning.errors import ConfigurationError, UnclippedGradientError, UnsupportedModuleError
from dprc_lightning.noise import NoiseStream
from dprc_lightning.report import read_report

pytestmark = pytest.mark.filterwarnings("ignore")


def fit(folder, module, noise=None, **changes):
    trainer(folder, noise, **changes).fit(module, datamodule=ToyData())


class AfterBackward(ToyModule):
    def on_after_backward(self):
        for p in self.parameters():
            p.grad.mul_(100)


class Replaces(ToyModule):
    def on_after_backward(self):
        for p in self.parameters():
            p.grad = p.grad * 100


class BeforeTheUpdate(ToyModule):
    def on_before_optimizer_step(self, optimizer):
        for p in self.parameters():
            p.grad.add_(1.0)


class HookOfTheOptimizer(ToyModule):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()

        def grows(optimizer, *_):
            for p in self.parameters():
                p.grad.mul_(100)

        optimizer.register_step_pre_hook(grows)
        return optimizer


@pytest.mark.parametrize("kind", [AfterBackward, Replaces, BeforeTheUpdate, HookOfTheOptimizer])
def test_gradients_that_are_changed(tmp_path, kind):
    with pytest.raises(UnclippedGradientError, match="changed"):
        fit(tmp_path, kind(privacy(sample_rate=1.0)))
    assert not list(tmp_path.rglob("*.ckpt"))


def test_gradients_that_are_looked_at(tmp_path):
    class Looks(ToyModule):
        def on_before_optimizer_step(self, optimizer):
            self.norm = float(torch.stack([p.grad.norm() for p in self.parameters()]).norm())

    module = Looks(privacy())
    fit(tmp_path, module)
    assert module.norm > 0


class Remembers(ToyModule):
    """Keeps the mean of the records where every checkpoint has it."""

    def __init__(self, settings, when):
        super().__init__(settings)
        self.register_buffer("mean", torch.zeros(3))
        self.when = when

    def per_sample_loss(self, batch):
        self.batch = batch
        if self.when == "forward" and len(self.sequences) == 3:
            self.mean.copy_(batch[0].mean(0))
        return super().per_sample_loss(batch)

    def on_after_backward(self):
        if self.when == "backward" and len(self.sequences) == 3:
            self.mean.copy_(self.batch[0].mean(0))


@pytest.mark.parametrize("when", ["forward", "backward"])
def test_buffers_that_learn_of_the_records(tmp_path, when):
    module = Remembers(privacy(sample_rate=1.0), when)
    with pytest.raises(UnsupportedModuleError, match="'mean' was changed within the step"):
        fit(tmp_path, module)
    # The two whole steps before are lost with it: their checkpoint would hold the mean.
    assert not list(tmp_path.rglob("*.ckpt"))


def test_another_error_does_not_save_what_the_guards_would_refuse(tmp_path):
    class Fails(Remembers):
        def per_sample_loss(self, batch):
            losses = super().per_sample_loss(batch)
            if len(self.sequences) == 3:
                raise RuntimeError("out of memory")
            return losses

    with pytest.raises(RuntimeError, match="memory"):
        fit(tmp_path, Fails(privacy(sample_rate=1.0), "forward"))
    assert not list(tmp_path.rglob("*.ckpt"))


@pytest.mark.parametrize("stream", [NoiseStream.fresh, lambda: NoiseStream(bytes(32)), ZeroNoise])
def test_a_stream_that_was_given_is_not_private(tmp_path, stream):
    """Nobody knows who else has its key; and one of each rank's own would be added several times."""
    fit(tmp_path, ToyModule(privacy()), stream())
    assert read_report(tmp_path)["private"] is False
    assert Ledger.open(tmp_path, read_only=True).meta["not_private_because"]


def test_the_librarys_own_callbacks_are_needed(tmp_path):
    class Forgets(ToyModule):
        def configure_callbacks(self):
            return []

    with pytest.raises(ConfigurationError, match=r"configure_callbacks: it leaves out"):
        fit(tmp_path, Forgets(privacy()))
    assert not (tmp_path / "ledger.jsonl").exists()


def test_earlier_training_of_the_same_parameters_is_told(tmp_path):
    module = ToyModule(privacy())
    fit(tmp_path / "first", module)
    start = copy.deepcopy(module.net.state_dict())
    fit(tmp_path / "second", module)
    assert any(not torch.equal(p, start[n]) for n, p in module.net.state_dict().items())
    report = read_report(tmp_path / "second")
    assert report["earlier_runs"] == [str(tmp_path / "first")]
    assert any("first" in line and "on top" in line for line in report["assumptions"])


def test_nothing_of_the_batches_stays_in_the_report_if_it_must_not(tmp_path):
    fit(tmp_path, ToyModule(privacy(log_unprotected=False)))
    report = read_report(tmp_path)
    assert report["cost"] is None and report["dropped_records"] is None and report["logged_unprotected"] == []


def test_a_report_of_other_steps_than_the_ledgers_is_not_believed(tmp_path):
    fit(tmp_path, ToyModule(privacy()))
    stale = (tmp_path / "report.json").read_text()
    before = read_report(tmp_path)
    ledger = tmp_path / "ledger.jsonl"
    ledger.unlink()
    (tmp_path / "report.json").unlink()
    fit(tmp_path, ToyModule(privacy(noise_multiplier=0.5)))
    (tmp_path / "report.json").write_text(stale)
    now = read_report(tmp_path)
    assert now["epsilon"]["upper"] > 2 * before["epsilon"]["upper"] and "killed" in now["status"]
