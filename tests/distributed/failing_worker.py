"""One rank of a job in which something goes wrong; the first argument tells what."""

import os
import sys
import warnings
from pathlib import Path

import torch
from cases import tiny_llama
from cells import LM, Cell, Data, Records
from toy import ZeroNoise, trainer
from worker import FixedBatches

from dprc_lightning.errors import DPRCError
from dprc_lightning.run import PrivateRun
from dprc_lightning.strategies import PrivateDDPStrategy


class BadRecord(LM):
    """Record 1, which rank 1 gets, has a gradient that is not finite."""

    def per_sample_loss(self, batch):
        losses = super().per_sample_loss(batch)
        bad = (batch["input_ids"] == Records().rows[1]["input_ids"]).all(1)
        return torch.where(bad, losses * torch.inf, losses)


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


def main(what: str, folder: Path, world_size: int) -> None:
    warnings.simplefilter("ignore")
    cell = Cell(lambda: tiny_llama(tied=False), [[0, 1, 2, 3], [4, 5]], physical=1)
    if what == "drop":
        cell = Cell(cell.build, cell.batches, 1, {"on_nonfinite": "drop"})
    module = {"nonfinite": BadRecord, "drop": BadRecord, "unfreezes": Unfreezes, "another_rate": AnotherRate}.get(
        what, LM
    )(cell)
    changes = {}
    rank = int(os.environ["LOCAL_RANK"])
    if what == "another_order" and rank == 1:
        Records.__getitem__ = lambda self, index: self.rows[len(self) - 1 - index]
    if what == "another_estimator" and rank == 1:
        module = LM(Cell(cell.build, cell.batches, 1, {"estimator": "hutchinson", "sketch_dim": 1}))
    if what == "bfloat16":
        changes = {"precision": "bf16-true"}
    if what == "another_batch" and rank == 1:
        begin = PrivateRun.begin_step
        PrivateRun.begin_step = lambda self: begin(self) + 1
    PrivateRun.sampler = lambda self: FixedBatches(cell.batches)
    strategy = PrivateDDPStrategy(noise_stream=ZeroNoise())
    try:
        trainer(folder, strategy=strategy, devices=world_size, **changes).fit(module, datamodule=Data())
    except DPRCError as error:
        print(f"\n{type(error).__name__}: {error}", flush=True)
        sys.exit(2)
    state = module.net.state_dict()
    torch.save(state, folder / f"rank{module.global_rank}.pt")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
