"""What is refused, and that detach leaves no trace."""

import copy
import itertools
import pickle

import numpy as np
import pytest
import torch
from cases import CASES, TinyLM, make, tiny_llama, token_batch
from torch import nn
from torch.utils.checkpoint import checkpoint

from dprc_lightning import attach
from dprc_lightning.errors import (
    InvalidArgumentError,
    LossShapeError,
    NonFiniteRecordError,
    StepOrderError,
    UnclippedGradientError,
    UnsupportedModuleError,
    UnusedParameterError,
)


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))


def losses_of(model, records=3):
    return model(torch.randn(records, 4)).square().sum(1)


class TestUnsupported:
    def test_every_parameter_is_named_with_its_module_and_the_remedy(self):
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Conv3d(3, 3, 1))
        with pytest.raises(UnsupportedModuleError) as caught:
            attach(model)
        message = str(caught.value)
        for part in ("'1' (BatchNorm1d)", "'2' (Conv3d), parameters 'weight', 'bias'"):
            assert part in message
        assert "freeze it" in message
        assert type(model[0]) is nn.Linear, "a refused model must stay untouched"

    def test_frozen_ones_are_no_problem(self):
        model = nn.Sequential(nn.Linear(3, 3), nn.Conv3d(3, 3, 1))
        model[1].requires_grad_(False)
        attach(model)

    def test_a_frozen_batch_norm_still_mixes_records(self):
        model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, affine=False))
        with pytest.raises(UnsupportedModuleError, match="over the records of a batch"):
            attach(model)

    def test_a_bare_parameter(self):
        model = nn.Linear(3, 3)
        model.register_parameter("extra", nn.Parameter(torch.zeros(2)))
        with pytest.raises(UnsupportedModuleError, match="'extra'"):
            attach(model)

    def test_subclasses_with_a_forward_of_their_own(self):
        with pytest.raises(UnsupportedModuleError, match="out_proj"):
            attach(nn.MultiheadAttention(4, 2))

    @pytest.mark.parametrize("option", [{"scale_grad_by_freq": True}, {"max_norm": 1.0}, {"sparse": True}])
    def test_embedding_options(self, option):
        with pytest.raises(UnsupportedModuleError, match=next(iter(option))):
            attach(nn.Sequential(nn.Embedding(5, 3, **option)))

    def test_a_rms_norm_of_another_formula(self):
        from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
        from transformers.models.llama.modeling_llama import LlamaRMSNorm

        class OddRMSNorm(LlamaRMSNorm):
            def forward(self, hidden_states):
                return 2 * super().forward(hidden_states)

        OddRMSNorm.__module__ = LlamaRMSNorm.__module__
        with pytest.raises(UnsupportedModuleError, match="OddRMSNorm"):
            attach(nn.Sequential(OddRMSNorm(4)))
        attach(nn.Sequential(GemmaRMSNorm(4)))

    def test_nothing_trainable(self):
        with pytest.raises(UnsupportedModuleError, match="no trainable parameter"):
            attach(nn.Linear(3, 3).requires_grad_(False))

    def test_attach_twice(self):
        model = small()
        attach(model)
        with pytest.raises(UnsupportedModuleError, match="attached already"):
            attach(model)

    def test_compiled(self):
        with pytest.raises(UnsupportedModuleError, match=r"torch\.compile"):
            attach(torch.compile(small()))

    def test_reentrant_checkpointing(self):
        model = small()
        handle = attach(model)
        x = torch.randn(3, 4, requires_grad=True)
        losses = checkpoint(model, x, use_reentrant=True).square().sum(1)
        with pytest.raises(UnsupportedModuleError, match="use_reentrant"):
            handle.norms(losses)

    def test_reentrant_checkpointing_of_a_part(self):
        """The norm pass sees the head alone: the blocks' gradients must not get through."""
        model = small()
        handle = attach(model)
        x = torch.randn(3, 4, requires_grad=True)
        losses = model[2](checkpoint(model[:2], x, use_reentrant=True)).square().sum(1)
        with pytest.raises(UnusedParameterError, match=r"'0\.weight', '0\.bias'.*use_reentrant"):
            handle.norms(losses)
        handle.detach()
        handle = attach(model, unused="zero")
        losses = model[2](checkpoint(model[:2], x, use_reentrant=True)).square().sum(1)
        norms = handle.norms(losses)
        with pytest.raises((UnclippedGradientError, StepOrderError), match="use_reentrant"):
            handle.clipped_backward(losses, max_grad_norm=1.0, norms=norms)

    @pytest.mark.parametrize(
        ("settings", "remedy"),
        [
            ({"use_reentrant": True}, "set use_reentrant=False"),
            ({"use_reentrant": False, "preserve_rng_state": False}, "set preserve_rng_state=True"),
        ],
    )
    def test_checkpointing_that_a_model_is_set_to(self, settings, remedy):
        model = tiny_llama(tied=False)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=settings)
        with pytest.raises(UnsupportedModuleError, match=remedy) as caught:
            attach(model)
        assert "module 'model'" in str(caught.value) and str(settings) in str(caught.value)
        model.gradient_checkpointing_disable()
        attach(model)

    def test_checkpoint_wrapper(self):
        from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

        wrapped = [checkpoint_wrapper(small(), checkpoint_impl=CheckpointImpl.REENTRANT)]
        wrapped.append(checkpoint_wrapper(small(), preserve_rng_state=False))
        for module, remedy in zip(wrapped, ("use_reentrant=False", "preserve_rng_state=True"), strict=True):
            with pytest.raises(UnsupportedModuleError, match=remedy):
                attach(nn.Sequential(module))
        attach(nn.Sequential(checkpoint_wrapper(small())))

    @pytest.mark.parametrize("way", ["the model", "a part", "in place", "a function around it"])
    def test_compiling_after_attach(self, way):
        model = small()
        handle = attach(model)
        run = model
        if way == "the model":
            run = torch.compile(model, backend="eager")
        elif way == "a part":
            run = nn.Sequential(torch.compile(model[0], backend="eager"), model[1:])
        elif way == "in place":
            model.compile(backend="eager")
        else:
            run = torch.compile(lambda x: model(x), backend="eager")
        losses = run(torch.randn(3, 4)).square().sum(1)
        with pytest.raises(UnsupportedModuleError, match=r"torch\.compile"):
            handle.norms(losses)
        # Another model, not compiled, is none the worse for it.
        other = small()
        attach(other).norms(losses_of(other))

    def test_a_compiled_part(self):
        for compiled in (nn.Sequential(torch.compile(small())), nn.Sequential(small())):
            if type(compiled[0]) is nn.Sequential:
                compiled[0].compile()
            with pytest.raises(UnsupportedModuleError, match=r"torch\.compile"):
                attach(compiled)


