"""The head and the loss in one: against the layer and the loss apart, and against one backward per record."""

import architectures
import pytest
import torch
import torch.nn.functional as F
import transformers
from cases import Case, brute_force, brute_force_clipped_sum, brute_force_norms, tiny_llama, token_batch
from torch import nn

from dprc_lightning import attach
from dprc_lightning.bench.memory import LiveMemory
from dprc_lightning.clipping import causal_lm_loss, causal_lm_losses
from dprc_lightning.errors import InvalidArgumentError, LossShapeError, StepOrderError, UnsupportedModuleError
from dprc_lightning.layers import lm_head
from dprc_lightning.sketch import weighted
from dprc_lightning.sketch.projection import GaussianProjections


def inputs(batch):
    return {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}


def whole(model, batch):
    return causal_lm_loss(model(**inputs(batch)).logits, batch["labels"])


def in_blocks(model, batch, **settings):
    return causal_lm_losses(model, batch["labels"], **settings, **inputs(batch))


def with_bias():
    model = tiny_llama(tied=False)
    model.lm_head = nn.Linear(16, 40)
    return model


MODELS = {
    "untied": lambda: tiny_llama(tied=False),
    "tied": lambda: tiny_llama(tied=True),
    "tied, checkpointed": lambda: tiny_llama(tied=True, checkpointing=True),
    "bias": with_bias,
    "soft cap": lambda: architectures.build("gemma2", "eager", True, False, None),
    "frozen head": lambda: frozen_head(tiny_llama(tied=False)),
    "gpt2": lambda: architectures.build("gpt2", "sdpa", True, False, None),
}


def frozen_head(model):
    model.lm_head.requires_grad_(False)
    return model


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch):
    """More than one block per record, and a last one that is shorter."""
    monkeypatch.setattr(lm_head, "BLOCK_ROWS", 4)


def made(name):
    torch.manual_seed(0)
    model = MODELS[name]()
    return model, token_batch(40)


def twice_in_blocks(model, batch):
    return in_blocks(model, batch) + 0.5 * in_blocks(model, batch, reduction="sum")


def in_blocks_and_whole(model, batch):
    return in_blocks(model, batch) + 0.5 * whole(model, batch)


@pytest.mark.parametrize("losses_of", [twice_in_blocks, in_blocks_and_whole])
@pytest.mark.parametrize("name", ["tied", "bias"])
def test_a_head_that_is_used_twice(name, losses_of):
    """As a preference loss uses it. Weight and bias get one gradient, of both uses."""
    model, batch = made(name)
    handle = attach(model, "exact", check_isolation=False)
    handle.begin_step()
    losses = losses_of(model, batch)
    norms = handle.norms(losses)
    handle.clipped_backward(losses, max_grad_norm=0.5, norms=norms)
    ours = {n: p.grad for n, p in model.named_parameters()}
    model, batch = made(name)
    gradients = brute_force(Case(name, MODELS[name], lambda: {}, losses_of), model, batch)
    # The floor of a norm grows with the uses that it adds up.
    assert torch.allclose(norms.double(), brute_force_norms(gradients), rtol=1e-4)
    expected = brute_force_clipped_sum(gradients, 0.5)
    scale = max(float(total.abs().max()) for total in expected.values())
    for key, total in expected.items():
        assert float((ours[key] - total).abs().max()) < 1e-4 * scale, key


class TestFinalNorm:
    """Its output is not kept: the head makes it anew from the norm's input."""

    def kept_by_the_head(self, model, batch):
        """Whether the head keeps the input of the final norm instead of its output."""
        inputs_of_norm = []
        hook = model.model.norm.register_forward_hook(lambda module, args, out: inputs_of_norm.append((args[0], out)))
        losses = in_blocks(model, batch)
        hook.remove()
        node = losses.grad_fn
        while type(node).__name__ != "_HeadLossBackward":
            node = node.next_functions[0][0]
        ((x, out),) = inputs_of_norm
        kept = node.saved_tensors[0].untyped_storage().data_ptr()
        assert kept in (x.untyped_storage().data_ptr(), out.untyped_storage().data_ptr())
        return kept == x.untyped_storage().data_ptr()

    @pytest.mark.parametrize("name", ["tied", "untied", "tied, checkpointed", "bias"])
    def test_only_its_input_stays(self, name):
        model, batch = made(name)
        assert not self.kept_by_the_head(model, batch)
        handle = attach(model, "exact")
        handle.begin_step()
        assert self.kept_by_the_head(model, batch)
        assert handle._state.normed is None

    def test_what_comes_between_norm_and_head_is_seen(self):
        """A hook that changes the norm's output in place, or makes another one of it: the head keeps what it got."""

        def other(module, args, out):
            return out * 2.0

        def in_place(module, args, out):
            with torch.no_grad():
                out.mul_(2.0)

        for hook in (other, in_place):
            found = []
            for losses_of in (whole, in_blocks):
                model, batch = made("tied")
                handle = attach(model, "exact")
                handle.begin_step()
                model.model.norm.register_forward_hook(hook)
                losses = losses_of(model, batch)
                norms = handle.norms(losses)
                handle.clipped_backward(losses, max_grad_norm=0.1, norms=norms)
                found.append((losses.detach(), norms, [p.grad for p in model.parameters()]))
            (losses, norms, sums), (ours, of_ours, our_sums) = found
            assert torch.allclose(losses, ours, rtol=1e-6) and torch.allclose(norms, of_ours, rtol=2e-6)
            for a, b in zip(sums, our_sums, strict=True):
                assert float((a - b).abs().max()) < 2e-6 * float(a.abs().max()) + 1e-9

    def test_not_where_norms_are_not_lean(self):
        model, batch = made("tied")
        attach(model, "exact", lean_norms=False).begin_step()
        assert not self.kept_by_the_head(model, batch)


