"""One record must not wipe out what the others add: sums in which terms of several records come by turns.

A record whose terms cancel has a small norm and a large factor, and its partial sums may be millions of C. While such a
partial sum stands in a float32 sum, what other records add to it is lost. Each case has one record whose true gradient
is zero, and asks how far the sum of the others moves with it.
"""

import pytest
import torch
import transformers
from torch import nn

from dprc_lightning import attach
from dprc_lightning.clipping import causal_lm_losses
from dprc_lightning.layers import lm_head
from dprc_lightning.sketch import weighted

C = 1.0


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate_proj = nn.Linear(4, 8, bias=False)
        self.up_proj = nn.Linear(4, 8, bias=False)
        self.down_proj = nn.Linear(8, 4, bias=False)
        self.act_fn = nn.SiLU()
        self.gate_proj.requires_grad_(False)
        self.up_proj.requires_grad_(False)

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Alone(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.mlp = layer

    def forward(self, x):
        return self.mlp(x)


def clipped(model, losses_of, x, **settings):
    handle = attach(model, "exact", check_isolation=False, **settings)
    handle.begin_step()
    losses = losses_of(model, x)
    norms = handle.norms(losses)
    handle.clipped_backward(losses, max_grad_norm=C, norms=norms)
    return norms, [p.grad.double() for p in handle.parameters]


def influence(build, losses_of, x, **settings):
    """Of the first record, whose terms cancel, on the sum; in units of C."""
    found = []
    for records in (x, [part[1:] for part in x]):
        torch.manual_seed(0)
        found.append(clipped(build(), losses_of, records, **settings))
    (norms, with_it), (others, without) = found
    moved = torch.stack([(a - b).norm() for a, b in zip(with_it, without, strict=True)]).norm()
    assert torch.allclose(norms[1:], others, rtol=1e-5)
    return float(moved) / C


def records_that_cancel(tokens, records, width=4, scale=1e6):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(1, 1, width, generator=generator).expand(records, tokens, width).clone()
    a = scale * torch.randn(1, 1, 4, generator=generator).expand(records, tokens, 4).clone()
    return x, a


def test_an_mlp_in_pieces():
    x, a = records_that_cancel(8192, 8)
    a[0] = 0
    a[0, 0], a[0, -1] = 1e6 * a[1, 0], -1e6 * a[1, 0]
    for chunk in (None, 512, 4096):
        moved = influence(
            lambda: Alone(MLP()), lambda model, x: (model(x[0]) * x[1]).sum((1, 2)), [x, a], mlp_chunk=chunk
        )
        assert moved < (0.1 if chunk is None else 1e-6), chunk


class Shared(nn.Module):
    """A linear layer and a norm, each used twice."""

    def __init__(self, kind):
        super().__init__()
        self.layer = nn.Linear(4, 4, bias=False) if kind == "matrix" else nn.LayerNorm(4, bias=False)

    def forward(self, x):
        return self.layer(x), self.layer(x)


@pytest.mark.parametrize("tokens", [1, 3, 2048])
@pytest.mark.parametrize("kind", ["matrix", "vector"])
def test_a_parameter_that_is_used_twice(kind, tokens):
    # Few tokens have a small floor: with more records there is more to wipe out.
    x, a = records_that_cancel(tokens, 8 if tokens > 3 else 256)
    b = a.clone()
    a[0], b[0] = 0, 0
    a[0, 0], b[0, 0] = a[1, 0], -a[1, 0]

    def losses_of(model, x):
        first, second = model(x[0])
        return (first * x[1]).sum((1, 2)) + (second * x[2]).sum((1, 2))

    assert influence(lambda: Shared(kind), losses_of, [x, a, b]) < 1e-6


@pytest.mark.parametrize("tokens", [2, 4, 63])
def test_short_records_have_products_of_their_own(tokens, monkeypatch):
    """Some kernels add up the terms of a product in lanes, those of several records side by side."""
    monkeypatch.setattr(weighted, "_weighted", lambda *_: pytest.fail("records share a product"))
    x, a = records_that_cancel(tokens, 32)
    a[0] = 0
    a[0, 0], a[0, -1] = 1e6 * a[1, 0], -1e6 * a[1, 0]
    build = lambda: Alone(nn.Linear(4, 4, bias=False))  # noqa: E731
    # What is left is the rounding of the record's own terms.
    assert influence(build, lambda model, x: (model(x[0]) * x[1]).sum((1, 2)), [x, a]) < 0.3


def test_a_tied_head_and_embedding_share_a_wide_sum(monkeypatch):
    """Head in blocks first, then the embedding: with several records the buffer is float64, with one float32."""
    seen = []
    original = lm_head.weighted_sum

    def spy(use, weights, dtype, total):
        seen.append(None if total is None else total.dtype)
        return original(use, weights, dtype, total)

    monkeypatch.setattr(lm_head, "weighted_sum", spy)
    config = transformers.LlamaConfig(
        vocab_size=20, hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        tie_word_embeddings=True,
    )  # fmt: skip
    ids = torch.randint(0, 20, (3, 6), generator=torch.Generator().manual_seed(0))
    for rows, dtype in ((3, torch.float64), (1, None)):
        seen.clear()
        torch.manual_seed(0)
        _, gradients = clipped(
            transformers.LlamaForCausalLM(config), lambda m, x: causal_lm_losses(m, x, input_ids=x), ids[:rows]
        )
        assert seen[0] is dtype and all(gradient.isfinite().all() for gradient in gradients)


class TestTheFloor:
    @pytest.mark.parametrize("lean", [False, True])
    def test_a_norms_floor_does_not_depend_on_the_other_records(self, lean):
        """Pieces of the tokens are cut by the size of the batch; a record's norm must not show it."""
        from transformers.models.llama.modeling_llama import LlamaRMSNorm

        generator = torch.Generator().manual_seed(0)
        tokens, width = 2048, 1024
        x = torch.randn(1, tokens, width, generator=generator)
        a = torch.randn(1, tokens, width, generator=generator) * 1e-3
        x[:, tokens // 2 :] = x[:, : tokens // 2]
        a[:, tokens // 2 :] = -a[:, : tokens // 2] * (1 + 1e-4)
        norms = []
        for records in (1, 16):
            inputs, factors = torch.ones(records, tokens, width), torch.full((records, tokens, width), 1e-3)
            inputs[:1], factors[:1] = x, a
            handle = attach(Alone(LlamaRMSNorm(width)), "exact", check_isolation=False, lean_norms=lean)
            handle.begin_step()
            norms.append(float(handle.norms((handle._model(inputs) * factors).sum((1, 2)))[0]))
        assert norms[0] == pytest.approx(norms[1], rel=1e-6)