class TestArguments:
    @pytest.mark.parametrize(
        ("arguments", "name"),
        [
            ({"estimator": "ghost"}, "estimator"),
            ({"estimator": "hutchpp", "projection": "rademacher"}, "estimator"),
            ({"sketch_dim": 0}, "sketch_dim"),
            ({"sketch_dim": 2.5}, "sketch_dim"),
            ({"projection": "countsketch"}, "projection"),
            ({"projection": "sparse"}, "projection"),
        ],
    )
    def test_attach(self, arguments, name):
        with pytest.raises(InvalidArgumentError, match=f"^{name}="):
            attach(small(), **arguments)

    def test_losses_must_be_one_per_record(self):
        model = small()
        handle = attach(model)
        with pytest.raises(LossShapeError, match=r"shape \[B\]"):
            handle.norms(losses_of(model).mean())
        with pytest.raises(LossShapeError, match="do not require grad"):
            handle.norms(torch.ones(3))
        with torch.no_grad(), pytest.raises(LossShapeError, match="do not require grad"):
            handle.norms(losses_of(model))

    def test_a_layer_that_sees_another_batch_size(self):
        model = nn.Linear(4, 1)
        handle = attach(model)
        losses = model(torch.randn(6, 4)).view(3, 2).sum(1)
        with pytest.raises(LossShapeError, match="first dimension"):
            handle.norms(losses)

    @pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
    def test_max_grad_norm(self, bad):
        model = small()
        handle = attach(model)
        with pytest.raises(InvalidArgumentError, match="max_grad_norm"):
            handle.clipped_backward(losses_of(model), max_grad_norm=bad)

    @pytest.mark.parametrize("weights", [[0, 1, 1.5], [0, -1, 1], [0, float("nan"), 1]])
    def test_weights_that_would_exceed_the_sensitivity(self, weights):
        model = small()
        handle = attach(model)
        with pytest.raises(InvalidArgumentError, match="weights"):
            handle.clipped_backward(losses_of(model), max_grad_norm=1.0, weights=torch.tensor(weights))
        assert all(p.grad is None for p in model.parameters())

    def test_a_non_finite_record(self):
        model = small()
        handle = attach(model)
        x = torch.randn(3, 4)
        x[1] = float("inf")
        with pytest.raises(NonFiniteRecordError, match=r"\[1\]"):
            handle.clipped_backward(model(x).square().sum(1), max_grad_norm=1.0)
        assert all(p.grad is None for p in model.parameters())


