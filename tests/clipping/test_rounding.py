"""Records built so that their positions cancel while the float32 sum does not: what they add stays below C."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from dprc_lightning import attach
from dprc_lightning.errors import UnclippedGradientError
from dprc_lightning.sketch import BLOCK_ROWS, Factors, weighted_sum

THRESHOLDS = [2.0**-10 * share for share in (0.5, 0.61, 0.77, 0.93, 1.0)]


def contribution(model, losses_of, estimator, sketch_dim=32):
    """The largest norm of what the record adds, in units of C, over several C."""
    handle = attach(model, estimator, sketch_dim, norm_slack=0.0)
    worst = 0.0
    for share in THRESHOLDS:
        handle.begin_step()
        losses = losses_of(model)
        norms = handle.norms(losses)
        clip = share * float(norms)
        handle.clipped_backward(losses, max_grad_norm=clip, norms=norms)
        worst = max(worst, float(model.weight.grad.double().norm()) / clip)
        model.zero_grad()
    handle.detach()
    return worst


@pytest.mark.parametrize("way", ["float32", "parameters"])
@pytest.mark.parametrize("estimator", ["exact", "hutchinson"])
@pytest.mark.parametrize(("width", "small_terms"), [(64, 40), (512, 256), (512, 768), (256, 4096)])
def test_linear(width, small_terms, estimator, way):
    """A large term, many small ones that all round the same way, then those that cancel them; exact in bfloat16."""
    up = 1 + 2**-7
    outputs = torch.tensor([4096.0, *[1.0] * small_terms, -4096.0, -float(small_terms)])
    inputs = torch.tensor([4096.0, *[up] * small_terms, 4096.0, up])
    model = nn.Linear(width, width, bias=False)
    if way == "parameters":
        model = model.bfloat16()
    x = inputs.view(1, -1, 1).expand(1, -1, width).to(model.weight.dtype)
    worst = contribution(model, lambda m: (m(x).float() * outputs.view(1, -1, 1)).sum((1, 2)), estimator)
    assert worst < 0.6


@pytest.mark.parametrize("way", ["float32", "parameters"])
@pytest.mark.parametrize("estimator", ["exact", "hutchinson"])
@pytest.mark.parametrize("small_terms", [256, 1024, 65536])
def test_one_id_at_every_position(small_terms, estimator, way):
    """Added one by one in float32, these moved the sum by hundreds of C."""
    model = nn.Embedding(64, 16)
    if way == "parameters":
        model = model.bfloat16()
    signs = torch.tensor([2.0**24, *[2.0] * small_terms, -(2.0**24), -2.0 * small_terms])
    ids = torch.full((1, len(signs)), 3)
    worst = contribution(model, lambda m: (m(ids).float() * signs.view(1, -1, 1)).sum((1, 2)), estimator)
    assert worst < 0.6


def test_the_sum_is_as_exact_as_it_says():
    """Against float64, for random and for cancelling rows, below and above the block."""
    torch.manual_seed(0)
    for length in (5, 63, 64, 400, BLOCK_ROWS, BLOCK_ROWS + 1, 3000):
        left, right = torch.randn(3, length, 7), torch.randn(3, length, 5)
        half = length // 2
        right[2, half : 2 * half], left[2, half : 2 * half] = right[2, :half], -left[2, :half]
        weights = [0.3, 0.0, 1.0]
        found = weighted_sum(Factors(left, right, (7, 5)), weights)
        expected = sum(w * left[i].double().T @ right[i].double() for i, w in enumerate(weights))
        terms = sum(w * (left[i].norm(dim=1) * right[i].norm(dim=1)).double().sum() for i, w in enumerate(weights))
        blocks = math.ceil(length / BLOCK_ROWS)
        bound = (min(length, BLOCK_ROWS) + blocks + 1) * 2.0**-24
        assert float((found.double() - expected).norm()) <= bound * float(terms)


def test_the_sum_of_rows_by_id():
    torch.manual_seed(0)
    ids, right = torch.randint(0, 9, (3, 40)), torch.randn(3, 40, 5)
    weights = [0.3, 0.0, 1.0]
    found = weighted_sum(Factors(ids, right, (11, 5)), weights)
    onehot = F.one_hot(ids, 11).double()
    expected = sum(w * onehot[i].T @ right[i].double() for i, w in enumerate(weights))
    assert found.dtype is torch.float32 and torch.allclose(found.double(), expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(weighted_sum(Factors(ids, right, (11, 5)), [0.0] * 3), torch.zeros(11, 5))


class Blocks(nn.Module):
    def __init__(self, width, p):
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(width, width) for _ in range(3))
        self.head = nn.Linear(width, 10)
        self.p = p

    def block(self, x):
        h = F.dropout(self.b(F.dropout(F.gelu(self.a(x)), self.p, True)), self.p, True)
        return x + self.c(F.gelu(h))

    def forward(self, x):
        return self.head(checkpoint(self.block, x, use_reentrant=False, preserve_rng_state=False).mean(1))


@pytest.mark.parametrize(
    ("width", "tokens", "loss_scale", "p"), [(64, 8, 1.0, 0.1), (256, 256, 1.0, 0.1), (16, 2, 1e-5, 0.9)]
)
@pytest.mark.parametrize("way", ["float32", "autocast", "parameters"])
def test_dropout_that_is_drawn_again_is_seen(width, tokens, loss_scale, p, way):
    """Also where so much is dropped that the sizes of the gradients hardly change, and whatever the loss's unit."""
    torch.manual_seed(0)
    model = Blocks(width, p)
    if way == "parameters":
        model = model.bfloat16()
    handle = attach(model, "exact")
    x = torch.randn(2, tokens, width).to(model.a.weight.dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=way == "autocast"):
        logits = model(x)
    losses = F.cross_entropy(logits.float(), torch.tensor([1, 2]), reduction="none") * loss_scale
    norms = handle.norms(losses)
    with pytest.raises(UnclippedGradientError, match="preserve_rng_state"):
        handle.clipped_backward(losses, max_grad_norm=0.5 * float(norms.min()), norms=norms)


def test_a_foreign_gradient_that_is_nan_is_seen():
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    handle = attach(model, "exact", on_nonfinite="drop")
    x = torch.randn(3, 4)
    x[1] = float("inf")
    losses = model(x).square().sum(1) + 0 * F.linear(x, model.weight).sum(1)
    with pytest.raises(UnclippedGradientError, match="does not come from its module's forward"):
        handle.clipped_backward(losses, max_grad_norm=1.0)
    assert model.weight.grad is None


@pytest.mark.parametrize("magnitude", [1.0, 1e-3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("eps", [None, 1e-6])
def test_rms_norm_has_torchs_own_gradient(magnitude, dtype, eps):
    torch.manual_seed(0)
    model = nn.RMSNorm(32, eps=eps).to(dtype)
    x = (torch.randn(1, 6, 32) * magnitude).to(dtype)
    model(x).float().square().sum().backward()
    expected = model.weight.grad.float().norm()
    model.zero_grad()
    norm = attach(model, "exact").norms(model(x).float().square().sum((1, 2)))
    assert float((norm - expected).abs() / expected) < (0.02 if dtype is torch.bfloat16 else 1e-4)
