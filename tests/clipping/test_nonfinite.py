"""Records whose gradient is not finite: named, or dropped so that nothing else changes by a single bit."""

import pytest
import torch
from architectures import case
from cases import make
from torch import nn

from dprc_lightning import attach
from dprc_lightning.errors import InvalidArgumentError, NonFiniteRecordError

BAD = {"nan": float("nan"), "inf": float("inf"), "overflow": 1e30}


def vectors(tokens):
    """A model and its losses on rows, any of which may hold anything."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 3))
    x = torch.randn(5, *tokens, 6)

    def losses(x):
        return model(x).square().flatten(1).sum(1)

    return model, x, losses


def gradients(model, handle, values, weights=None, norms=None):
    model.zero_grad()
    handle.clipped_backward(values, max_grad_norm=0.5, weights=weights, norms=norms)
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("estimator", ["exact", "hutchinson"])
@pytest.mark.parametrize("tokens", [(), (4,), (70,)], ids=["vector", "short", "long"])
@pytest.mark.parametrize("bad", BAD.values(), ids=list(BAD))
def test_a_dropped_record_changes_nothing_else(bad, tokens, estimator):
    model, x, losses = vectors(tokens)
    handle = attach(model, estimator, 4, seed=3, on_nonfinite="drop")
    handle.begin_step()
    # A dummy in the same place: a record of weight 0.
    expected = gradients(model, handle, losses(x), torch.tensor([1.0, 1, 0, 1, 1]))
    expected_norms = handle.norms(losses(x))
    broken = x.clone()
    broken[2] = bad
    values = losses(broken)
    if bad == 1e30:
        values = values * torch.tensor([1.0, 1.0, 1e35, 1.0, 1.0])
    norms = handle.norms(values)
    assert not norms[2].isfinite()
    kept = torch.tensor([0, 1, 3, 4])
    assert torch.equal(norms[kept], expected_norms[kept])
    got = gradients(model, handle, values, norms=norms)
    for name, gradient in expected.items():
        assert torch.equal(got[name], gradient), name
    assert handle.dropped == 1 and handle.clip_factors[2] == 0


def test_every_record_may_be_bad():
    model, x, losses = vectors((3,))
    handle = attach(model, on_nonfinite="drop")
    got = gradients(model, handle, losses(x * float("nan")))
    assert handle.dropped == 5 and all(torch.equal(g, torch.zeros_like(g)) for g in got.values())


def test_a_language_model_with_a_bad_record():
    """Through attention, norms, embeddings and the tied head."""
    model, batch = make(case("llama", tied=True))
    built = case("llama", tied=True)
    handle = attach(model, "hutchinson", 4, seed=3, on_nonfinite="drop")
    handle.begin_step()
    expected = gradients(model, handle, built.losses(model, batch), torch.tensor([1.0, 0, 1, 1, 1]))
    factor = torch.tensor([1.0, float("inf"), 1.0, 1.0, 1.0])
    got = gradients(model, handle, built.losses(model, batch) * factor)
    assert handle.dropped == 1
    for name, gradient in expected.items():
        assert torch.equal(got[name], gradient), name


def test_the_default_names_the_records():
    model, x, losses = vectors(())
    x[1] = x[3] = float("nan")
    handle = attach(model)
    with pytest.raises(NonFiniteRecordError, match=r"\[1, 3\].*on_nonfinite=drop"):
        handle.clipped_backward(losses(x), max_grad_norm=1.0)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(
    "setting", [{"on_nonfinite": "skip"}, {"unused": "ignore"}, {"norm_slack": 1.0}, {"norm_slack": -0.1}]
)
def test_settings(setting):
    with pytest.raises(InvalidArgumentError, match=next(iter(setting))):
        attach(nn.Linear(2, 2), **setting)