class Scaled(torch.autograd.Function):
    """Times a number that may change before the backward."""

    @staticmethod
    def forward(ctx, losses, factor):
        ctx.factor = factor
        return losses.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor, None


class TestUnclippedGradients:
    def test_a_backward_of_the_users_own(self):
        model = small()
        attach(model)
        with pytest.raises(UnclippedGradientError, match="clipped_backward"):
            losses_of(model).sum().backward()
        # The first parameter that was reached keeps nothing to step on.
        assert any(p.grad is None for p in model.parameters())

    def test_a_weight_used_outside_of_its_module(self):
        model = small()
        handle = attach(model, unused="zero")
        hidden = torch.tanh(model[0](torch.randn(3, 4)))
        losses = torch.nn.functional.linear(hidden, model[2].weight, model[2].bias).square().sum(1)
        norms = handle.norms(losses)
        with pytest.raises(UnclippedGradientError, match="outside of its module's forward"):
            handle.clipped_backward(losses, max_grad_norm=1.0, norms=norms)

    @pytest.mark.parametrize("way", ["tied functional head", "penalty on the weights", "gradient penalty"])
    def test_a_gradient_that_comes_by_a_second_way(self, way):
        """The module's own use has its norm taken; the other one must not slip in beside it."""
        torch.manual_seed(0)
        if way == "tied functional head":
            model = nn.Sequential(nn.Embedding(11, 8))
            ids = torch.randint(0, 11, (4, 5))
            logits = lambda: nn.functional.linear(20 * model(ids), model[0].weight)  # noqa: E731
            losses = lambda: nn.functional.cross_entropy(logits().mT, ids.roll(1, 1), reduction="none").sum(1)  # noqa: E731
        else:
            model = small()
            x = torch.randn(4, 4, requires_grad=True)

            def losses():
                out = model(x).sum(1)
                if way == "penalty on the weights":
                    return out.square() + model[0].weight.square().sum()
                (g,) = torch.autograd.grad(out.sum(), x, create_graph=True)
                return out.square() + 50 * g.square().sum(1)

        handle = attach(model, "exact")
        with pytest.raises(UnclippedGradientError, match="does not come from its module's forward"):
            handle.clipped_backward(losses(), max_grad_norm=1.0)
        assert all(p.grad is None for p in model.parameters())

    def test_two_passes_of_different_losses(self):
        model = small()
        handle = attach(model, "exact")
        losses = losses_of(model)
        norms = handle.norms(losses)
        for other in (1000 * losses, losses_of(model)):
            with pytest.raises(StepOrderError, match="these very losses"):
                handle.clipped_backward(other, max_grad_norm=1.0, norms=norms)
        with pytest.raises(UnclippedGradientError, match="same losses"):
            handle.clipped_backward(
                losses, max_grad_norm=1.0, norms=norms, backward=lambda total: (1000 * total).backward()
            )
        assert all(p.grad is None for p in model.parameters())

    @pytest.mark.parametrize("clip", [1.0, 1e-7])
    def test_losses_that_change_between_the_passes(self, clip):
        """In place, or from nothing: the norm that was taken is that of another gradient."""
        model = small()
        handle = attach(model, "exact")
        for before, after in ((0.0, 1000.0), (1e-7, 50.0)):
            factor = torch.tensor(before)
            losses = Scaled.apply(losses_of(model), factor)
            norms = handle.norms(losses)
            factor.fill_(after * max(before, 1.0))
            with pytest.raises(UnclippedGradientError, match="not those of the norm pass"):
                handle.clipped_backward(losses, max_grad_norm=clip, norms=norms)

    def test_norms_of_another_forward(self):
        model = small()
        handle = attach(model, "exact")
        handle.begin_step()
        first, second = losses_of(model), losses_of(model) * 100
        small_norms = handle.norms(first)
        norms = handle.norms(second)
        with pytest.raises(InvalidArgumentError, match="norms"):
            handle.clipped_backward(second, max_grad_norm=1.0, norms=small_norms)
        handle.clipped_backward(second, max_grad_norm=1.0, norms=2 * norms)
        assert torch.allclose(handle.clip_factors, (0.5 / norms).clamp(max=1.0))

    def test_one_norm_pass_serves_one_clipped_backward(self):
        model = small()
        handle = attach(model, "exact")
        losses = losses_of(model)
        norms = handle.norms(losses)
        keep = {"max_grad_norm": 1.0, "backward": lambda total: total.backward(retain_graph=True)}
        handle.clipped_backward(losses, norms=norms, **keep)
        with pytest.raises(StepOrderError, match="clipped already"):
            handle.clipped_backward(losses, norms=norms, **keep)

    @pytest.mark.parametrize("way", ["register_hook", "register_post_accumulate_grad_hook"])
    @pytest.mark.parametrize("when", ["before", "after"])
    def test_gradient_hooks(self, way, when):
        """One that comes after ours could multiply the gradient; an optimizer in the backward would skip the noise."""
        model = small()
        if when == "before":
            getattr(model[0].weight, way)(lambda gradient: None if way == "register_hook" else None)
        handle = attach(model, "exact")
        if when == "after":
            getattr(model[0].weight, way)(lambda gradient: gradient * 10 if way == "register_hook" else None)
        if (way, when) == ("register_hook", "before"):
            # It changes nothing, and what it changed would be seen.
            handle.norms(losses_of(model))
            return
        with pytest.raises(UnclippedGradientError, match=r"'0\.weight' has a gradient hook"):
            handle.norms(losses_of(model))

    @pytest.mark.parametrize("random", ["numpy", "own generator"])
    def test_inputs_that_are_drawn_again(self, random):
        """Before a layer in a checkpoint: its output gradient stays the same, and its input does not."""
        numbers = np.random.default_rng(0)
        generator = torch.Generator().manual_seed(0)

        def drop(x):
            mask = (
                torch.from_numpy(numbers.random(x.shape))
                if random == "numpy"
                else torch.rand(x.shape, generator=generator)
            )
            return x * (mask < 0.2) * 5

        model = nn.Linear(16, 4, bias=False)
        handle = attach(model, "exact")
        refused = 0
        for _ in range(20):
            handle.begin_step()
            y = checkpoint(lambda x: model(drop(x).float()), torch.randn(1, 16), use_reentrant=False)
            try:
                handle.clipped_backward((y * torch.tensor([100.0, 200, -100, 300])).sum(1), max_grad_norm=1.0)
            except UnclippedGradientError:
                refused += 1
            else:
                assert model.weight.grad.norm() <= 1.0 + 1e-3
            model.zero_grad()
        assert refused > 10

    def test_dropout_that_is_drawn_again(self):
        model = nn.Sequential(nn.Linear(4, 64), nn.Dropout(0.5), nn.Linear(64, 1))
        handle = attach(model, "exact")
        options = {"use_reentrant": False, "preserve_rng_state": False, "determinism_check": "none"}
        losses = checkpoint(model, torch.randn(3, 4), **options).squeeze(-1) * 20
        with pytest.raises(UnclippedGradientError, match="preserve_rng_state"):
            handle.clipped_backward(losses, max_grad_norm=1.0)

    def test_a_saturated_record_is_no_mismatch(self):
        """A gradient of rounding errors differs between the passes, and does not matter."""
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
        with torch.no_grad():
            model[2].weight.mul_(300)
        handle = attach(model, "exact")
        x = torch.randn(64, 4)
        labels = model(x).argmax(1)
        losses = nn.functional.cross_entropy(model(x) * 5, labels, reduction="none")
        handle.clipped_backward(losses, max_grad_norm=0.5, scale=1 / 7)

    def test_autograd_grad_stays_free(self):
        model = small()
        handle = attach(model, "exact")
        torch.autograd.grad(losses_of(model).sum(), list(model.parameters()))
        losses = losses_of(model)
        norms = handle.norms(losses)
        torch.autograd.grad(losses.sum(), list(model.parameters()), retain_graph=True)
        handle.clipped_backward(losses, max_grad_norm=1.0, norms=norms)

    def test_a_scale_that_is_no_number(self):
        model = small()
        handle = attach(model)
        with pytest.raises(InvalidArgumentError, match="scale=nan"):
            handle.clipped_backward(losses_of(model), max_grad_norm=1.0, scale=float("nan"))


