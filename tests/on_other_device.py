"""P, clipping, noise and streams on a device that is not the CPU: the same numbers, and nothing left on the host.

Run by test_other_device.py, in a process of its own: torch believes in the device for as long as the process lives.
"""

import architectures
import pytest
import torch
from cases import CASES, make
from lightning.pytorch.accelerators import CPUAccelerator
from other_device import DEVICE, OnDevice, other_device
from toy import ToyData, ToyModule, privacy, share_secret, trainer

from dprc_lightning import add_gaussian_noise, attach
from dprc_lightning.keys import derive
from dprc_lightning.noise import NoiseStream
from dprc_lightning.sketch.projection import GaussianProjections
from dprc_lightning.sketch.rademacher import RademacherProjections
from dprc_lightning.strategies import PrivateSingleDeviceStrategy

MODELS = [
    *CASES,
    architectures.case("gpt2"),
    architectures.case("bert", checkpointing=True),
    architectures.case("vit"),
    architectures.case("llama", checkpointing=True, lora={"target_modules": ["q_proj", "v_proj"]}),
]
SKETCHES = {
    "exact": {"estimator": "exact"},
    "gaussian": {"estimator": "hutchinson", "projections": lambda: GaussianProjections(bytes(32), 4)},
    "rademacher": {"estimator": "hutchinson", "projections": lambda: RademacherProjections(bytes(32), 4)},
}


def step(case, device, sketch):
    """One noised step of SGD; on which device what came out lies, and what it is."""
    model, batch = make(case)
    model, batch = model.to(device), {name: value.to(device) for name, value in batch.items()}
    handle = attach(model, **sketch)
    handle.begin_step()
    losses = case.losses(model, batch)
    handle.clipped_backward(losses, max_grad_norm=0.5)
    trainable = [p for p in model.parameters() if p.requires_grad]
    add_gaussian_noise(trainable, 0.01, generator=NoiseStream.for_testing(7))
    gradients = [p.grad.cpu() for p in trainable]
    torch.optim.SGD(trainable, lr=0.1).step()
    return {p.device for p in trainable} | {p.grad.device for p in trainable}, gradients


@pytest.mark.parametrize("sketch", SKETCHES)
@pytest.mark.parametrize("case", MODELS, ids=[f"{i}-{case.name}" for i, case in enumerate(MODELS)])
def test_a_step_is_that_of_the_cpu(case, sketch):
    settings = dict(SKETCHES[sketch])
    make_projections = settings.pop("projections", None)
    results = []
    for where in ("cpu", DEVICE):
        if make_projections is not None:
            settings["projections"] = make_projections()
        if where == "cpu":
            results.append(step(case, where, settings))
        else:
            with other_device():
                results.append(step(case, where, settings))
    (_, expected), (devices, found) = results
    assert devices == {DEVICE}
    assert not any(isinstance(gradient, OnDevice) for gradient in found)
    for a, b in zip(expected, found, strict=True):
        # The CPU has an attention kernel of its own, which rounds otherwise.
        assert float((a - b).abs().max()) < 1e-6 * float(a.abs().max())


def test_an_operand_on_the_host_is_noticed():
    with other_device(), pytest.raises(RuntimeError, match="an operand"):
        torch.ones(3, device=DEVICE) * torch.ones(3)


@pytest.mark.parametrize("device", ["cpu", "meta", DEVICE])
@pytest.mark.parametrize("kind", [GaussianProjections, RademacherProjections])
def test_a_projection_is_made_where_it_is_wanted(kind, device):
    with other_device():
        projections = kind(derive(bytes(32), "test"), 3)
        projections.begin_step(0)
        matrix = projections.matrix("weight", 5000, torch.device(device))
        rows = matrix if isinstance(matrix, torch.Tensor) else matrix.rows(0, 4096)
        product = torch.ones(2, len(rows), device=device) @ rows
    assert product.shape == (2, 3) and product.device.type == torch.device(device).type


@pytest.mark.parametrize("shape", [(7,), (3, 5)])
def test_noise_goes_to_meta_and_counts_as_drawn(shape):
    parameter = torch.nn.Parameter(torch.zeros(shape, device="meta"))
    parameter.grad = torch.zeros(shape, device="meta")
    stream = NoiseStream.for_testing(1)
    add_gaussian_noise([parameter], 1.0, generator=stream)
    assert parameter.grad.shape == shape and parameter.grad.device.type == "meta"
    # The stream went on: the next draw is not its first.
    assert not torch.equal(stream.normal(4), NoiseStream.for_testing(1).normal(4))


class OtherAccelerator(CPUAccelerator):
    def setup_device(self, device):
        assert device == DEVICE


@pytest.mark.parametrize("estimator", ["exact", "hutchinson"])
def test_training_there_is_that_on_the_cpu(tmp_path, monkeypatch, estimator):
    """Batches, dropout, projections, noise and the books, for whole runs with one secret."""
    modules = []
    for where in ("cpu", DEVICE):
        folder = tmp_path / torch.device(where).type
        if modules:
            share_secret(monkeypatch, tmp_path / "cpu")
        module = ToyModule(privacy(estimator=estimator, sketch_dim=4))
        module.net.insert(1, torch.nn.Dropout(0.3))
        strategy = PrivateSingleDeviceStrategy(device=where, noise_stream=NoiseStream.for_testing(3))
        accelerator = "cpu" if where == "cpu" else OtherAccelerator()
        run = trainer(folder, strategy=strategy, accelerator=accelerator)
        with other_device():
            run.fit(module, datamodule=ToyData())
        modules.append(module)
    assert modules[0].batch_sizes == modules[1].batch_sizes
    for a, b in zip(modules[0].parameters(), modules[1].parameters(), strict=True):
        assert torch.equal(a, b.cpu())
