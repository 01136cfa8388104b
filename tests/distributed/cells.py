"""What the ranks train in the parity tests: tiny language models on fixed batches, and how it should come out."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import architectures
import torch
from cases import Case, brute_force, brute_force_clipped_sum, lm_losses, tiny_llama
from torch import Tensor, nn
from transformers.modeling_outputs import CausalLMOutput

from dprc_lightning import DPRCDataModule, DPRCModule, PerformanceConfig, PrivacyConfig
from dprc_lightning.clipping import causal_lm_losses

RECORDS, EXPECTED, CLIP, RATE = 12, 4.0, 0.7, 0.5


class Records(torch.utils.data.Dataset):
    """Right-padded token records of different lengths."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.rows = []
        for _ in range(RECORDS):
            length = int(torch.randint(3, 10, (), generator=generator))
            ids = torch.zeros(9, dtype=torch.long)
            ids[:length] = torch.randint(1, 40, (length,), generator=generator)
            labels = torch.where(torch.arange(9) < length, ids, -100)
            mask = (torch.arange(9) < length).long()
            self.rows.append({"input_ids": ids, "labels": labels, "attention_mask": mask})

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.rows[index]

    def batch(self, indices: Sequence[int]) -> dict[str, Tensor]:
        return {name: torch.stack([self.rows[i][name] for i in indices]) for name in self.rows[0]}


class Data(DPRCDataModule):
    def train_dataset(self) -> Records:
        return Records()


class WithSpare(nn.Module):
    """A branch that odd records alone use, and a layer that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.llama = tiny_llama(tied=False)
        self.sometimes = nn.Linear(16, 40, bias=False)
        self.never = nn.Linear(4, 4)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        out = self.llama(input_ids=input_ids, attention_mask=attention_mask, output_hidden_states=True)
        if bool((input_ids[:, 0] % 2 == 1).any()):
            odd = (input_ids[:, :1, None] % 2 == 1).float()
            out.logits = out.logits + odd * self.sometimes(out.hidden_states[-1])
        return out


class Table(nn.Module):
    """One table of 12,000 numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(300, 40)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        return CausalLMOutput(logits=self.rows(input_ids))


