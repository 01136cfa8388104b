"""RMSNorms in pieces, trainable and frozen: against one backward per record, and against their own forward."""

import architectures
import pytest
import torch
from cases import check_against_brute_force, make, tiny_llama
from torch import nn

from dprc_lightning import attach
from dprc_lightning.layers import ATTRIBUTE, normalization


class TestInPieces:
    @pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3"])
    @pytest.mark.parametrize("checkpointing", [False, True])
    def test_it_equals_one_backward_per_record(self, name, checkpointing, monkeypatch):
        monkeypatch.setattr(normalization, "PIECE", 100)
        attention = "eager" if name == "gemma2" else "sdpa"
        case = architectures.case(name, attention, checkpointing=checkpointing)
        check_against_brute_force(case, 1e-5, estimator="exact")

    def test_pieces_change_no_value(self, monkeypatch):
        found = []
        for piece in (2**22, 64):
            monkeypatch.setattr(normalization, "PIECE", piece)
            case = architectures.case("llama")
            model, batch = make(case)
            handle = attach(model, estimator="exact")
            losses = case.losses(model, batch)
            norms = handle.norms(losses)
            handle.clipped_backward(losses, max_grad_norm=0.5, norms=norms)
            found.append((losses.detach(), norms, [p.grad for p in model.parameters()]))
        (losses, norms, gradients), (in_pieces, their_norms, of_pieces) = found
        assert torch.equal(losses, in_pieces) and torch.allclose(norms, their_norms, rtol=1e-6)
        for a, b in zip(gradients, of_pieces, strict=True):
            assert float((a - b).abs().max()) <= 1e-6 * float(a.abs().max())

    def test_bfloat16_is_that_of_the_layers_own_backward(self):
        torch.manual_seed(0)
        model = architectures.build("llama", "sdpa", False, False, None).to(torch.bfloat16)
        norm = model.model.norm
        x = torch.randn(2, 7, 16, dtype=torch.bfloat16, requires_grad=True)
        weights = torch.randn(2, 7, 16, dtype=torch.bfloat16)
        (expected,) = torch.autograd.grad((norm(x) * weights).sum(), x)
        attach(model, estimator="exact")
        (found,) = torch.autograd.grad((norm(x) * weights).sum(), x)
        assert float((found - expected).norm() / expected.norm()) < 5e-3


class TestWithout:
    """`lean_norms=False`: trainable ones by the plain rule, frozen ones untouched."""

    @pytest.mark.parametrize("name", ["llama", "gemma2"])
    def test_it_equals_one_backward_per_record(self, name):
        attention = "eager" if name == "gemma2" else "sdpa"
        case = architectures.case(name, attention)
        check_against_brute_force(case, 1e-5, estimator="exact", lean_norms=False)

    def test_only_what_trains_is_touched(self):
        model = with_lora()
        attach(model, "exact", lean_norms=False)
        assert not any(ATTRIBUTE in norm.__dict__ for norm in norms_of(model))


def norms_of(model):
    return [module for module in model.modules() if type(module).__name__.endswith("RMSNorm")]


def with_lora():
    """A Llama of which the query and value projections train, all norms frozen."""
    model = tiny_llama(tied=False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("q_proj" in name or "v_proj" in name)
    return model


class TestFrozen:
    @pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3"])
    @pytest.mark.parametrize("checkpointing", [False, True])
    def test_losses_norms_and_sums_are_the_same(self, name, checkpointing, monkeypatch):
        monkeypatch.setattr(normalization, "PIECE", 100)
        found = []
        for lean in (False, True):
            case = architectures.case(name, "eager", checkpointing=checkpointing)
            model, batch = make(case)
            for norm in norms_of(model):
                norm.requires_grad_(False)
            handle = attach(model, "exact", lean_norms=lean)
            assert all((ATTRIBUTE in norm.__dict__) is lean for norm in norms_of(model))
            losses = case.losses(model, batch)
            norms = handle.norms(losses)
            handle.clipped_backward(losses, max_grad_norm=0.5, norms=norms)
            found.append((losses.detach(), norms, [p.grad for p in model.parameters() if p.requires_grad]))
        (losses, norms, gradients), (ours, their_norms, of_ours) = found
        assert torch.equal(losses, ours) and torch.allclose(norms, their_norms, rtol=1e-6)
        for a, b in zip(gradients, of_ours, strict=True):
            assert float((a - b).abs().max()) <= 2e-6 * float(a.abs().max())

    def test_it_keeps_its_input_alone(self):
        model = with_lora().to(torch.bfloat16)
        norm = model.model.norm
        x = torch.randn(2, 7, 16, dtype=torch.bfloat16, requires_grad=True)
        inside = x * 1.0
        kept = []

        def note(tensor):
            kept.append(tensor)
            return tensor

        for lean in (False, True):
            handle = attach(model, "exact", lean_norms=lean)
            kept.clear()
            with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
                norm(inside)
            large = {tensor.untyped_storage().data_ptr() for tensor in kept if tensor.numel() >= x.numel()}
            own = large - {inside.untyped_storage().data_ptr()}
            assert (len(own) == 0) is lean, "its own forward keeps a float32 copy"
            handle.detach()

    def test_detached_it_is_what_it_was(self):
        model = with_lora()
        before = [type(norm) for norm in norms_of(model)]
        handle = attach(model, "exact")
        assert [type(norm) for norm in norms_of(model)] != before
        handle.detach()
        assert [type(norm) for norm in norms_of(model)] == before
        assert not any(ATTRIBUTE in norm.__dict__ for norm in norms_of(model))

    def test_unfrozen_between_two_steps(self):
        """The norm that was lean while frozen is clipped from then on, as if it had trained from the start."""
        torch.manual_seed(0)
        late, from_the_start = with_lora(), with_lora()
        from_the_start.load_state_dict(late.state_dict())
        from_the_start.model.norm.requires_grad_(True)
        ids = torch.randint(0, 40, (3, 6))
        handles = [attach(model, "exact") for model in (late, from_the_start)]
        late.model.norm.requires_grad_(True)
        sums = []
        for model, handle in zip((late, from_the_start), handles, strict=True):
            handle.begin_step()
            losses = model(input_ids=ids).logits.float().square().mean((1, 2))
            handle.clipped_backward(losses, max_grad_norm=0.01)
            sums.append([p.grad for p in model.parameters() if p.requires_grad])
        assert len(sums[0]) == len(sums[1]) == 5
        for a, b in zip(*sums, strict=True):
            assert torch.equal(a, b)

    def test_one_of_an_unknown_form_is_left_alone(self):
        from transformers.models.llama.modeling_llama import LlamaRMSNorm

        class OddRMSNorm(LlamaRMSNorm):
            def forward(self, hidden_states):
                return hidden_states + super().forward(hidden_states)

        OddRMSNorm.__module__ = LlamaRMSNorm.__module__
        model = nn.Sequential(nn.Linear(4, 4), OddRMSNorm(4))
        model[1].requires_grad_(False)
        attach(model, "exact")
        assert type(model[1]) is OddRMSNorm

    def test_without_a_graph_it_runs_in_pieces_too(self, monkeypatch):
        model = with_lora()
        x = torch.randn(2, 9, 16)
        expected = model.model.norm(x)
        attach(model, "exact")
        monkeypatch.setattr(normalization, "PIECE", 32)
        with torch.no_grad():
            assert torch.equal(model.model.norm(x), expected)
