"""Hutch++ in whole models: norms against brute force, what the plan says, and what the accountant is told."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from cases import CASES, IdentityProjections, brute_force, brute_force_norms, check_against_brute_force, make
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from dprc_lightning import attach
from dprc_lightning.bench.step import flop_counter
from dprc_lightning.clipping import causal_lm_loss
from dprc_lightning.clipping.plan_table import format_plan
from dprc_lightning.config import PrivacyConfig
from dprc_lightning.errors import ConfigurationError, InvalidArgumentError, UnsupportedModuleError
from dprc_lightning.plan.costs import Batch, norm_costs
from dprc_lightning.run import step_event
from dprc_lightning.sketch import Factors, GaussianProjections

KEY = bytes(range(32))
BY_NAME = {case.name: case for case in CASES}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_with_the_identity_for_p_norms_and_gradients_are_those_of_brute_force(case):
    handle = check_against_brute_force(case, 2e-5, estimator="hutchpp", sketch_dim=1, projections=IdentityProjections())
    assert sum(row.estimator == "hutchpp" for row in handle.plan()) >= 2


def estimate(gradient, tail, head):
    """By the definition, in float64: a basis from a singular value decomposition."""
    vectors, values, _ = np.linalg.svd(gradient @ (gradient.T @ head), full_matrices=False)
    basis = vectors[:, values > 1e-9 * max(values.max(), 1e-300)]
    sketched = gradient @ tail
    return np.square(basis.T @ gradient).sum() + np.square(sketched - basis @ (basis.T @ sketched)).sum()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_norms_are_the_estimate_of_the_whole_gradients(case):
    """P and S drawn apart from the model, by their names. A tied weight has one gradient."""
    model, batch = make(case)
    gradients = brute_force(case, model, batch)
    handle = attach(model, "hutchpp", 2, key=KEY)
    source = GaussianProjections(KEY, 2)
    source.begin_step(3)
    rows = {row.parameter: row for row in handle.plan()}
    expected = []
    for record in gradients:
        total = 0.0
        for name, gradient in record.items():
            if rows[name].estimator == "exact":
                total += float(gradient.square().sum())
                continue
            along = (gradient.mT if rows[name].side == "output" else gradient).numpy()
            drawn = [
                source.matrix(n, rows_, torch.device("cpu"))
                for n, rows_ in zip((name, f"{name}..head"), along.shape[::-1], strict=True)
            ]
            total += estimate(along, *(matrix.double().numpy() for matrix in drawn))
        expected.append(total**0.5)
    handle.begin_step(3)
    found = handle.norms(case.losses(model, batch)).double()
    assert sum(row.estimator == "hutchpp" for row in rows.values()) >= 2
    assert torch.allclose(found, torch.tensor(expected, dtype=torch.float64), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("name", "draws"), [("lm_tied", 120), ("llama_tied", 30)])
def test_the_mean_ratio_is_one(name, draws):
    case = BY_NAME[name]
    model, batch = make(case)
    expected = brute_force_norms(brute_force(case, model, batch)).square()
    handle = attach(model, "hutchpp", 2, seed=5)
    losses = case.losses(model, batch)
    squared = []
    for _ in range(draws):
        handle.begin_step()
        squared.append(handle.norms(losses).double().square())
    live = expected > 0
    ratio = torch.stack(squared)[:, live] / expected[live]
    # Beside the error of the mean, the floor of a norm: it is added to each.
    error = ratio.std(0) / math.sqrt(draws) + 2e-5
    assert ((ratio.mean(0) - 1).abs() < 4 * error).all()
    assert (ratio.std(0) > 1e-3).any()


def test_one_step_has_one_basis_in_all_its_micro_batches():
    case = BY_NAME["llama_tied"]
    model, batch = make(case)
    handle = attach(model, "hutchpp", 3, key=KEY)
    handle.begin_step(0)
    whole = handle.norms(case.losses(model, batch))
    for place in range(len(whole)):
        alone = {name: value[place : place + 1] for name, value in batch.items()}
        assert torch.allclose(handle.norms(case.losses(model, alone)), whole[place], rtol=1e-5)
    handle.begin_step(1)
    other = handle.norms(case.losses(model, batch))
    assert not torch.isclose(other, whole, rtol=1e-5)[whole > 0].any()


@pytest.mark.parametrize("way", ["float32", "parameters"])
@pytest.mark.parametrize(("layer", "small"), [("linear", 768), ("one id", 8192)])
def test_terms_that_cancel_are_clipped_by_what_was_added(layer, small, way):
    """As in test_rounding: a large term, many small ones that round the same way, then those that cancel them."""
    width = 64
    if layer == "linear":
        model, up = nn.Linear(width, width, bias=False), 1 + 2**-7
        outputs = torch.tensor([4096.0, *[1.0] * small, -4096.0, -float(small)]).view(1, -1, 1)
        x = torch.tensor([4096.0, *[up] * small, 4096.0, up]).view(1, -1, 1).expand(1, -1, width)
    else:
        model = nn.Embedding(width, 16)
        outputs = torch.tensor([2.0**24, *[2.0] * small, -(2.0**24), -2.0 * small]).view(1, -1, 1)
        x = torch.full((1, small + 3), 3)
    if way == "parameters":
        model = model.bfloat16()
        x = x.bfloat16() if x.is_floating_point() else x
    handle = attach(model, "hutchpp", 4, norm_slack=0.0, seed=1)
    worst = 0.0
    for share in (0.5, 0.61, 0.77, 0.93, 1.0):
        handle.begin_step()
        losses = (model(x).float() * outputs).sum((1, 2))
        norms = handle.norms(losses)
        clip = 2.0**-10 * share * float(norms)
        handle.clipped_backward(losses, max_grad_norm=clip, norms=norms)
        worst = max(worst, float(model.weight.grad.double().norm()) / clip)
        model.zero_grad()
    assert worst < 0.6


@pytest.mark.parametrize("tied", [False, True])
def test_half_precision_norms_are_those_of_the_gradients_that_are_added(tied):
    """bfloat16 parameters: the gradient that the clipped backward sums, record by record, with P the identity."""
    case = BY_NAME["llama_tied" if tied else "llama_untied"]
    model, batch = make(case)
    model = model.bfloat16()
    handle = attach(model, "hutchpp", 1, projections=IdentityProjections(), check_isolation=False)
    for place in range(3):
        model.zero_grad()
        losses = case.losses(model, {name: value[place : place + 1] for name, value in batch.items()})
        norm = handle.norms(losses)
        handle.clipped_backward(losses, max_grad_norm=1e6, norms=norm)
        added = torch.stack([p.grad.double().norm() for p in handle.parameters]).norm()
        assert 1 - 1e-6 < float(norm) / float(added) < 1 + 1e-3


def test_the_factors_of_a_tied_weight_are_let_go():
    model, batch = make(BY_NAME["lm_tied"])
    handle = attach(model, "hutchpp", 2)
    handle.begin_step()
    handle.norms(BY_NAME["lm_tied"].losses(model, batch))
    (tracker,) = (t for t in handle._state.trackers.values() if len(t.modules) == 2)
    assert (tracker.estimator, tracker._uses, tracker._projections) == ("hutchpp", [], None)


def test_a_layer_that_comes_in_parts_is_refused():
    layer = nn.Linear(6, 9, bias=False)
    handle = attach(layer, "hutchpp", 2)
    tracker = handle._state.trackers["weight"]
    use = Factors(torch.randn(1, 3, 9), torch.randn(1, 3, 6), (9, 6))
    with pytest.raises(UnsupportedModuleError, match="^parameter 'weight': estimator=hutchpp .*estimator=hutchinson"):
        tracker.part(use, handle._state.projections)


class TestPlan:
    def test_rows_by_hand(self):
        model = nn.Sequential(nn.Embedding(50, 12), nn.Linear(12, 30), nn.Linear(30, 3))
        rows = attach(model, "hutchpp", 4).plan()
        assert [(r.parameter, r.estimator, r.side) for r in rows] == [
            ("0.weight", "hutchpp", "output"),
            ("1.weight", "hutchpp", "output"),
            ("1.bias", "exact", "-"),
            # Three rows: a head of four columns would be all of it.
            ("2.weight", "exact", "-"),
            ("2.bias", "exact", "-"),
        ]
        # P [50, 4] and S [12, 4]; one block [50, 4] and four matrices [12, 4]; four products.
        assert (rows[0].projection_floats, rows[0].projection_bytes) == (4 * 62, 16 * 62)
        assert (rows[0].sketch_floats, rows[0].flops_per_token) == (4 * 50 + 4 * 4 * 12, 4 * 2 * 4 * 62)
        assert "hutchpp" in format_plan(rows)

    def test_where_the_head_would_be_everything_the_norm_is_exact_and_accounted_so(self):
        handle = attach(nn.Linear(12, 30), "hutchpp", 12)
        assert handle.sketch_dim is None and {row.estimator for row in handle.plan()} == {"exact"}

    @pytest.mark.parametrize("tied", [False, True])
    @pytest.mark.parametrize("tokens", [8, 48])
    def test_costs_against_a_counter(self, tied, tokens):
        config = LlamaConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=96, use_cache=False, tie_word_embeddings=tied,
        )  # fmt: skip
        model = LlamaForCausalLM(config)
        ids = torch.randint(0, 96, (2, tokens), generator=torch.Generator().manual_seed(0))
        counted, told = {}, {}
        for estimator in ("hutchinson", "hutchpp"):
            told[estimator] = norm_costs(
                model, Batch(2, tokens), sketch_dim=6, estimator=estimator, projection="gaussian"
            )
            handle = attach(model, estimator, 6, check_isolation=False)
            losses = causal_lm_loss(model(input_ids=ids).logits, ids)
            handle.begin_step()
            with flop_counter() as counter:
                handle.norms(losses)
            counted[estimator] = counter.get_total_flops()
            handle.detach()
        more = counted["hutchpp"] - counted["hutchinson"]
        assert more == told["hutchpp"].flops - told["hutchinson"].flops > 0
        assert told["hutchpp"].norm_bytes > told["hutchinson"].norm_bytes
        assert told["hutchpp"].sketch_dim == told["hutchinson"].sketch_dim == 6


class TestAccounting:
    SETTINGS = PrivacyConfig(delta=1e-3, noise_multiplier=1.0, sample_rate=0.1, steps=5, sketch_dim=16)

    def test_the_event_is_that_of_hutchinson(self):
        events = []
        for estimator in ("hutchinson", "hutchpp"):
            handle = attach(nn.Linear(40, 60), estimator, 16)
            resolved = replace(self.SETTINGS, estimator=estimator).resolve(500, handle.sketch_dim)
            events.append(step_event(resolved))
        assert events[0] == events[1] and events[1].sketch_dim == 16 and events[1].certified

    def test_random_signs_are_refused_by_name(self):
        with pytest.raises(InvalidArgumentError, match=r"^estimator='hutchpp': .*projection='gaussian'"):
            attach(nn.Linear(40, 60), "hutchpp", 16, "rademacher")
        settings = replace(self.SETTINGS, estimator="hutchpp", projection="rademacher")
        with pytest.raises(ConfigurationError, match=r"privacy\.estimator='hutchpp': .*projection='gaussian'"):
            settings.resolve(500, 16)
        assert replace(settings, estimator="hutchinson").problems(500) == []
