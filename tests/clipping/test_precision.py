"""bfloat16: what is added is what was measured, record by record, and the sum is not rounded before the noise."""

import copy
import math

import pytest
import torch
from architectures import case
from cases import brute_force, brute_force_norms, lm_losses, make, tiny_llama, token_batch
from torch import nn

from dprc_lightning import add_gaussian_noise, attach
from dprc_lightning.clipping.two_pass import HALF_NORM_SLACK
from dprc_lightning.errors import LossShapeError, UnclippedGradientError

WAYS = ["parameters", "autocast"]
ARCHITECTURES = ["llama", "gpt2", "gemma2", "bert"]
SAME_FACTORS = 2e-5
"""Of the norm that was taken: float32 sums of products of bfloat16 factors, exact but for their order, and the norm's
floor of 20 roundings."""
NETWORK = 0.02
"""The norm of the bfloat16 network's gradient against that of the same network in float64: not a matter of privacy."""


def prepared(name, way, checkpointing=False, dtype=torch.bfloat16):
    built = case(name, "eager", tied=name not in ("bert", "modernbert"), checkpointing=checkpointing)
    model, batch = make(built)
    if way == "parameters":
        model = model.to(dtype)
    if name == "bert":
        for parameter in model.bert.pooler.parameters():
            parameter.requires_grad_(True)

    def losses():
        with torch.autocast("cpu", dtype=dtype, enabled=way == "autocast"):
            return built.losses(model, batch)

    return built, model, batch, losses


def added(model, handle, losses, norms, weights, clip):
    model.zero_grad()
    handle.clipped_backward(losses, max_grad_norm=clip, norms=norms, weights=weights)
    return torch.cat([p.grad.double().flatten() for p in model.parameters() if p.grad is not None])


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_what_a_record_adds_has_the_norm_that_was_taken(name, way, checkpointing):
    _, model, batch, losses = prepared(name, way, checkpointing)
    handle = attach(model, "exact", unused="zero", norm_slack=0.0)
    handle.begin_step()
    records = len(batch["input_ids"])
    norms = handle.norms(losses())
    assert norms.dtype is torch.float32
    for i in range(records):
        values = losses()
        taken = handle.norms(values)
        assert torch.equal(taken, norms), "the passes are deterministic"
        # No clipping: the whole gradient of one record.
        whole = added(model, handle, values, taken, torch.eye(records)[i], clip=1e6)
        assert float((whole.norm() - norms[i]).abs()) <= SAME_FACTORS * float(norms.max())
        # Clipped: the threshold, whatever half precision did to the backward.
        values = losses()
        clip = 0.3 * float(norms.median())
        clipped = added(model, handle, values, handle.norms(values), torch.eye(records)[i], clip=clip)
        assert float(clipped.norm()) <= clip * (1 + 1e-6)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_norms_against_float64(name, way):
    built, model, batch, losses = prepared(name, way)
    expected = brute_force_norms(brute_force(built, model, batch))
    norms = attach(model, "exact", unused="zero").norms(losses())
    assert float(((norms - expected).abs() / expected.clamp(min=0.05 * float(expected.max()))).max()) < NETWORK


@pytest.mark.parametrize("way", WAYS)
def test_one_more_record_moves_the_sum_by_no_more_than_its_own_clipped_norm(way):
    """Rounded to bfloat16 before the noise, the sum of 512 records moves by more than C."""
    torch.manual_seed(0)
    model = nn.Linear(64, 64, bias=False)
    if way == "parameters":
        model = model.bfloat16()
    handle = attach(model, "exact")
    handle.begin_step()
    x = torch.randn(64) * 10 + torch.randn(513, 64)

    def total(records):
        model.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=way == "autocast"):
            out = model(x[:records].to(model.weight.dtype))
        handle.clipped_backward(out.float().square().sum(1), max_grad_norm=1.0)
        return model.weight.grad.clone()

    before, after = total(512), total(513)
    assert before.dtype is torch.float32
    assert float((after - before).double().norm()) <= 1.0 + 1e-3
    rounded = (after.bfloat16().double() - before.bfloat16().double()).norm()
    assert float(rounded) > 1.05, "the case must show why the sum is not rounded"


