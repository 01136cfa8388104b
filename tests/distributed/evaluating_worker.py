"""One rank: validates an untrained model, trains it, validates and tests what came out, and loads its checkpoint."""

import json
import sys
import warnings
from pathlib import Path

import lightning.pytorch as pl
import torch
from cells import CELLS, LM, Data, Records
from toy import ZeroNoise, trainer
from worker import ENGINES, FixedBatches, whole_state

from dprc_lightning.run import PrivateRun
from dprc_lightning.whole_checkpoint import load_whole


class Evaluated(LM):
    """The mean loss of all records; on_validation_model_eval and the like are Lightning's own."""

    def validation_step(self, batch, batch_idx):
        self.log("loss", self.per_sample_loss(batch).mean(), sync_dist=True, batch_size=len(batch["input_ids"]))

    test_step = validation_step


class WithEvaluation(Data):
    def val_dataloader(self):
        # As many on every rank, so that the mean over ranks is the mean over records.
        return torch.utils.data.DataLoader(Records(), batch_size=3)

    test_dataloader = val_dataloader


def main(engine: str, folder: Path, world_size: int) -> None:
    warnings.simplefilter("ignore")
    cell = CELLS["tied_checkpointing"]
    PrivateRun.sampler = lambda self: FixedBatches(cell.batches)
    found: dict[str, float] = {}

    def make() -> pl.Trainer:
        kind = pl.strategies.SingleDeviceStrategy if engine == "single" else None
        strategy = ENGINES[engine](noise_stream=ZeroNoise()) if kind is None else None
        changes = {} if strategy is None else {"strategy": strategy, "devices": world_size}
        return trainer(folder, ZeroNoise() if strategy is None else None, limit_val_batches=1.0, **changes)

    found["untrained"] = make().validate(Evaluated(cell), datamodule=WithEvaluation())[0]["loss"]
    module, training = Evaluated(cell), make()
    training.fit(module, datamodule=WithEvaluation())
    path = folder / "checkpoints" / "last.ckpt"
    if engine != "fsdp":
        training.save_checkpoint(path)
        state = whole_state(module)
        if training.global_rank == 0:
            exported = load_whole(path)["state_dict"]
            found["exported"] = max(float((exported[f"net.{k}"] - v).abs().max()) for k, v in state.items())
    found["within fit"] = float(training.callback_metrics["loss"])
    found["after fit"] = training.validate(module, datamodule=WithEvaluation())[0]["loss"]
    found["tested"] = training.test(module, datamodule=WithEvaluation())[0]["loss"]
    if engine != "fsdp":
        found["from a checkpoint"] = make().test(Evaluated(cell), datamodule=WithEvaluation(), ckpt_path=path)[0][
            "loss"
        ]
    if training.global_rank == 0:
        (folder / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
