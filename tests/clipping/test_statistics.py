"""With a random P the estimate has the law that the accountant integrates over."""

import numpy as np
import torch
from cases import CASES, brute_force, brute_force_norms, make
from scipy import stats
from torch import nn

from dprc_lightning import attach

DRAWS = 2000


def estimates(handle, losses):
    out = []
    for _ in range(DRAWS):
        handle.begin_step()
        out.append(handle.norms(losses))
    return torch.stack(out).double()


def test_a_rank_one_gradient_follows_chi_square():
    """One token, one matrix: n_hat^2 / ||g||^2 = chi2_k / k, for a tall weight and for a wide one."""
    torch.manual_seed(0)
    for k, shape in ((8, (6, 9)), (32, (9, 6))):
        layer = nn.Linear(shape[1], shape[0], bias=False)
        handle = attach(layer, "hutchinson", k, seed=k)
        losses = torch.sin(layer(torch.randn(1, shape[1]))).sum(1)
        (gradient,) = torch.autograd.grad(losses.sum(), layer.weight, retain_graph=True)
        assert torch.linalg.matrix_rank(gradient) == 1
        ratio = (estimates(handle, losses)[:, 0] / gradient.double().norm()) ** 2
        assert stats.kstest(ratio.numpy() * k, stats.chi2(k).cdf).pvalue > 1e-3
        # The test has the power to see a wrong k.
        assert stats.kstest(ratio.numpy() * k, stats.chi2(k + 1).cdf).pvalue < 1e-6


def test_records_of_one_step_share_their_projection():
    """Two equal records get equal estimates, in one micro-batch and over two."""
    torch.manual_seed(0)
    layer = nn.Linear(6, 9, bias=False)
    handle = attach(layer, "hutchinson", 4, seed=3)
    x = torch.randn(1, 6).repeat(3, 1)
    handle.begin_step()
    first = handle.norms(torch.sin(layer(x)).sum(1))
    second = handle.norms(torch.sin(layer(x[:1])).sum(1))
    assert torch.equal(first, second.expand(3))
    handle.begin_step()
    assert not torch.isclose(handle.norms(torch.sin(layer(x)).sum(1)), first).any()


def test_without_begin_step_each_call_draws_a_fresh_projection():
    torch.manual_seed(0)
    layer = nn.Linear(6, 9, bias=False)
    handle = attach(layer, "hutchinson", 4)
    x = torch.randn(1, 6)
    seen = {float(handle.norms(torch.sin(layer(x)).sum(1))) for _ in range(5)}
    assert len(seen) == 5


def test_a_tied_model_is_estimated_without_bias():
    case = next(c for c in CASES if c.name == "lm_tied")
    model, batch = make(case)
    expected = brute_force_norms(brute_force(case, model, batch)).square()
    handle = attach(model, "hutchinson", 16, seed=5)
    squared = estimates(handle, case.losses(model, batch)).square()
    error = squared.std(0) / np.sqrt(DRAWS)
    live = expected > 0
    assert ((squared.mean(0) - expected)[live].abs() < 4 * error[live]).all()
    # Squaring the two uses apart would be off by far more than the error bars: the test can see it.
    reference = model.embed.weight
    assert reference is model.head.weight
    apart = _squared_norms_of_separate_uses(case, batch)
    assert ((apart - expected)[live].abs() > 8 * error[live]).any()


def _squared_norms_of_separate_uses(case, batch):
    torch.manual_seed(0)
    untied = case.build()
    untied.head.weight = nn.Parameter(untied.embed.weight.detach().clone())
    return brute_force_norms(brute_force(case, untied, batch)).square()
