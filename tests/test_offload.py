"""Checkpoints in the host's memory: the same numbers bit for bit, and the device holds one layer's input at a time."""

import pytest
import torch
from cases import tiny_llama
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from toy import ToyData, ToyModule, privacy, trainer

from dprc_lightning import PerformanceConfig
from dprc_lightning.bench.memory import LiveMemory
from dprc_lightning.bench.step import StepShape
from dprc_lightning.clipping import attach, causal_lm_loss
from dprc_lightning.errors import ConfigurationError, InvalidArgumentError, UnsupportedModuleError
from dprc_lightning.offload import SMALL, CheckpointOffload

LAYERS, TOKENS = 6, 1024
# Deep and narrow: the checkpoints are most of what a pass holds.
SHAPE = StepShape(TOKENS, 1, 32, 32, LAYERS, 4, 2, vocabulary=16, checkpointing=True)
CHECKPOINT = 4 * TOKENS * SHAPE.hidden


def losses_of(model, ids):
    return causal_lm_loss(model(input_ids=ids).logits, ids)


def ids_of(shape=SHAPE):
    size = (shape.records, shape.tokens)
    return torch.randint(0, shape.vocabulary, size, generator=torch.Generator().manual_seed(0))


def step(offload, chunk=None):
    """Norms and gradients of one step, its peaks on the device and the host, and the offload."""
    model, ids = SHAPE.build(), ids_of()
    handle = attach(model, "hutchinson", 4, seed=0, check_isolation=False, mlp_chunk=chunk, offload_checkpoints=offload)
    peaks = []
    with LiveMemory() as live:
        handle.begin_step()
        losses = losses_of(model, ids)
        peaks.append(live.current)
        norms = handle.norms(losses)
        # The gradients that the second pass leaves are as large as the model; up to here it is the checkpoints.
        peaks.append(live.peak)
        handle.clipped_backward(losses, max_grad_norm=0.5, norms=norms)
    kept = handle._offload
    handle.detach()
    return norms, {name: p.grad for name, p in model.named_parameters()}, peaks, live, kept


def test_the_same_bit_for_bit():
    norms, gradients, _, live, kept = step(offload=False)
    assert kept is None and live.host_peak == 0
    moved_norms, moved, _, _, kept = step(offload=True)
    assert torch.equal(norms, moved_norms)
    assert all(torch.equal(gradients[name], moved[name]) for name in gradients)
    assert kept.stored == LAYERS, "one for each layer, in the forward alone"
    assert kept.fetched == 2 * LAYERS, "and back for each of the two passes"


@pytest.mark.parametrize("chunk", [None, 512])
def test_the_device_holds_no_checkpoints(chunk):
    _, _, (forward, norm_pass), _, _ = step(offload=False, chunk=chunk)
    _, _, (moved_forward, moved_norm_pass), live, _ = step(offload=True, chunk=chunk)
    assert live.host_peak == LAYERS * CHECKPOINT
    # After the forward nothing is left of them here; within a pass, the one that is being recomputed from.
    assert forward - moved_forward == pytest.approx(LAYERS * CHECKPOINT, rel=0.02)
    assert norm_pass - moved_norm_pass > (LAYERS - 2) * CHECKPOINT


def test_the_host_lets_go_of_them_with_the_graph():
    model, ids = SHAPE.build(), ids_of()
    handle = attach(model, check_isolation=False, offload_checkpoints=True)
    with LiveMemory() as live:
        losses = losses_of(model, ids)
        held = live._host
        handle.norms(losses)
        assert live._host == held == LAYERS * CHECKPOINT, "the second pass needs them again"
        handle.clipped_backward(losses, max_grad_norm=1.0)
        del losses
        assert live._host == 0


def test_small_tensors_stay():
    model = tiny_llama(tied=True, checkpointing=True)
    handle = attach(model, check_isolation=False, offload_checkpoints=True)
    ids = torch.randint(1, 40, (2, 9))
    assert 4 * ids.numel() * 16 < SMALL
    handle.clipped_backward(losses_of(model, ids), max_grad_norm=1.0)
    assert (handle._offload.stored, handle._offload.fetched) == (0, 0)