class TestRecordsThatAreLeftOut:
    """As with the head and the loss apart: what they hold reaches no sum, also through the losses' gradients."""

    @pytest.mark.parametrize("estimator", ["exact", "hutchinson"])
    @pytest.mark.parametrize("name", ["tied", "untied", "bias"])
    def test_an_infinite_loss_is_dropped(self, name, estimator):
        model, batch = made(name)
        labels = batch["labels"].clone()
        labels[-1] = -100
        found = []
        for rows in (slice(None), slice(-1)):
            model, _ = made(name)
            handle = attach(model, estimator, on_nonfinite="drop", check_isolation=False, **sketches(estimator))
            handle.begin_step()
            # The user's own mean: 0 / 0 for a record without a label.
            given = {key: value[rows] for key, value in inputs(batch).items()}
            sums = causal_lm_losses(model, labels[rows], reduction="sum", **given)
            losses = sums / (labels[rows, 1:] != -100).sum(1)
            norms = handle.norms(losses)
            handle.clipped_backward(losses, max_grad_norm=0.1, norms=norms)
            found.append((handle.dropped, [p.grad for p in handle.parameters]))
        (dropped, with_it), (none, without) = found
        assert (dropped, none) == (2, 1), "one has no label from the start"
        for a, b in zip(with_it, without, strict=True):
            assert a.isfinite().all() and float((a - b).abs().max()) <= 1e-6 * float(b.abs().max())

    def test_a_micro_batch_without_a_record(self):
        class Toy(nn.Module):
            config = transformers.LlamaConfig()

            def __init__(self):
                super().__init__()
                self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)

            def get_output_embeddings(self):
                return self.head

            def forward(self, ids):
                return transformers.modeling_outputs.CausalLMOutput(logits=self.head(self.embed(ids)))

        model = Toy()
        handle = attach(model, "hutchinson", 4)
        handle.begin_step()
        ids = torch.zeros((0, 9), dtype=torch.int64)
        losses = causal_lm_losses(model, ids, ids=ids)
        norms = handle.norms(losses)
        assert norms.shape == (0,)
        handle.clipped_backward(losses, max_grad_norm=1.0, norms=norms)
        assert not model.head.weight.grad.any()


class TestEvaluation:
    @pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
    @pytest.mark.parametrize("attached", [False, True])
    def test_losses_alone(self, mode, attached):
        model, batch = made("tied")
        expected = whole(model, batch).detach()
        if attached:
            attach(model, "exact").begin_step()
        with mode():
            assert torch.allclose(in_blocks(model, batch), expected, rtol=1e-6)

    def test_without_a_graph_no_gradient_is_made(self, monkeypatch):
        model, batch = made("tied")
        wanted = []
        original = lm_head._block

        def spy(*args, gradient):
            wanted.append(gradient)
            return original(*args, gradient=gradient)

        monkeypatch.setattr(lm_head, "_block", spy)
        with torch.no_grad():
            in_blocks(model, batch)
        assert wanted and not any(wanted)


