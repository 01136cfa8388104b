"""Norms of whole models under a P of random signs, against bits drawn by other code and against dense copies."""

import numpy as np
import pytest
import torch
from cases import CASES, brute_force, make
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from scipy import stats
from torch import nn

from dprc_lightning import attach
from dprc_lightning.clipping.plan_table import format_plan
from dprc_lightning.errors import InvalidArgumentError
from dprc_lightning.keys import derive
from dprc_lightning.sketch import GaussianProjections

KEY = bytes(range(32))
MODELS = [case for case in CASES if case.name != "vector_mlp"]


def signs(index, name, rows, k):
    """[rows, k], float64, +-1/sqrt(k); fewer rows than one block has."""
    width = -(-k // 8)
    stream = Cipher(ChaCha20(derive(KEY, "P rademacher", index, name, 0), bytes(16)), mode=None).encryptor()
    packed = np.frombuffer(stream.update(bytes(rows * width)), np.uint8).reshape(rows, width)
    return torch.from_numpy((2.0 * np.unpackbits(packed, axis=1, bitorder="little")[:, :k] - 1.0) / np.sqrt(k))


@pytest.mark.parametrize("k", [12, 32])
@pytest.mark.parametrize("case", MODELS, ids=lambda case: case.name)
def test_norms_are_those_of_the_gradients_times_p(case, k):
    model, batch = make(case)
    gradients = brute_force(case, model, batch)
    handle = attach(model, "hutchinson", k, "rademacher", key=KEY)
    rows = {row.parameter: row for row in handle.plan()}
    expected = []
    for record in gradients:
        total = 0.0
        for name, gradient in record.items():
            if rows[name].estimator == "exact":
                total += float(gradient.square().sum())
                continue
            along = gradient.mT if rows[name].side == "output" else gradient
            total += float((along @ signs(3, name, along.shape[1], k)).square().sum())
        expected.append(total**0.5)
    handle.begin_step(3)
    found = handle.norms(case.losses(model, batch)).double()
    assert sum(row.estimator != "exact" for row in rows.values()) >= 2
    assert torch.allclose(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-5, atol=1e-7)


class DenseCopies:
    """The same P as float tensors."""

    def __init__(self, k):
        self.k, self.index = k, None

    def begin_step(self, index):
        self.index = index

    def matrix(self, name, rows, device):
        return signs(self.index, name, rows, self.k).float().to(device)


def test_bits_and_dense_copies_give_one_norm_and_one_gradient():
    case = next(c for c in CASES if c.name == "llama_tied")
    found = []
    for attachment in ({"projection": "rademacher", "key": KEY}, {"projections": DenseCopies(16)}):
        model, batch = make(case)
        handle = attach(model, "hutchinson", 16, **attachment)
        handle.begin_step(7)
        losses = case.losses(model, batch)
        norms = handle.norms(losses)
        handle.clipped_backward(losses, max_grad_norm=float(norms.median()), norms=norms)
        found.append((norms, torch.cat([p.grad.flatten() for p in model.parameters()])))
    # 1/sqrt(16) is exact, so the entries are equal to the last bit.
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])


def test_one_step_has_one_projection_and_the_next_another():
    case = next(c for c in CASES if c.name == "llama_untied")
    model, batch = make(case)
    handle = attach(model, "hutchinson", 16, "rademacher", key=KEY)
    handle.begin_step(0)
    whole = handle.norms(case.losses(model, batch))
    parts = [{name: value[rows] for name, value in batch.items()} for rows in (slice(0, 2), slice(2, None))]
    halves = torch.cat([handle.norms(case.losses(model, part)) for part in parts])
    assert torch.allclose(halves, whole, rtol=1e-5)
    handle.begin_step(1)
    other = handle.norms(case.losses(model, batch))
    live = whole > 0
    assert not torch.isclose(other, whole, rtol=1e-3)[live].any()


@pytest.mark.parametrize("k", [3, 8])
def test_two_equal_coordinates_follow_a_binomial_law(k):
    """u = (1, 1)/sqrt(2): n_hat^2/||g||^2 = 2/k Bin(k, 1/2), 0 with probability 2^-k: what the accountant pays for."""
    draws = 2000
    layer = nn.Linear(2, 1, bias=False)
    handle = attach(layer, "hutchinson", k, "rademacher", seed=1)
    losses = layer(torch.ones(1, 2)).sum(1)
    hits = []
    for _ in range(draws):
        handle.begin_step()
        hits.append(round(float(handle.norms(losses)) ** 2 * k / 4))
    counts = np.bincount(hits, minlength=k + 1)
    assert stats.chisquare(counts, stats.binom(k, 0.5).pmf(range(k + 1)) * draws).pvalue > 1e-4
    assert counts[0] > 0


def test_the_plan_tells_its_bytes():
    case = next(c for c in CASES if c.name == "llama_untied")
    held = {}
    for projection in ("gaussian", "rademacher"):
        model, _ = make(case)
        handle = attach(model, "hutchinson", 32, projection)
        assert (handle.projection, handle.sketch_dim) == (projection, 32)
        rows = handle.plan()
        handle.begin_step()
        source = handle._state.projections
        for row in rows:
            if row.estimator != "exact":
                side = row.shape[0 if row.side == "output" else 1]
                assert row.projection_floats == 32 * side
                assert source.matrix(row.parameter, side, torch.device("cpu")).nbytes == row.projection_bytes
        held[projection] = sum(row.projection_bytes for row in rows)
        # The sum of the column "P bytes".
        total = f"{held[projection] / 1000:.{0 if held[projection] > 9950 else 1}f}k"
        assert format_plan(rows).split("\n")[-1].split()[-3] == total
    assert held["gaussian"] == 32 * held["rademacher"]


def test_sources_of_ones_own_are_still_tensors():
    """Gaussian P stays the tensor that it was, so what it gives is what earlier releases gave."""
    source = GaussianProjections(KEY, 4)
    source.begin_step(0)
    assert isinstance(source.matrix("w", 5, torch.device("cpu")), torch.Tensor)


def test_a_count_sketch_is_refused_with_its_reason():
    with pytest.raises(InvalidArgumentError, match=r"^projection='countsketch': .*1 / \(2 sketch_dim\)"):
        attach(nn.Linear(3, 2), projection="countsketch")
