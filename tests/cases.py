"""Small models with a per-record loss, and the brute force that everything is held against: one backward per record."""

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from dprc_lightning.clipping import ClippingHandle, attach, causal_lm_loss

Batch = dict[str, Tensor]


class IdentityProjections:
    """P = identity, so k = rows and the estimate is the exact norm, up to rounding."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def begin_step(self, index: int) -> None:
        self.steps.append(index)

    def matrix(self, name: str, rows: int, device: torch.device) -> Tensor:
        return torch.eye(rows, device=device)


class VectorMLP(nn.Module):
    """Inputs [B, d], biases, one layer called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.twice = nn.Linear(8, 8)
        self.last = nn.Linear(8, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        return self.last(torch.tanh(self.twice(torch.tanh(self.twice(h)))))


class Sequence(nn.Module):
    """Inputs [B, T, d] and [B, H, T, d], torch's RMSNorm on three and four dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8)
        self.norm = nn.RMSNorm(8)
        self.head_norm = nn.RMSNorm(4)
        self.per_head = nn.Linear(4, 4)
        self.out = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.up(x))
        heads = h.unflatten(-1, (2, 4)).transpose(1, 2)
        heads = torch.sin(self.per_head(self.head_norm(heads)))
        return self.out(heads.transpose(1, 2).flatten(2))


class TinyLM(nn.Module):
    """Embedding and head, tied or not, with a padding row."""

    def __init__(self, tied: bool, vocabulary: int = 17, width: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width, padding_idx=0)
        self.mix = nn.Linear(width, width)
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        with torch.no_grad():
            self.norm.weight.uniform_(0.5, 1.5)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        h = self.embed(input_ids)
        h = h + torch.tanh(self.mix(h.cumsum(1)))
        return self.head(self.norm(h))


def tiny_llama(tied: bool, checkpointing: bool = False) -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=40,
        max_position_embeddings=32,
        tie_word_embeddings=tied,
        attn_implementation="sdpa",
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    if checkpointing:
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
        model.train()
    return model


@dataclass(frozen=True)
class Case:
    """A model, a batch, and its losses [B]."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    losses: Callable[[nn.Module, Batch], Tensor]


def _vector_batch() -> Batch:
    return {"x": torch.randn(6, 5), "y": torch.randint(0, 3, (6,))}


def _vector_losses(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def _sequence_batch() -> Batch:
    return {"x": torch.randn(4, 7, 6), "y": torch.randn(4, 7, 2)}


def _sequence_losses(model: nn.Module, batch: Batch) -> Tensor:
    return (model(batch["x"]) - batch["y"]).square().mean((1, 2)) * 30


def token_batch(vocabulary: int) -> Batch:
    """Right-padded records, -100 on padding and on a prompt, and one record without a single label."""
    lengths = [9, 5, 7, 3, 8]
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    labels = torch.full_like(ids, -100)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        ids[row, :length] = torch.randint(1, vocabulary, (length,))
        labels[row, 1:length] = ids[row, 1:length]
        mask[row, :length] = 1
    labels[0, :4] = -100
    labels[3] = -100
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def lm_losses(model: nn.Module, batch: Batch) -> Tensor:
    if isinstance(model, TinyLM):
        logits = model(batch["input_ids"])
    else:
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
    return causal_lm_loss(logits, batch["labels"])


CASES = [
    Case("vector_mlp", VectorMLP, _vector_batch, _vector_losses),
    Case("sequence", Sequence, _sequence_batch, _sequence_losses),
    Case("lm_untied", lambda: TinyLM(tied=False), lambda: token_batch(17), lm_losses),
    Case("lm_tied", lambda: TinyLM(tied=True), lambda: token_batch(17), lm_losses),
    Case("llama_untied", lambda: tiny_llama(tied=False), lambda: token_batch(40), lm_losses),
    Case("llama_tied", lambda: tiny_llama(tied=True), lambda: token_batch(40), lm_losses),
    Case("llama_checkpointed", lambda: tiny_llama(tied=True, checkpointing=True), lambda: token_batch(40), lm_losses),
]


def make(case: Case, seed: int = 0) -> tuple[nn.Module, Batch]:
    torch.manual_seed(seed)
    return case.build(), case.batch()


def brute_force(case: Case, model: nn.Module, batch: Batch) -> list[dict[str, Tensor]]:
    """Each record's gradient from a backward of that record alone, on a copy that was never attached; float64 math.

    Returns one dict per record: parameter name -> gradient, float64.
    """
    reference = copy.deepcopy(model).double()
    records = len(next(iter(batch.values())))
    gradients = []
    for i in range(records):
        alone = {k: v[i : i + 1].double() if v.is_floating_point() else v[i : i + 1] for k, v in batch.items()}
        reference.zero_grad(set_to_none=True)
        case.losses(reference, alone).sum().backward()
        gradients.append({
            name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
            for name, p in reference.named_parameters()
            if p.requires_grad
        })
    return gradients


def brute_force_norms(gradients: list[dict[str, Tensor]]) -> Tensor:
    return torch.stack([torch.stack([g.square().sum() for g in record.values()]).sum().sqrt() for record in gradients])


def brute_force_clipped_sum(gradients: list[dict[str, Tensor]], max_grad_norm: float) -> dict[str, Tensor]:
    norms = brute_force_norms(gradients)
    factors = [min(max_grad_norm / float(n), 1.0) if n > 0 else 1.0 for n in norms]
    return {name: sum(f * record[name] for f, record in zip(factors, gradients, strict=True)) for name in gradients[0]}


def check_against_brute_force(case: Case, relative: float, **attachment) -> ClippingHandle:
    """Norms, clipped sum, and no gradient for what is frozen."""
    model, batch = make(case)
    gradients = brute_force(case, model, batch)
    expected = brute_force_norms(gradients)
    handle = attach(model, **attachment)
    losses = case.losses(model, batch)
    norms = handle.norms(losses)
    assert float((norms - expected).abs().max()) < relative * float(expected.max())
    clip = float(expected.median())
    handle.clipped_backward(losses, max_grad_norm=clip, norms=norms)
    sums = brute_force_clipped_sum(gradients, clip)
    scale = max(float(v.abs().max()) for v in sums.values())
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert float((parameter.grad - sums[name]).abs().max()) < relative * scale, name
        else:
            assert parameter.grad is None
    return handle