class TestLabels:
    def test_of_another_shape(self):
        model, batch = made("tied")
        ids = batch["input_ids"]
        for labels, more in (
            (ids, {"logits_to_keep": 3}),
            (torch.cat([ids, ids], 1), {}),
            (torch.cat([ids, ids]), {}),
            (ids[:1], {}),
            (ids[:, :-1], {}),
        ):
            with pytest.raises(LossShapeError, match=r"labels of shape .* give one label for each token"):
                causal_lm_losses(model, labels, input_ids=ids, **more)
        with pytest.raises(LossShapeError, match=r"expected \[B, T\]"):
            causal_lm_losses(model, ids[0], input_ids=ids)

    @pytest.mark.parametrize("label", [-1, 40])
    def test_outside_of_the_vocabulary(self, label):
        model, batch = made("tied")
        labels = batch["input_ids"].clone()
        labels[0, 2] = label
        with pytest.raises(InvalidArgumentError, match=r"labels=.*expected tokens, 0 to 39, or ignore_index=-100"):
            causal_lm_losses(model, labels, input_ids=batch["input_ids"])
        # The first one predicts nothing and is nobody's target.
        labels[0, 2], labels[0, 0] = 0, label
        assert causal_lm_losses(model, labels, input_ids=batch["input_ids"]).isfinite().all()

    def test_a_model_that_returns_a_tuple_or_has_no_head(self):
        model, batch = made("tied")
        with pytest.raises(UnsupportedModuleError, match="returned a tuple without logits; leave return_dict out"):
            in_blocks(model, batch, return_dict=False)
        with pytest.raises(UnsupportedModuleError, match="a Linear has no get_output_embeddings"):
            causal_lm_losses(nn.Linear(2, 2), batch["input_ids"])
        with pytest.raises(InvalidArgumentError, match=r"label_smoothing='0.1'"):
            in_blocks(model, batch, label_smoothing="0.1")


def sketches(estimator):
    return {"projections": GaussianProjections(bytes(32), 4)} if estimator == "hutchinson" else {}


@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradients_without_privacy(name):
    model, batch = made(name)
    results = []
    for losses_of in (whole, in_blocks):
        model.zero_grad()
        losses = losses_of(model, batch)
        (losses * torch.arange(1.0, len(losses) + 1)).sum().backward()
        results.append((losses.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}))
    (losses, gradients), (ours, of_ours) = results
    assert torch.allclose(ours, losses, rtol=1e-6, atol=1e-6)
    for key, gradient in gradients.items():
        assert float((of_ours[key] - gradient).abs().max()) < 1e-6 * float(gradient.abs().max()) + 1e-8, key


@pytest.mark.parametrize("estimator", ["exact", "hutchinson"])
@pytest.mark.parametrize("name", MODELS)
def test_norms_and_clipped_sums(name, estimator):
    """Exact norms against one float64 backward per record; a sketch against that of the layers apart."""
    results, clip = [], 0.0
    for losses_of in (whole, in_blocks):
        model, batch = made(name)
        handle = attach(model, estimator=estimator, **sketches(estimator))
        handle.begin_step()
        losses = losses_of(model, batch)
        norms = handle.norms(losses)
        clip = clip or float(norms.median())
        handle.clipped_backward(losses, max_grad_norm=clip, norms=norms)
        results.append((norms, {n: p.grad for n, p in model.named_parameters() if p.requires_grad}))
    (norms, sums), (ours, of_ours) = results
    assert torch.allclose(ours, norms, rtol=2e-6)
    scale = max(float(total.abs().max()) for total in sums.values())
    for key, total in sums.items():
        assert float((of_ours[key] - total).abs().max()) < 2e-6 * scale, key
    if estimator == "exact":
        model, batch = made(name)
        gradients = brute_force(Case(name, MODELS[name], lambda: {}, whole), model, batch)
        assert torch.allclose(ours.double(), brute_force_norms(gradients), rtol=1e-5)
        expected = brute_force_clipped_sum(gradients, clip)
        for key, total in expected.items():
            assert float((of_ours[key] - total).abs().max()) < 1e-5 * scale, key


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_reduction_and_label_smoothing_are_those_of_torch(reduction, smoothing):
    model, batch = made("bias")
    logits, targets = model(**inputs(batch)).logits[:, :-1], batch["labels"][:, 1:]
    for i, loss in enumerate(in_blocks(model, batch, reduction=reduction, label_smoothing=smoothing)):
        expected = F.cross_entropy(logits[i], targets[i], label_smoothing=smoothing, reduction=reduction)
        if bool((targets[i] != -100).any()):
            assert float(loss.detach()) == pytest.approx(float(expected), rel=1e-5)


def test_a_record_without_a_label_has_loss_and_gradient_zero():
    model, batch = made("tied")
    batch["labels"][1] = -100
    handle = attach(model, estimator="exact")
    handle.begin_step()
    losses = in_blocks(model, batch)
    assert float(losses[1]) == 0.0 and float(handle.norms(losses)[1]) == 0.0


