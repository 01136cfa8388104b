"""MLPs some tokens at a time: the same norms and gradients as at once, in less memory and no more products."""

import copy
import math

import architectures
import mlps
import pytest
import torch
from cases import Case, brute_force, brute_force_norms
from mlps import INNER, KINDS, TOKENS, WIDTH, Net, batch, build, calls_of, losses_of
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from transformers.models.llama.modeling_llama import LlamaMLP

from dprc_lightning.bench.memory import LiveMemory
from dprc_lightning.bench.step import flop_counter
from dprc_lightning.clipping import attach
from dprc_lightning.layers import ATTRIBUTE
from dprc_lightning.layers.chunked_mlp import runs_in_pieces


def one_step(model, data, chunk, clip=None, autocast=False, losses=losses_of, **attachment):
    """Losses, norms, gradients; the model is as before."""
    handle = attach(model, mlp_chunk=chunk, seed=0, **attachment)
    handle.begin_step()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        found = losses(model, data)
    norms = handle.norms(found)
    clip = float(norms.median()) if clip is None else clip
    handle.clipped_backward(found, max_grad_norm=clip, norms=norms)
    arrivals = [name for name in handle.arrivals if name]
    assert sorted(arrivals) == sorted(handle.named_parameters), "each gradient arrives once, after the last piece"
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    handle.detach()
    return found.detach(), norms, gradients


def check_equal(whole, pieces, share=1e-6):
    assert torch.allclose(whole[0], pieces[0], rtol=share, atol=0)
    assert torch.allclose(whole[1], pieces[1], rtol=share, atol=0)
    assert whole[2].keys() == pieces[2].keys() and len(whole[2]) > 2
    scale = max(float(g.abs().max()) for g in whole[2].values())
    for name, gradient in whole[2].items():
        assert gradient.dtype is pieces[2][name].dtype
        assert float((gradient - pieces[2][name]).abs().max()) <= share * scale, name


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "estimator",
    [
        {"estimator": "exact"},
        {"estimator": "hutchinson", "sketch_dim": 4},
        {"estimator": "hutchinson", "sketch_dim": 4, "projection": "rademacher"},
    ],
    ids=["exact", "hutchinson", "rademacher"],
)
def test_equals_the_whole(kind, checkpointing, estimator):
    model, data = build(kind, checkpointing), batch()
    check_equal(one_step(model, data, None, **estimator), one_step(model, data, 512, **estimator))


@pytest.mark.parametrize("kind", KINDS)
def test_equals_one_backward_per_record(kind):
    model, data = build(kind, checkpointing=True), batch()
    alone = brute_force(Case("net", Net, batch, losses_of), model, data)
    # A large C, so that the floor of the norms (0.02 % at this length) has no part in the gradients.
    _, norms, gradients = one_step(model, data, 512, clip=1e6, estimator="exact")
    ratio = norms.double() / brute_force_norms(alone)
    assert bool((ratio >= 1 - 1e-6).all()) and bool((ratio < 1.002).all())
    scale = max(float(g.abs().max()) for g in gradients.values())
    for name, gradient in gradients.items():
        assert float((gradient - sum(record[name] for record in alone)).abs().max()) < 1e-6 * scale, name


@pytest.mark.parametrize("tokens", [1, 511, 512, 513, 1024])
@pytest.mark.parametrize("chunk", [512, 1024])
def test_any_length(tokens, chunk):
    model, data = build(), batch(records=2, tokens=tokens)
    check_equal(one_step(model, data, None, estimator="exact"), one_step(model, data, chunk, estimator="exact"))


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("estimator", ["exact", "hutchinson"])
def test_tied_weights(checkpointing, estimator):
    model, data = build("llama", checkpointing, tied=True), batch()
    settings = {"estimator": estimator, "sketch_dim": 4}
    check_equal(one_step(model, data, None, **settings), one_step(model, data, 512, **settings))


@pytest.mark.parametrize("estimator", ["exact", "hutchinson"])
def test_a_weight_that_one_mlp_has_twice(estimator):
    model, settings = build(), {"estimator": estimator, "sketch_dim": 4}
    model.mlps[0].up_proj.weight = model.mlps[0].gate_proj.weight
    check_equal(one_step(model, batch(), None, **settings), one_step(model, batch(), 512, **settings))


class TiedOutside(Net):
    """A linear layer of its own shares a weight with both MLPs."""

    def __init__(self):
        super().__init__(tied=True)
        self.up = nn.Linear(WIDTH, INNER, bias=False)
        self.up.weight = self.mlps[0].up_proj.weight

    def forward(self, x):
        return super().forward(x) + self.up(self.inp(x).cos()).sum(-1, keepdim=True)