class OddSizes(nn.Module):
    """No size that two or four ranks could share evenly; a bias of fewer elements than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(41, 7)
        self.inner = nn.Linear(7, 3)
        self.norm = nn.LayerNorm(3)
        self.head = nn.Linear(3, 41)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        return CausalLMOutput(logits=self.head(self.norm(self.inner(self.embed(input_ids)).tanh())))


class Repeated(nn.Module):
    """Seventy times the same tokens, so that there are some for more than one piece of 512."""

    def __init__(self) -> None:
        super().__init__()
        self.llama = tiny_llama(tied=True, checkpointing=True)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        mask = attention_mask.repeat(1, 70)
        out = self.llama(input_ids=input_ids.repeat(1, 70), attention_mask=mask, logits_to_keep=input_ids.shape[1])
        return CausalLMOutput(logits=out.logits)


@dataclass(frozen=True)
class Cell:
    """One training run.

    Attributes:
        build: Makes the model.
        batches: The records of each step.
        physical: Records per micro-batch.
        privacy: Changes to the settings.
        noise: ``none``, ``real``, or ``test`` (a fixed stream).
        reference: ``brute`` (one backward per record), ``single`` (one process, same secret), or None.
        stop: The step in which the last rank gets a SIGTERM; the run is then resumed.
        optimizer: ``sgd``, ``adam``, or ``two_groups`` (SGD with another rate for embeddings and norms).
        precision: The trainer's.
        bound: Largest difference from the reference.
        losses: What the ranks make of the model; by hand it is always `lm_losses`.
        performance: More settings.
    """

    build: Callable[[], nn.Module]
    batches: list[list[int]]
    physical: int = 32
    privacy: dict[str, Any] = field(default_factory=dict)
    noise: str = "none"
    reference: str | None = "brute"
    stop: int | None = None
    optimizer: str = "sgd"
    precision: str = "32-true"
    bound: float = 1e-6
    losses: Callable[[nn.Module, dict[str, Tensor]], Tensor] = lm_losses
    performance: dict[str, Any] = field(default_factory=dict)


def head_in_blocks(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return causal_lm_losses(
        model, batch["labels"], input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]
    )


# The floor of a norm grows with the tokens: at 630 it takes 2e-4 of a step, with and without these flags.
_LONG = 2e-5
_TWO_STEPS = [[0, 1, 2, 3, 4, 5], [1, 3, 4, 7]]
_LORA = {"target_modules": ["q_proj", "v_proj"]}

CELLS = {
    "plain": Cell(lambda: tiny_llama(tied=False), _TWO_STEPS),
    "tied_checkpointing": Cell(lambda: tiny_llama(tied=True, checkpointing=True), _TWO_STEPS),
    "head_in_blocks": Cell(lambda: tiny_llama(tied=True, checkpointing=True), _TWO_STEPS, 2, losses=head_in_blocks),
    "lora": Cell(lambda: architectures.build("llama", "sdpa", False, False, _LORA), _TWO_STEPS),
    "lora_checkpointing": Cell(lambda: architectures.build("llama", "sdpa", True, True, _LORA), _TWO_STEPS),
    "two_micro_batches": Cell(lambda: tiny_llama(tied=False), [[0, 1, 2, 3, 4, 5, 6, 7]], physical=2),
    "three_micro_batches": Cell(lambda: tiny_llama(tied=True), [list(range(12)), list(range(9))], physical=2),
    "uneven_ranks": Cell(lambda: tiny_llama(tied=True, checkpointing=True), [[0, 1, 2, 3, 4], [8, 9, 10]], physical=1),
    "a_rank_without_a_record": Cell(lambda: tiny_llama(tied=False), [[5], [6]]),
    "all_empty": Cell(lambda: tiny_llama(tied=False), [[], [2, 3], []]),
    "random_projection": Cell(
        lambda: tiny_llama(tied=True),
        [list(range(12)), [3], []],
        physical=2,
        privacy={"estimator": "hutchinson", "sketch_dim": 4},
        reference="single",
    ),
    "parameters_that_few_records_use": Cell(WithSpare, _TWO_STEPS + [[3]], 1, {"unused": "zero"}),
    "chunked_mlp": Cell(
        Repeated,
        [[0, 1, 2, 3, 4], [8, 9]],
        physical=2,
        performance={"mlp_chunk": 512, "offload_checkpoints": True},
        bound=_LONG,
    ),
    "offloaded_checkpoints": Cell(Repeated, [[0, 1, 2, 3]], 2, performance={"offload_checkpoints": True}, bound=_LONG),
    "noise": Cell(Table, [[]], noise="real", reference=None),
    "test_noise": Cell(lambda: tiny_llama(tied=False), _TWO_STEPS, noise="test", reference="single"),
    "odd_sizes": Cell(OddSizes, _TWO_STEPS, physical=2),
    "two_parameter_groups": Cell(lambda: tiny_llama(tied=False), _TWO_STEPS, optimizer="two_groups"),
    # Activations of 8 bits: the parameters move by up to 5e-2.
    "bf16_mixed": Cell(lambda: tiny_llama(tied=False), _TWO_STEPS, 2, precision="bf16-mixed", bound=2e-3),
    "resumed_adam": Cell(
        lambda: tiny_llama(tied=True), [*_TWO_STEPS, [2, 9]], 2, noise="test", reference=None, stop=2, optimizer="adam"
    ),
    "resumed": Cell(lambda: tiny_llama(tied=False), [*_TWO_STEPS, [], [8]], noise="test", reference="single", stop=2),
}


class LM(DPRCModule):
    def __init__(self, cell: Cell) -> None:
        settings: dict[str, Any] = {
            "noise_multiplier": 1.0,
            "delta": 1e-3,
            "sample_rate": EXPECTED / RECORDS,
            "steps": len(cell.batches),
            "max_grad_norm": CLIP,
            "estimator": "exact",
        }
        performance = PerformanceConfig(physical_batch_size=cell.physical, **cell.performance)
        super().__init__(PrivacyConfig(**settings | cell.privacy), performance)
        self.cell = cell
        torch.manual_seed(0)
        self.net = cell.build()

    def per_sample_loss(self, batch: dict[str, Tensor]) -> Tensor:
        return self.cell.losses(self.net, batch)

    def configure_optimizers(self) -> Any:
        named = [(name, p) for name, p in self.named_parameters() if p.requires_grad]
        if self.cell.optimizer == "adam":
            return torch.optim.Adam([p for _, p in named], lr=RATE / 10)
        rates = sorted({rate_of(self.cell, name) for name, _ in named})
        groups = [{"params": [p for n, p in named if rate_of(self.cell, n) == rate], "lr": rate} for rate in rates]
        return torch.optim.SGD(groups)


def rate_of(cell: Cell, name: str) -> float:
    return RATE / 2 if cell.optimizer == "two_groups" and ("embed" in name or "norm" in name) else RATE


def by_hand(cell: Cell) -> dict[str, Tensor]:
    """Clipped SGD with one float64 backward per record."""
    model = LM(cell).net
    data = Records()
    case = Case("cell", cell.build, lambda: {}, lm_losses)
    for indices in cell.batches:
        if not indices:
            continue
        sums = brute_force_clipped_sum(brute_force(case, copy.deepcopy(model), data.batch(indices)), CLIP)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name in sums:
                    parameter -= rate_of(cell, name) * sums[name] / EXPECTED
    return model.state_dict()