def test_isolation_passes_fetch_them_too():
    shape = StepShape(1024, 2, 32, 32, 2, 4, 2, vocabulary=16, checkpointing=True)
    model = shape.build()
    handle = attach(model, offload_checkpoints=True)
    losses = losses_of(model, ids_of(shape))
    handle.norms(losses)
    assert handle._offload.fetched == 3 * 2, "two halves, and the norms"


class Wrapped(nn.Module):
    def __init__(self, wrap):
        super().__init__()
        layers = [nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)) for _ in range(3)]
        self.layers = nn.Sequential(*(wrap(layer) for layer in layers))
        self.first = nn.Linear(4, 16)

    def forward(self, x):
        return self.layers(self.first(x))


def test_checkpoint_wrapper():
    torch.manual_seed(0)
    model = Wrapped(checkpoint_wrapper)
    functions = [layer.checkpoint_fn for layer in model.layers]
    x = torch.randn(2, 600, 4)
    results = []
    for offload in (False, True):
        handle = attach(model, seed=0, check_isolation=False, offload_checkpoints=offload)
        losses = model(x).sin().sum((1, 2))
        handle.clipped_backward(losses, max_grad_norm=0.1)
        results.append([p.grad for p in model.parameters()])
        if offload:
            assert (handle._offload.stored, handle._offload.fetched) == (3, 6)
        model.zero_grad()
        handle.detach()
        assert [layer.checkpoint_fn for layer in model.layers] == functions, "put back"
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_no_graph_no_copy():
    model = SHAPE.build()
    handle = attach(model, offload_checkpoints=True)
    with torch.no_grad():
        model(input_ids=ids_of())
    assert handle._offload.stored == 0


def test_remove_leaves_what_was_set_up_since():
    model = tiny_llama(tied=False, checkpointing=True)
    offload = CheckpointOffload(model)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    anew = model.model.layers[0]._gradient_checkpointing_func
    offload.remove()
    offload.remove()
    assert model.model.layers[0]._gradient_checkpointing_func is anew


class TestRefusals:
    def test_a_model_that_does_not_checkpoint(self):
        for model in (tiny_llama(tied=False), Wrapped(lambda layer: layer)):
            before = [type(module) for module in model.modules()]
            with pytest.raises(InvalidArgumentError, match="offload_checkpoints=True: the model does not checkpoint"):
                attach(model, offload_checkpoints=True)
            assert [type(module) for module in model.modules()] == before

    def test_reentrant_checkpointing_is_still_seen(self):
        model = tiny_llama(tied=False)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})
        with pytest.raises(UnsupportedModuleError, match="use_reentrant"):
            attach(model.train(), offload_checkpoints=True)

    def test_in_the_words_of_the_command_line(self, tmp_path):
        module = ToyModule(privacy(), PerformanceConfig(physical_batch_size=3, offload_checkpoints=True))
        with pytest.raises(ConfigurationError, match=r"performance\.offload_checkpoints=True: the model does not"):
            trainer(tmp_path).fit(module, datamodule=ToyData())
        (problem,) = PerformanceConfig(offload_checkpoints="host").problems()
        assert problem == "performance.offload_checkpoints=host: expected true or false"


def test_a_model_in_eval_mode_checkpoints_nothing():
    """`from_pretrained` returns one; nothing would be moved, and nothing saved."""
    model = SHAPE.build().eval()
    handle = attach(model, "hutchinson", 4, seed=0, check_isolation=False, offload_checkpoints=True)
    with pytest.raises(
        InvalidArgumentError, match=r"offload_checkpoints=True: the model is in eval mode.*call model.train"
    ):
        handle.begin_step()
    model.train()
    handle.begin_step()


@pytest.mark.parametrize("name", ["offload_checkpoints", "lean_norms"])
def test_flags_are_true_or_false(name):
    with pytest.raises(InvalidArgumentError, match=f"{name}='no': expected True or False"):
        attach(SHAPE.build(), **{name: "no"})