@pytest.mark.parametrize("estimator", ["exact", "hutchinson"])
def test_a_weight_that_is_tied_to_a_layer_outside(estimator):
    torch.manual_seed(0)
    model, settings = TiedOutside(), {"estimator": estimator, "sketch_dim": 4}
    check_equal(one_step(model, batch(), None, **settings), one_step(model, batch(), 512, **settings))


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    ("kind", "targets"),
    [("llama", ["gate_proj", "down_proj"]), ("gpt2", ["c_fc", "c_proj"]), ("phi3", ["down_proj"])],
)
def test_lora(kind, targets, checkpointing):
    model = build(kind, checkpointing).requires_grad_(False)
    inject_adapter_in_model(LoraConfig(r=2, target_modules=targets, fan_in_fan_out=kind == "gpt2"), model)
    for name, parameter in model.named_parameters():
        if "lora" in name:
            nn.init.normal_(parameter, std=0.3)
    model.inp.requires_grad_(True)
    check_equal(one_step(model, batch(), None), one_step(model, batch(), 512))


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("how", ["parameters", "autocast"])
def test_bfloat16(how, checkpointing):
    model = build("llama", checkpointing)
    if how == "parameters":
        model = model.bfloat16()
    settings = {"autocast": how == "autocast", "estimator": "hutchinson", "sketch_dim": 4}
    whole, pieces = one_step(model, batch(), None, **settings), one_step(model, batch(), 512, **settings)
    # Products of other shapes may round to the neighbouring number of eight bits.
    check_equal(whole, pieces, share=2.0**-8)


def test_float64():
    model = build().double()
    settings = {"estimator": "exact", "clip": 1e9}
    whole, pieces = one_step(model, batch(), None, **settings), one_step(model, batch(), 512, **settings)
    check_equal((whole[0], whole[1].double(), whole[2]), (pieces[0], pieces[1].double(), pieces[2]), share=1e-12)


def test_every_architecture(monkeypatch):
    """The whole Hugging Face models, their own checkpointing, recognised MLPs in every layer."""
    data = {"input_ids": torch.randint(1, 40, (2, 600)), "labels": torch.randint(1, 40, (2, 600))}
    monkeypatch.setitem(architectures._DECODER, "max_position_embeddings", 640)
    for name in ("llama", "qwen2", "qwen3", "gemma2", "mistral", "phi3", "gpt_neox"):
        attention = "eager" if name == "gemma2" else "sdpa"
        case = architectures.case(name, attention, checkpointing=True)
        torch.manual_seed(0)
        model = case.build()
        settings = {"losses": case.losses, "estimator": "hutchinson", "sketch_dim": 2, "check_isolation": False}
        check_equal(one_step(model, data, None, **settings), one_step(model, data, 512, **settings))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_recomputation_ends_before_the_mlp(monkeypatch, checkpointing):
    calls = calls_of(monkeypatch)
    model = build("llama", checkpointing)
    handle = attach(model, mlp_chunk=512, check_isolation=False)
    calls.clear()
    losses = losses_of(model, batch())
    assert calls == [512, 512, 76] * 2
    for backward in (lambda: handle.norms(losses), lambda: handle.clipped_backward(losses, max_grad_norm=1.0)):
        calls.clear()
        backward()
        assert calls == [512, 512, 76] * 2, "once for each piece, whether or not its block is recomputed"


def flops_of_a_step(model, chunk, data):
    handle = attach(model, "hutchinson", 4, mlp_chunk=chunk, check_isolation=False)
    with flop_counter() as counter:
        losses = losses_of(model, data)
        handle.clipped_backward(losses, max_grad_norm=1.0)
    handle.detach()
    model.zero_grad(set_to_none=True)
    return counter.get_total_flops()


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("lora", [False, True])
def test_no_more_products_under_checkpointing_and_two_short_forwards_without(kind, lora):
    data = batch(records=1)
    first = {"llama": 2, "gpt2": 1}[kind]
    for checkpointing in (True, False):
        model = build(kind, checkpointing)
        if lora:
            # Around the first layer, so that the last one is frozen: its product is left out all the same.
            model.requires_grad_(False)
            target = {"llama": "up_proj", "gpt2": "c_fc"}[kind]
            inject_adapter_in_model(LoraConfig(r=2, target_modules=[target], fan_in_fan_out=kind == "gpt2"), model)
            model.inp.requires_grad_(True)
        whole, pieces = flops_of_a_step(model, None, data), flops_of_a_step(model, 512, data)
        # In both passes, in both MLPs: the first products, and the adapter's two.
        inside = first * WIDTH * INNER + (2 * (WIDTH + INNER) if lora else 0)
        more = 0 if checkpointing else 2 * 2 * 2 * TOKENS * inside
        assert pieces - whole == more


