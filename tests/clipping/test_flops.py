"""What the two passes compute, counted."""

import pytest
import torch
from cases import lm_losses, token_batch
from transformers import LlamaConfig, LlamaForCausalLM

from dprc_lightning import attach
from dprc_lightning.bench.step import flop_counter


def model_of(checkpointing=False):
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=256,
        tie_word_embeddings=False,
        # eager: attention is counted too, in both the private and the other step
        attn_implementation="eager",
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    if checkpointing:
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
        model.train()
    return model


def flops(run):
    with flop_counter() as counter:
        run()
    return counter.get_total_flops()


def linear_flops(model, batch):
    """Multiply-adds of one product of every linear layer with all tokens, times two."""
    tokens = batch["input_ids"].numel()
    return 2 * tokens * sum(m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear))


def test_the_norm_pass_computes_no_weight_gradient():
    """With P of a single column a norm pass costs a little more than dX; a weight gradient would cost all of dW."""
    batch = token_batch(256)
    model = model_of()
    losses = lm_losses(model, batch)
    parameters = list(model.parameters())
    dx_and_dw = flops(lambda: torch.autograd.grad(losses.sum(), parameters, retain_graph=True))
    one = linear_flops(model, batch)
    handle = attach(model, "hutchinson", 1, check_isolation=False)
    losses = lm_losses(model, batch)
    norm_pass = flops(lambda: handle.norms(losses))
    # The embedding's gradient is no product; every other weight gradient is one product of all tokens.
    sketch = sum(row.flops_per_token for row in handle.plan()) * batch["input_ids"].numel()
    assert norm_pass <= dx_and_dw - one + sketch
    assert norm_pass >= 0.9 * (dx_and_dw - one)


def test_the_ratio_to_a_step_without_privacy(capsys):
    def ratio(checkpointing):
        batch = token_batch(256)
        plain, private = model_of(checkpointing), model_of(checkpointing)
        handle = attach(private, "hutchinson", 1, check_isolation=False)
        base = flops(lambda: lm_losses(plain, batch).sum().backward())
        return flops(lambda: handle.clipped_backward(lm_losses(private, batch), max_grad_norm=1.0)) / base

    ratios = {checkpointing: ratio(checkpointing) for checkpointing in (False, True)}
    with capsys.disabled():
        print(f"\nFLOPs of a private step (k=1) / non-private: {ratios[False]:.3f}; checkpointed: {ratios[True]:.3f}")
    # 4/3 for the products, the one column of the sketch and attention's own second backward on top.
    assert 4 / 3 < ratios[False] < 1.40
    assert ratios[True] < 1.52


@pytest.mark.parametrize("estimator", ["hutchinson", "exact"])
def test_the_clipped_backward_costs_one_ordinary_backward(estimator):
    batch = token_batch(256)
    plain, private = model_of(), model_of()
    base_losses = lm_losses(plain, batch)
    base = flops(lambda: base_losses.sum().backward())
    handle = attach(private, estimator, 4, check_isolation=False)
    losses = lm_losses(private, batch)
    norms = handle.norms(losses)
    ours = flops(lambda: handle.clipped_backward(losses, max_grad_norm=1.0, norms=norms))
    assert ours == base