@pytest.mark.parametrize("estimator", ["exact", "hutchinson"])
def test_losses_may_be_scaled_after_the_head(estimator):
    norms = []
    for factor in (1.0, -3.0):
        model, batch = made("tied")
        handle = attach(model, estimator=estimator, **sketches(estimator))
        handle.begin_step()
        losses = in_blocks(model, batch) * factor
        norms.append(handle.norms(losses))
        handle.clipped_backward(losses, max_grad_norm=1.0, norms=norms[-1])
    assert torch.allclose(norms[1], 3.0 * norms[0], rtol=1e-5)


def test_bfloat16():
    results = []
    for losses_of in (whole, in_blocks):
        model, batch = made("tied")
        model = model.to(torch.bfloat16)
        handle = attach(model, estimator="exact")
        handle.begin_step()
        losses = losses_of(model, batch)
        norms = handle.norms(losses)
        handle.clipped_backward(losses, max_grad_norm=1e6, norms=norms)
        assert all(p.grad.dtype is torch.float32 for p in model.parameters())
        results.append((norms, torch.cat([p.grad.flatten() for p in model.parameters()])))
    (norms, sums), (ours, of_ours) = results
    assert torch.allclose(ours, norms, rtol=5e-3)
    assert float((sums - of_ours).norm() / sums.norm()) < 5e-3


def test_autocast_rounds_in_both_passes_alike():
    model, batch = made("untied")
    handle = attach(model, estimator="exact")
    handle.begin_step()
    with torch.autocast("cpu", torch.bfloat16):
        losses = in_blocks(model, batch)
    handle.clipped_backward(losses, max_grad_norm=0.1)
    assert model.lm_head.weight.grad.dtype is torch.float32


def test_evaluation_builds_no_graph():
    model, batch = made("tied")
    attach(model)
    with torch.no_grad():
        losses = in_blocks(model, batch)
    assert not losses.requires_grad and torch.allclose(losses, whole(model, batch), rtol=1e-6)


def test_a_tied_weight_has_one_gradient_buffer_and_no_logits(monkeypatch):
    monkeypatch.setattr(weighted, "SLAB", 2**14)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=30_000, hidden_size=64, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    ids = torch.randint(0, 30_000, (1, 64))
    handle = attach(model, estimator="hutchinson", sketch_dim=1, check_isolation=False)
    with LiveMemory() as live:
        live.add(model.parameters())
        handle.begin_step()
        losses = causal_lm_losses(model, ids, input_ids=ids)
        handle.clipped_backward(losses, max_grad_norm=1.0)
    table = 30_000 * 64 * 4
    # The weight and its gradient; a block of logits is a sixteenth of a table, P a sixty-fourth.
    assert live.peak < 2.6 * table


class TestRefused:
    def test_a_step_that_begins_after_the_forward(self):
        model, batch = made("tied")
        handle = attach(model, "hutchinson", sketch_dim=4)
        with pytest.raises(StepOrderError, match=r"call begin_step\(\) first"):
            in_blocks(model, batch)
        handle.begin_step()
        losses = in_blocks(model, batch)
        handle.begin_step()
        with pytest.raises(StepOrderError, match=r"begin_step\(\) before the forward"):
            handle.norms(losses)

    def test_a_model_that_changes_its_logits(self):
        model, batch = made("untied")

        class Scaled(type(model)):
            def forward(self, **kwargs):
                out = super().forward(**kwargs)
                out.logits = out.logits * 2
                return out

        model.__class__ = Scaled
        with pytest.raises(UnsupportedModuleError, match="changes the output of its head"):
            in_blocks(model, batch)

    def test_a_head_that_is_not_linear(self):
        model, batch = made("untied")
        model.lm_head = nn.Sequential(model.lm_head)
        with pytest.raises(UnsupportedModuleError, match="Sequential, not a torch.nn.Linear"):
            in_blocks(model, batch)

    @pytest.mark.parametrize("settings", [{"reduction": "none"}, {"label_smoothing": 1.0}])
    def test_settings(self, settings):
        model, batch = made("untied")
        with pytest.raises(InvalidArgumentError, match=next(iter(settings))):
            in_blocks(model, batch, **settings)

    def test_the_head_is_what_it_was_after_an_error(self):
        model, batch = made("soft cap")
        with pytest.raises(ValueError, match="input_ids"):
            causal_lm_losses(model, batch["labels"], inputs_embeds=torch.zeros(1, 1, 1), **inputs(batch))
        assert "forward" not in model.lm_head.__dict__
        assert model.config.final_logit_softcapping is not None