def peak_of_a_step(model, chunk, data):
    handle = attach(model, "hutchinson", 4, mlp_chunk=chunk, check_isolation=False)
    with LiveMemory() as live:
        losses = losses_of(model, data)
        handle.clipped_backward(losses, max_grad_norm=1.0)
    handle.detach()
    model.zero_grad(set_to_none=True)
    return live.peak


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_memory(monkeypatch, frozen, checkpointing):
    monkeypatch.setattr(mlps, "INNER", 64)
    model, data = build("llama", checkpointing), batch(records=1, tokens=4096)
    model.mlps.requires_grad_(not frozen)
    of_inner = 4 * 4096 * 64
    saved = peak_of_a_step(model, None, data) - peak_of_a_step(model, 512, data)
    # Per token and MLP: what goes into and comes out of the activation, the two factors of the product, the product.
    # Of a checkpointed model one MLP lives at a time. An eighth of it is made in pieces.
    assert saved > (1 if checkpointing else 2) * (2 if frozen else 3) * of_inner


def test_a_frozen_mlp_passes_the_gradient_on():
    model = build("llama", checkpointing=True)
    model.mlps.requires_grad_(False)
    check_equal(one_step(model, batch(), None), one_step(model, batch(), 512))
    model.mlps[1].up_proj.requires_grad_(True)
    check_equal(one_step(model, batch(), None), one_step(model, batch(), 512))


def test_an_mlp_above_nothing_that_trains():
    model = build("llama")
    model.inp.requires_grad_(False)
    model.mlps[0].requires_grad_(False)
    check_equal(one_step(model, batch(), None), one_step(model, batch(), 512))


def test_without_a_graph(monkeypatch):
    model, data = build(), batch()
    with torch.no_grad():
        expected = model(data["x"])
    calls = calls_of(monkeypatch)
    handle = attach(model, mlp_chunk=512)
    calls.clear()
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            values = model(data["x"])
        assert not values.requires_grad and torch.allclose(values, expected, rtol=1e-6, atol=1e-6)
    assert calls == [512, 512, 76] * 4, "in pieces all the same"
    assert all(tracker.forward_uses == 0 for tracker in handle._state.trackers.values())


def test_an_input_without_tokens_goes_through_at_once(monkeypatch):
    calls = calls_of(monkeypatch)
    model = build()
    handle = attach(model, mlp_chunk=512)
    calls.clear()
    x = torch.randn(700, 4)
    losses = model(x).sin().sum(1)
    handle.clipped_backward(losses, max_grad_norm=1.0)
    assert len(calls) == len(model.mlps), "each once in the forward, and not again"


def test_a_micro_batch_without_a_record():
    model = build()
    handle = attach(model, mlp_chunk=512, check_isolation=False)
    handle.clipped_backward(losses_of(model, batch(records=0)), max_grad_norm=1.0)
    assert all(not p.grad.any() for p in model.parameters())


def test_two_micro_batches_add_up():
    model, data = build(), batch(records=4)
    whole = one_step(model, data, None, clip=2.0, estimator="hutchinson", sketch_dim=4)
    handle = attach(model, "hutchinson", 4, mlp_chunk=512, seed=0)
    handle.begin_step()
    for part in (slice(0, 3), slice(3, 4)):
        handle.clipped_backward(losses_of(model, {"x": data["x"][part]}), max_grad_norm=2.0)
    scale = max(float(g.abs().max()) for g in whole[2].values())
    for name, parameter in model.named_parameters():
        assert float((parameter.grad - whole[2][name]).abs().max()) < 1e-6 * scale


def test_detach_restores_the_model():
    model = build()
    before = [type(module) for module in model.modules()]
    state = copy.deepcopy(model.state_dict())
    handle = attach(model, mlp_chunk=512)
    assert [runs_in_pieces(mlp) for mlp in model.mlps] == [True, True] and set(handle.chunked_mlps) == {
        "mlps.0",
        "mlps.1",
    }
    assert isinstance(model.mlps[0], LlamaMLP)
    handle.clipped_backward(losses_of(model, batch()), max_grad_norm=1.0)
    handle.detach()
    assert [type(module) for module in model.modules()] == before
    assert not any(ATTRIBUTE in module.__dict__ or "forward" in module.__dict__ for module in model.modules())
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    losses_of(model, batch()).sum().backward()


def test_the_randomness_of_others_is_untouched():
    model = build()
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    attach(model, mlp_chunk=512)
    assert torch.equal(torch.rand(1), expected)


def test_pieces_of_a_record_do_not_depend_on_the_others(monkeypatch):
    calls = calls_of(monkeypatch)
    model = build()
    attach(model, mlp_chunk=512, check_isolation=False)
    for records in (1, 5):
        calls.clear()
        losses_of(model, batch(records))
        assert calls == [512, 512, math.fmod(TOKENS, 512)] * 2