def test_the_slack_lowers_the_threshold():
    for way, slack in (("parameters", HALF_NORM_SLACK), ("autocast", HALF_NORM_SLACK), ("float32", 0.0)):
        _, model, _, losses = prepared("llama", way)
        handle = attach(model, "exact")
        values = losses()
        norms = handle.norms(values)
        clip = 0.1 * float(norms[norms > 0].min())
        handle.clipped_backward(values, max_grad_norm=clip, norms=norms)
        assert handle.norm_slack == slack
        kept = norms > 0
        assert torch.allclose((handle.clip_factors * norms)[kept] / clip, torch.tensor(1.0 - slack), rtol=1e-5)


def test_given_slack():
    model = nn.Linear(3, 2)
    handle = attach(model, "exact", norm_slack=0.25)
    handle.clipped_backward(model(torch.randn(4, 3)).square().sum(1) * 1e3, max_grad_norm=1.0)
    gradient = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert handle.clip_factors.max() < 1 and gradient.norm() <= 4 * 0.75 * (1 + 1e-6)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
def test_a_step_of_an_optimizer_on_bfloat16_parameters(optimizer):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2)).bfloat16()
    unused = nn.Linear(2, 2).bfloat16()
    model.append(unused)
    handle = attach(model, "exact", unused="zero")
    stepper = optimizer(model.parameters(), lr=0.1)
    for _ in range(2):
        handle.begin_step()
        losses = model[:2](torch.randn(4, 8).bfloat16()).float().square().sum(1)
        handle.clipped_backward(losses, max_grad_norm=1.0)
        assert model[0].weight.grad.dtype is torch.float32 and unused.weight.grad is None
        before = copy.deepcopy([p.detach() for p in model.parameters()])
        add_gaussian_noise(model.parameters(), 1.0)
        assert all(p.grad.dtype is torch.bfloat16 for p in model.parameters())
        stepper.step()
        stepper.zero_grad()
        assert all(not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


def test_a_gradient_that_was_rounded_already_is_refused():
    model = nn.Linear(3, 2).bfloat16()
    handle = attach(model, "exact")
    handle.clipped_backward(model(torch.randn(2, 3).bfloat16()).float().sum(1), max_grad_norm=1.0)
    add_gaussian_noise(model.parameters(), 1.0)
    with pytest.raises(UnclippedGradientError, match="zero_grad"):
        handle.clipped_backward(model(torch.randn(2, 3).bfloat16()).float().sum(1), max_grad_norm=1.0)


def test_detach_gives_the_gradient_type_back():
    model = nn.Linear(3, 2).bfloat16()
    attach(model).detach()
    model(torch.randn(2, 3).bfloat16()).sum().backward()
    assert model.weight.grad.dtype is torch.bfloat16


def test_losses_in_half_precision_are_refused():
    model = nn.Linear(3, 2).bfloat16()
    handle = attach(model)
    with pytest.raises(LossShapeError, match="make them float32"):
        handle.norms(model(torch.randn(2, 3).bfloat16()).sum(1))


def test_the_sketch_of_half_precision_factors_is_a_float32_one():
    """Its mean over many projections is the exact norm to a few standard errors: nothing is lost in the products."""
    torch.manual_seed(0)
    model = nn.Linear(32, 48, bias=False).bfloat16()
    x = torch.randn(6, 20, 32).bfloat16()
    exact = attach(model, "exact")
    expected = exact.norms(model(x).float().square().sum((1, 2))).square()
    exact.detach()
    k, draws = 16, 300
    handle = attach(model, "hutchinson", k, seed=5)
    squares = torch.stack([handle.norms(model(x).float().square().sum((1, 2))).square() for _ in range(draws)])
    ratio = (squares / expected).mean(0)
    assert float((ratio - 1).abs().max()) < 5 * math.sqrt(2 / (k * draws))


def test_norms_of_a_tied_weight_are_float32_under_autocast():
    """Both uses are squared after the pass, when the caller's autocast is in force again."""
    found = []
    for within in (False, True):
        torch.manual_seed(0)
        model = tiny_llama(tied=True)
        batch = token_batch(40)
        handle = attach(model, estimator="exact")
        with torch.autocast("cpu", torch.bfloat16):
            losses = lm_losses(model, batch)
            if within:
                found.append(handle.norms(losses))
        if not within:
            found.append(handle.norms(losses))
    assert torch.equal(*found)
