"""Norms and clipped sums against one backward pass per record."""

import copy

import pytest
import torch
from cases import CASES, Case, IdentityProjections, brute_force, brute_force_clipped_sum, brute_force_norms, make

from dprc_lightning import attach

# The norm's floor is 20 units of rounding of the sum of its terms' norms, for the nine tokens here.
RELATIVE = 1e-5
WAYS = ["identity", "exact", "auto_as_exact"]


def handle_for(model, way):
    if way == "identity":
        return attach(model, estimator="hutchinson", projections=IdentityProjections())
    if way == "exact":
        return attach(model, estimator="exact")
    # k so large that `auto` computes everything exactly.
    return attach(model, estimator="auto", sketch_dim=10**6)


def assert_close(actual, expected, scale):
    error = float((actual.double() - expected).abs().max()) / scale
    # One ulp of float32 is 1.2e-7; sums over a few dozen terms stay within ten.
    assert error < RELATIVE, error


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_norms_and_clipped_sum_equal_one_backward_per_record(case: Case, way: str):
    model, batch = make(case)
    gradients = brute_force(case, model, batch)
    expected_norms = brute_force_norms(gradients)
    handle = handle_for(model, way)
    handle.begin_step()

    losses = case.losses(model, batch)
    norms = handle.norms(losses)

    assert norms.dtype == torch.float32 and not norms.requires_grad
    assert all(p.grad is None for p in model.parameters())
    assert_close(norms, expected_norms, float(expected_norms.max()))

    clip = float(expected_norms.median())  # some records are clipped, some are not
    assert (expected_norms > clip).any() and (expected_norms < clip).any()
    handle.clipped_backward(losses, max_grad_norm=clip, norms=norms)
    expected = brute_force_clipped_sum(gradients, clip)
    scale = max(float(v.abs().max()) for v in expected.values())
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert_close(parameter.grad, expected[name], scale)


@pytest.mark.parametrize("case", CASES[2:], ids=lambda c: c.name)
def test_a_record_without_a_label_has_norm_zero_and_adds_nothing(case: Case):
    model, batch = make(case)
    handle = attach(model, estimator="hutchinson", sketch_dim=4, seed=1)
    losses = case.losses(model, batch)
    norms = handle.norms(losses)
    assert norms[3] == 0.0
    weights = torch.zeros(len(losses))
    weights[3] = 1.0
    handle.clipped_backward(losses, max_grad_norm=1.0, norms=norms, weights=weights)
    for parameter in model.parameters():
        assert torch.equal(parameter.grad, torch.zeros_like(parameter.grad))


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_micro_batches_under_one_projection_equal_one_batch(case: Case):
    """One P per logical step: the split must not change any record's factor."""
    whole, batch = make(case)
    split = copy.deepcopy(whole)
    a, b = attach(whole, "hutchinson", 4, seed=7), attach(split, "hutchinson", 4, seed=7)
    a.begin_step(), b.begin_step()
    a.clipped_backward(case.losses(whole, batch), max_grad_norm=0.5)
    norms = []
    empty = [] if "llama" in case.name else [slice(9, None)]  # Hugging Face's attention cannot take an empty batch
    for rows in [slice(0, 1), slice(1, 3), slice(3, None), *empty]:
        losses = case.losses(split, {k: v[rows] for k, v in batch.items()})
        norms.append(b.norms(losses))
        b.clipped_backward(losses, max_grad_norm=0.5, norms=norms[-1])
    for (name, p), q in zip(whole.named_parameters(), split.parameters(), strict=True):
        assert torch.allclose(p.grad, q.grad, rtol=1e-5, atol=1e-6), name


@pytest.mark.parametrize("estimator", ["exact", "hutchinson"])
@pytest.mark.parametrize(("width", "tokens"), [(128, 8), (64, 400), (256, 64)])
def test_a_record_whose_positions_cancel_moves_the_sum_by_less_than_the_threshold(width, tokens, estimator):
    """Its gradient is zero but for rounding, which is a thousand times C here; beside 32 ordinary records."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(width, width)
    handle = attach(layer, estimator, seed=3)
    handle.begin_step()
    x, u = torch.randn(2, 33, tokens, width)
    half = tokens // 2
    x[-1, half:] = x[-1, :half]
    u[-1] = torch.cat([u[-1, :half], -u[-1, :half]]) * 1e4

    def clipped_sum(rows):
        handle.clipped_backward((layer(x[rows]) * u[rows]).sum((1, 2)), max_grad_norm=1e-3)
        gradient = torch.cat([p.grad.double().flatten() for p in layer.parameters()])
        layer.zero_grad()
        return gradient

    shift = (clipped_sum(slice(None)) - clipped_sum(slice(32))).norm() / 1e-3
    assert shift < 0.05


def test_weights_scale_and_backward_are_applied():
    case = CASES[0]
    model, batch = make(case)
    gradients = brute_force(case, model, batch)
    norms = brute_force_norms(gradients)
    handle = attach(model, estimator="exact")
    seen = []

    def backward(loss):
        seen.append(loss.shape)
        loss.backward()

    weights = torch.tensor([1.0, 0.0, 0.5, 1.0, 0.0, 1.0])
    handle.clipped_backward(
        case.losses(model, batch), max_grad_norm=0.1, weights=weights, scale=0.25, backward=backward
    )
    assert seen == [torch.Size([])]
    for name, parameter in model.named_parameters():
        expected = sum(
            0.25 * float(w) * min(0.1 / float(n), 1.0) * g[name]
            for w, n, g in zip(weights, norms, gradients, strict=True)
        )
        assert torch.allclose(parameter.grad.double(), expected, rtol=1e-5, atol=1e-7)


def test_gradients_add_up_over_calls():
    case = CASES[0]
    model, batch = make(case)
    handle = attach(model, estimator="exact")
    handle.clipped_backward(case.losses(model, batch), max_grad_norm=0.1)
    once = [p.grad.clone() for p in model.parameters()]
    handle.clipped_backward(case.losses(model, batch), max_grad_norm=0.1)
    for parameter, first in zip(model.parameters(), once, strict=True):
        assert torch.allclose(parameter.grad, 2 * first, rtol=1e-6)


def test_frozen_parts_get_nothing_and_cost_nothing():
    case = next(c for c in CASES if c.name == "llama_untied")
    model, batch = make(case)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.1" in name)
    gradients = brute_force(case, model, batch)
    handle = attach(model, estimator="hutchinson", projections=IdentityProjections())
    losses = case.losses(model, batch)
    norms = handle.norms(losses)
    expected = brute_force_norms(gradients)
    assert_close(norms, expected, float(expected.max()))
    handle.clipped_backward(losses, max_grad_norm=0.1, norms=norms)
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == ("layers.1" in name)
    assert {row.parameter for row in handle.plan()} == set(gradients[0])
