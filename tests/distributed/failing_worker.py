"""One rank of a job in which things go wrong, one after the other; what each rank was told goes to a file."""

import os
import sys
import warnings
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import torch
from cases import tiny_llama
from cells import LM, Cell, Data, OddSizes, Records
from torch import nn
from toy import ZeroNoise, trainer
from worker import ENGINES, FixedBatches, whole_state

from dprc_lightning.errors import DPRCError
from dprc_lightning.run import PrivateRun


class BadRecord(LM):
    """Record 1, which rank 1 gets, has a gradient that is not finite."""

    def per_sample_loss(self, batch):
        losses = super().per_sample_loss(batch)
        bad = (batch["input_ids"] == Records().rows[1]["input_ids"]).all(1)
        # Not torch.where of the two losses: zero times infinity, in its backward, would make every record bad.
        return losses * torch.where(bad, torch.inf, 1.0)


class Unfreezes(LM):
    def __init__(self, cell):
        super().__init__(cell)
        self.net.lm_head.requires_grad_(False)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_batch_start(self, batch, batch_idx):
        self.net.lm_head.requires_grad_(batch_idx > 0)


class AnotherRate(LM):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1 * (1 + self.global_rank))


class Hides(nn.Module):
    """Its output is an object in which an engine does not look for tensors, and no layer in it is a unit of its own."""

    def __init__(self):
        super().__init__()
        self.inner = OddSizes()

    def forward(self, **batch):
        return SimpleNamespace(logits=self.inner(**batch).logits)


MODULES = {"nonfinite": BadRecord, "drop": BadRecord, "unfreezes": Unfreezes, "another_rate": AnotherRate}


def fit(engine: str, what: str, folder: Path, rank: int, world_size: int) -> LM:
    privacy = {"drop": {"on_nonfinite": "drop"}, "unused_zero": {"unused": "zero"}}.get(what, {})
    if what == "another_estimator" and rank == 1:
        privacy = {"estimator": "hutchinson", "sketch_dim": 1}
    build = Hides if what == "hidden" else lambda: tiny_llama(tied=False)
    cell = Cell(build, [[0, 1, 2, 3], [4, 5]], 1, privacy)
    module = MODULES.get(what, LM)(cell)
    changes = {"precision": "bf16-true"} if what == "bfloat16" else {}
    begin = PrivateRun.begin_step
    with ExitStack() as patches:
        patches.enter_context(patch.object(PrivateRun, "sampler", lambda self: FixedBatches(cell.batches)))
        if what == "another_order" and rank == 1:
            reverse = patch.object(Records, "__getitem__", lambda self, index: self.rows[len(self) - 1 - index])
            patches.enter_context(reverse)
        if what == "another_batch" and rank == 1:
            patches.enter_context(patch.object(PrivateRun, "begin_step", lambda self: begin(self) + 1))
        strategy = ENGINES[engine](noise_stream=ZeroNoise())
        trainer(folder, strategy=strategy, devices=world_size, **changes).fit(module, datamodule=Data())
    return module


def main(engine: str, folder: Path, world_size: int, rank: int, everything: list[str]) -> int:
    warnings.simplefilter("ignore")
    failed = 0
    for what in everything:
        place = folder / what
        place.mkdir(parents=True, exist_ok=True)
        try:
            module = fit(engine, what, place, rank, world_size)
        except DPRCError as error:
            (place / f"rank{rank}.txt").write_text(f"{type(error).__name__}: {error}")
            failed = 2
        else:
            torch.save(whole_state(module), place / f"rank{rank}.pt")
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(os.environ["LOCAL_RANK"]), sys.argv[4:]))
