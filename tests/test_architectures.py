"""Every architecture's norms and clipped sums against one backward per record."""

import pytest
import torch
from architectures import CAUSAL, ENCODERS, case
from cases import IdentityProjections, check_against_brute_force, make

from dprc_lightning import attach
from dprc_lightning.errors import UnsupportedModuleError, UnusedParameterError

RELATIVE = 1e-5
VARIANTS = [
    pytest.param(
        name, attention, tied, checkpointing, id=f"{name}-{attention}{'-tied' * tied}{'-ckpt' * checkpointing}"
    )
    for name in CAUSAL + ENCODERS
    # transformers has no sdpa for Gemma 2: it caps the attention's logits.
    for attention in (("eager",) if name == "gemma2" else ("sdpa", "eager"))
    for tied in ((False, True) if name in CAUSAL else (False,))
    for checkpointing in (False, True)
]


def check(built, **attachment):
    return check_against_brute_force(built, RELATIVE, **attachment)


@pytest.mark.parametrize(("name", "attention", "tied", "checkpointing"), VARIANTS)
def test_norms_and_clipped_sums(name, attention, tied, checkpointing):
    # Identity as P: every matrix goes the way of a sketch, and its norm is exact.
    built = case(name, attention, tied, checkpointing)
    handle = check(built, estimator="hutchinson", projections=IdentityProjections(), unused="zero")
    shared = [row for row in handle.plan() if len(row.modules) > 1]
    assert bool(shared) is tied


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    ("name", "lora"),
    [
        ("llama", {"target_modules": ["q_proj", "v_proj"], "task_type": "CAUSAL_LM"}),
        ("llama", {"target_modules": "all-linear", "bias": "all", "modules_to_save": ["lm_head"]}),
        ("qwen2", {"target_modules": ["q_proj", "k_proj"], "bias": "lora_only", "use_rslora": True}),
        ("gpt2", {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
        ("bert", {"target_modules": ["query", "value"], "task_type": "SEQ_CLS"}),
    ],
    ids=["llama", "llama-all", "qwen2-bias", "gpt2-conv1d", "bert"],
)
def test_lora(name, lora, checkpointing):
    handle = check(case(name, checkpointing=checkpointing, lora=lora), estimator="exact")
    trained = [row.parameter for row in handle.plan()]
    assert any("lora_A" in n for n in trained) and any("lora_B" in n for n in trained)
    assert not any("base_layer.weight" in n for n in trained)


def test_lora_dropout_is_the_same_in_both_passes():
    built = case("llama", checkpointing=True, lora={"target_modules": ["q_proj"], "lora_dropout": 0.5})
    model, batch = make(built)
    handle = attach(model.train(), "exact")
    losses = built.losses(model, batch)
    handle.clipped_backward(losses, max_grad_norm=1e-3)


def test_dora_is_refused_by_name():
    built = case("llama", lora={"target_modules": ["q_proj"], "use_dora": True})
    with pytest.raises(UnsupportedModuleError, match="lora_magnitude_vector"):
        attach(built.build())


def test_unused_parameters_are_named_at_once():
    built = case("bert")
    model, batch = make(built)
    model.bert.spare = torch.nn.Linear(3, 3)
    handle = attach(model)
    with pytest.raises(UnusedParameterError, match=r"'bert\.spare\.weight', 'bert\.spare\.bias'"):
        handle.norms(built.losses(model, batch))
