"""Parameters that an engine keeps in a flat one, of which the modules see another view in each forward."""

import pytest
import torch
from cases import Case, brute_force, brute_force_clipped_sum, brute_force_norms
from torch import nn

from dprc_lightning import attach
from dprc_lightning.errors import UnclippedGradientError, UnsupportedModuleError
from dprc_lightning.layers import PerRecordRule, register_rule, unregister_rule
from dprc_lightning.layers.rule import replaced_parameters


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x):
        return x * self.weight


@pytest.fixture(autouse=True)
def _rule():
    rule = PerRecordRule(Scale)
    register_rule(rule)
    yield
    unregister_rule(rule)


def build():
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), Scale(), nn.Tanh(), nn.Linear(4, 4, bias=False))


CASE = Case("views", build, lambda: {"x": torch.randn(5, 3)}, lambda model, batch: model(batch["x"]).square().sum(1))


class Flat:
    """As FSDP1 does it: the parameters are slices, and a forward finds views where they were."""

    def __init__(self, model):
        self.places = [(m, n, p) for m in model.modules() for n, p in m._parameters.items() if p is not None]
        self.shapes = [p.shape for _, _, p in self.places]
        self.flat = nn.Parameter(torch.cat([p.detach().flatten() for _, _, p in self.places]))
        self.hide()

    def show(self):
        pieces = self.flat.split([shape.numel() for shape in self.shapes])
        for (module, name, _), piece, shape in zip(self.places, pieces, self.shapes, strict=True):
            module._parameters.pop(name, None)
            object.__setattr__(module, name, piece.view(shape))

    def hide(self):
        for module, name, parameter in self.places:
            parameter.data = torch.zeros(3)
            module._parameters[name] = parameter
            object.__setattr__(module, name, parameter)


@pytest.fixture
def attached():
    torch.manual_seed(0)
    model = build()
    batch = CASE.batch()
    gradients = brute_force(CASE, model, batch)
    handle = attach(model)
    flat = Flat(model)
    handle.follow_views([flat.flat])
    return model, batch, gradients, handle, flat


def test_norms_and_clipped_sum(attached):
    model, batch, gradients, handle, flat = attached
    for times in (1, 2):
        flat.show()
        losses = CASE.losses(model, batch)
        flat.hide()
        norms = handle.norms(losses)
        expected = brute_force_norms(gradients)
        assert torch.allclose(norms.double(), expected, rtol=1e-4)
        handle.clipped_backward(losses, max_grad_norm=0.5, norms=norms)
        sums = brute_force_clipped_sum(gradients, 0.5)
        whole = torch.cat([sums[name].flatten() for name, _ in model.named_parameters()])
        assert torch.allclose(flat.flat.grad.double(), times * whole, atol=1e-6)


def test_two_views_in_one_forward(attached):
    model, batch, _, handle, flat = attached
    twice = Case("twice", build, None, lambda m, b: (m(b["x"]) + m(b["x"] * 2)).square().sum(1))
    fresh = build()
    fresh.load_state_dict({n: v.view(s) for n, v, s in _pieces(model, flat)})
    gradients = brute_force(twice, fresh, batch)
    flat.show()
    first = model(batch["x"])
    flat.show()
    losses = (first + model(batch["x"] * 2)).square().sum(1)
    flat.hide()
    norms = handle.norms(losses)
    assert torch.allclose(norms.double(), brute_force_norms(gradients), rtol=1e-4)
    handle.clipped_backward(losses, max_grad_norm=0.5, norms=norms)
    sums = brute_force_clipped_sum(gradients, 0.5)
    whole = torch.cat([sums[name].flatten() for name, _ in model.named_parameters()])
    assert torch.allclose(flat.flat.grad.double(), whole, atol=1e-6)


def _pieces(model, flat):
    pieces = flat.flat.detach().split([shape.numel() for shape in flat.shapes])
    return [(n, v, s) for (n, _), v, s in zip(model.named_parameters(), pieces, flat.shapes, strict=True)]


def test_what_does_not_come_from_the_layers_is_refused(attached):
    model, batch, _, handle, flat = attached
    flat.show()
    losses = CASE.losses(model, batch) + model[4].weight.square().sum()
    flat.hide()
    norms = handle.norms(losses)
    with pytest.raises(UnclippedGradientError, match="does not come from its module's forward"):
        handle.clipped_backward(losses, max_grad_norm=0.5, norms=norms)


def test_an_ordinary_backward_is_refused(attached):
    model, batch, _, _, flat = attached
    flat.show()
    losses = CASE.losses(model, batch)
    flat.hide()
    with pytest.raises(UnclippedGradientError, match="was not clipped"):
        losses.sum().backward()


def test_a_penalty_on_slices_is_refused(attached):
    model, batch, _, handle, flat = attached
    flat.show()
    losses = CASE.losses(model, batch)
    flat.hide()
    losses = losses + model[0].weight.square().sum()
    norms = handle.norms(losses)
    with pytest.raises(UnclippedGradientError, match="past its module's forward"):
        handle.clipped_backward(losses, max_grad_norm=0.5, norms=norms)


def test_a_layer_that_runs_on_its_slice_is_refused(attached):
    model, batch, _, _, _ = attached
    with pytest.raises(UnsupportedModuleError, match="while its weights were sharded"):
        model(batch["x"])


def test_replaced_parameters_give_back_what_an_engine_had_set():
    module = Scale()
    view, other = torch.zeros(4), torch.ones(4)
    object.__setattr__(module, "weight", view)
    with replaced_parameters(module, {"weight": other}):
        assert module.weight is other
    assert module.weight is view