class TestChangedModels:
    def test_unfrozen_after_attach(self):
        model = small()
        model[2].requires_grad_(False)
        handle = attach(model)
        model[2].requires_grad_(True)
        with pytest.raises(UnsupportedModuleError, match="became trainable"):
            handle.norms(losses_of(model))

    def test_replaced_or_tied_after_attach(self):
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        attach(model)
        model[1].weight = model[0].weight
        with pytest.raises(UnsupportedModuleError, match="replaced or tied"):
            losses_of(model)

    def test_shared_by_layers_of_different_kinds(self):
        model = nn.Sequential(nn.RMSNorm((2, 3)), nn.Linear(3, 2, bias=False))
        model[1].weight = model[0].weight
        with pytest.raises(UnsupportedModuleError, match="different kinds"):
            attach(model)

    def test_float16(self):
        with pytest.raises(UnsupportedModuleError, match="float16"):
            attach(small().half())
        model = small()
        handle = attach(model)
        with torch.autocast("cpu", dtype=torch.float16):
            losses = losses_of(model).float()
        with pytest.raises(UnsupportedModuleError, match="output gradient is float16"):
            handle.norms(losses)

    def test_low_precision_products_and_losses(self):
        model = small()
        handle = attach(model)
        with pytest.raises(LossShapeError, match="bfloat16"):
            handle.norms(losses_of(model).bfloat16())
        torch.set_float32_matmul_precision("medium")
        try:
            with pytest.raises(UnsupportedModuleError, match="set_float32_matmul_precision"):
                handle.norms(losses_of(model))
        finally:
            torch.set_float32_matmul_precision("highest")

    def test_copies(self):
        model = small()
        attach(model)
        for copying in (copy.deepcopy, pickle.dumps):
            with pytest.raises(UnsupportedModuleError, match=r"detach\(\)"):
                copying(model)

    def test_running_statistics(self):
        with pytest.raises(UnsupportedModuleError, match="running statistics"):
            attach(nn.Sequential(nn.Linear(4, 4), nn.InstanceNorm1d(3, track_running_stats=True)))

        class Counts(nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("seen", torch.zeros(4))

            def forward(self, x):
                self.seen += x.detach().sum(0)
                return x

        class Replaces(Counts):
            def forward(self, x):
                self.seen = self.seen + x.detach().sum(0)
                return x

        class Teacher(nn.Module):
            def __init__(self):
                super().__init__()
                self.seen = nn.Parameter(torch.zeros(4), requires_grad=False)

            def forward(self, x):
                with torch.no_grad():
                    self.seen += x.detach().sum(0)
                return x

        for kind, begin in itertools.product((Counts, Replaces, Teacher), (True, False)):
            model = nn.Sequential(kind(), small())
            handle = attach(model)
            if begin:
                handle.begin_step()
            with pytest.raises(UnsupportedModuleError, match=r"buffer or frozen parameter '0\.seen'"):
                handle.norms(losses_of(model))


class TestSteps:
    def test_a_projection_does_not_serve_two_steps(self):
        model = small()
        handle = attach(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        handle.begin_step()
        handle.clipped_backward(losses_of(model), max_grad_norm=1.0)
        optimizer.step()
        with pytest.raises(StepOrderError, match="every logical step"):
            handle.norms(losses_of(model))
        handle.begin_step()
        handle.norms(losses_of(model))

    def test_a_projection_never_repeats(self):
        handle = attach(small())
        handle.begin_step(3)
        for index in (3, 2):
            with pytest.raises(StepOrderError, match="never repeat"):
                handle.begin_step(index)
        handle.begin_step()
        handle.begin_step(9)

    def test_two_forwards_before_the_norms(self):
        """Uses are counted by forwards; a count that fits no longer must not lose a use."""
        model = TinyLM(tied=True)
        handle = attach(model, "exact")
        batch = token_batch(17)
        case = next(c for c in CASES if c.name == "lm_tied")
        first, second = case.losses(model, batch), case.losses(model, batch)
        assert torch.allclose(handle.norms(first), handle.norms(second), rtol=1e-6)
        assert torch.allclose(handle.norms(first), handle.norms(second), rtol=1e-6)

    def test_after_detach(self):
        model = small()
        handle = attach(model)
        handle.detach()
        with pytest.raises(StepOrderError, match="detached"):
            handle.begin_step()


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_detach_leaves_no_trace(case):
    model, batch = make(case)
    before = {name: (type(m), dict(m.__dict__)) for name, m in model.named_modules()}
    handle = attach(model)
    assert set(model.state_dict()) == set(case.build().state_dict())
    handle.detach()
    handle.detach()
    for name, module in model.named_modules():
        assert type(module) is before[name][0]
        assert set(module.__dict__) == set(before[name][1])
    case.losses(model, batch).sum().backward()
    with pytest.raises(UnclippedGradientError, match="zero_grad"):
        attach(model)
    model.zero_grad()
    attach(model)


@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_the_values_are_the_models_own(case):
    model, batch = make(case)
    expected = case.losses(model, batch)
    attach(model)
    assert torch.allclose(case.losses(model, batch), expected, rtol=1e-6, atol=1e-7)
    with torch.no_grad():
        assert torch.allclose(case.losses(model, batch), expected, rtol=1e-6, atol=1e-7)


def test_the_plan_names_every_trainable_parameter():
    model = tiny_llama(tied=True)
    rows = attach(model, "hutchinson", 4).plan()
    assert {r.parameter for r in rows} == {n for n, p in model.named_parameters() if p.requires_grad}
    embedding = next(r for r in rows if "embed_tokens" in r.parameter)
    assert len(embedding.modules) == 2 and embedding.side == "output" and embedding.shape == (40, 16)
    assert (embedding.projection_floats, embedding.sketch_floats) == (4 * 40, 4 * 16)
    assert {r.estimator for r in rows if "norm" in r.parameter} == {"exact"}


def test_auto_decides_by_the_weight_alone():
    model = nn.Sequential(nn.Linear(100, 100, bias=False), nn.Linear(100, 4, bias=False))
    handle = attach(model, "auto", 8)
    assert [r.estimator for r in handle.plan()] == ["hutchinson", "exact"]
    assert handle.sketch_dim == 8
    handle.detach()
    assert attach(model, "auto", 50).sketch_dim is None
