"""`dprc plan --memory`: which flags, by simulation, and in which order they are tried."""

import json
from dataclasses import replace

import pytest
import transformers

from dprc_lightning.bench.simulate import SimulatedStep, simulate
from dprc_lightning.cli import main
from dprc_lightning.plan.memory import candidates, memory_rows, to_text, update_of

GIB = 2**30


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("model")
    transformers.LlamaConfig(
        vocab_size=4096, hidden_size=64, intermediate_size=512, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=True,
    ).save_pretrained(place)  # fmt: skip
    return str(place)


def test_each_set_of_flags_needs_less_than_the_one_before(folder):
    rows = memory_rows(SimulatedStep(model=folder, tokens=2048, dtype="bfloat16"), 0.0)
    assert [row.flags for row in rows] == candidates(2048)
    peaks = [row.peak_bytes for row in rows]
    # So small an MLP is no more than the head's block of logits.
    assert peaks == sorted(peaks, reverse=True) and len(set(peaks)) >= 4
    assert rows[0].flops_ratio == 1.0 and rows[2].flops_ratio > 1.1
    assert rows[-1].host_bytes == 2 * 2048 * 64 * 2, "the inputs of both layers"
    assert {row.optimizer_bytes for row in rows} == {2 * 2 * (4096 * 64 + 2 * (4 * 64**2 + 3 * 64 * 512 + 2 * 64) + 64)}


def test_it_ends_with_the_first_that_fits(folder):
    step = SimulatedStep(model=folder, tokens=2048, dtype="bfloat16")
    every = memory_rows(step, 0.0)
    limit = every[1].total_bytes
    assert memory_rows(step, limit) == every[:2]
    assert memory_rows(step, limit - 1) == every[:3]
    (alone,) = simulate(replace(step, chunked_head=True), kinds=[step.sketch_name], later=True)
    assert alone["peak_bytes"] == every[1].peak_bytes


def test_what_is_printed_can_be_set(folder, capsys):
    command = ["plan", "--model", folder, "--tokens", "1024", "--memory"]
    assert main([*command, "100"]) == 0
    assert "pick: nothing needs to be set" in capsys.readouterr().out
    assert main([*command, "0.000001"]) == 1
    assert "nothing fits: shorten the context" in capsys.readouterr().out
    rows = memory_rows(SimulatedStep(model=folder, tokens=1024, dtype="bfloat16", estimator="auto"), 0.0)
    limit = rows[3].total_bytes
    told = to_text(rows[:4], limit, 1024, 1)
    assert "causal_lm_losses, performance.mlp_chunk=512" in told and "offload" not in told


def test_the_update_has_to_fit_too(folder):
    """Parameters, gradients, and one more of a size of the two states that stay."""
    (row,) = memory_rows(SimulatedStep(model=folder, tokens=4, dtype="bfloat16"), 1e9)
    numel = row.optimizer_bytes // 4
    assert row.update_bytes == (2 + 4 + 2) * numel
    for step, update in ((row.peak_bytes, 10**9), (10**9, row.update_bytes)):
        larger = replace(row, peak_bytes=step, update_bytes=update)
        assert larger.total_bytes == 10**9 + row.optimizer_bytes


def test_the_update_is_that_of_a_module():
    from llama_module import LlamaModule
    from toy import privacy

    from dprc_lightning import PerformanceConfig
    from dprc_lightning.plan.pick import Device, pick

    module = LlamaModule(privacy(estimator="exact"), PerformanceConfig(physical_batch_size=1, memory=1.0))
    found = pick(module, Device(1.0, 1, is_host=False)).rows[0]
    numel = sum(p.numel() for p in module.parameters())
    assert (found.optimizer_bytes, found.update_bytes) == (8 * numel, 12 * numel)
    states = update_of((p.numel(), 4, True) for p in module.parameters())
    assert states == (4 * numel, found.optimizer_bytes, found.update_bytes)


def test_json(folder, capsys):
    assert main(["plan", "--model", folder, "--tokens", "512", "--memory", "100", "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["pick"] == {} and len(found["rows"]) == 1


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--memory", "24", "--tokens", "8"], "--model=None: needed with --memory"),
        (["--memory", "24", "--model", "x"], "--tokens=None: needed with --memory"),
        (["--memory", "0", "--model", "x", "--tokens", "8"], "--memory=0.0: expected GiB > 0"),
    ],
)
def test_what_is_missing(arguments, says, capsys):
    assert main(["plan", *arguments]) == 2
    assert says in capsys.readouterr().err
