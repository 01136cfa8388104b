"""One rank: writes checkpoints, goes on from those of others, and tries to load some that were tampered with."""

import json
import os
import pickle
import shutil
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from cases import tiny_llama
from cells import LM, RATE, Cell, Data, Records
from lightning.pytorch.callbacks import ModelCheckpoint
from toy import ZeroNoise, privacy, trainer
from worker import ENGINES, Terminate, whole_state

from dprc_lightning.errors import DPRCError, InterruptedRun
from dprc_lightning.strategies.sharded_checkpoints import ShardedCheckpoints

RANK = int(os.environ.get("LOCAL_RANK", "0"))
# The batches are drawn from the run's secret: only their number is taken from the cell.
CELL = Cell(lambda: tiny_llama(tied=True), [[]] * 4, physical=2)
LAST = Path("checkpoints", "interrupted.ckpt")


class Momentum(LM):
    """An optimizer with a state, whose steps do not blow up what two engines round differently, as Adam's would."""

    def __init__(self, cell: Cell = CELL) -> None:
        super().__init__(cell)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=RATE / 2, momentum=0.9)

    def test_step(self, batch, batch_idx):
        self.log("loss", self.per_sample_loss(batch).mean(), sync_dist=True, batch_size=len(batch["input_ids"]))


class WithTest(Data):
    def test_dataloader(self):
        # The same on every rank.
        return torch.utils.data.DataLoader(Records(), batch_size=4)


def make(engine: str, folder: Path, world_size: int, trust: bool = False, **changes: Any) -> pl.Trainer:
    strategy = ENGINES[engine](noise_stream=ZeroNoise())
    if trust:
        strategy.trust_checkpoint = True
    return trainer(folder, strategy=strategy, devices=world_size, **changes)


def keep(folder: Path, name: str, value: Any) -> None:
    if RANK == 0:
        torch.save(value, folder / name)


def write(engine: str, folder: Path, world_size: int) -> None:
    """Stop after two of four steps."""
    module = Momentum()
    try:
        make(engine, folder, world_size, callbacks=[Terminate(2)]).fit(module, datamodule=Data())
    except InterruptedRun:
        keep(folder, "stopped.pt", whole_state(module))


def resume(engine: str, folder: Path, world_size: int) -> None:
    module = Momentum()
    try:
        make(engine, folder, world_size).fit(module, datamodule=Data(), ckpt_path=folder / LAST)
    except DPRCError as error:
        keep(folder, "refused.pt", f"{type(error).__name__}: {error}")
    else:
        keep(folder, "resumed.pt", whole_state(module))
    testing = make(engine, folder, world_size, logger=False)
    (found,) = testing.test(Momentum(), datamodule=WithTest(), ckpt_path=folder / LAST, verbose=False)
    keep(folder, "tested.pt", found["loss"])


# What is tampered with ------------------------------------------------------------------------------------------------


class Runs:
    """Unpickled, it leaves a file."""

    def __init__(self, marker: Path, then: bytes = pickle.dumps(None)) -> None:
        self.code = f"(__import__('pathlib').Path({str(marker)!r}).touch(), __import__('pickle').loads({then!r}))[1]"

    def __reduce__(self):
        return eval, (self.code,)


def a_flipped_byte(path: Path, marker: Path, other: Path) -> None:
    file = max((file for file in path.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def another_file(path: Path, marker: Path, other: Path) -> None:
    (path / "extra_optim_states.pt").write_bytes(pickle.dumps(Runs(marker)))


def code_in_a_file(path: Path, marker: Path, other: Path) -> None:
    metadata = path / ".metadata"
    if metadata.exists():
        metadata.write_bytes(pickle.dumps(Runs(marker, metadata.read_bytes())))
        return
    # Of stage 3 each rank reads its own.
    file = sorted((path / "checkpoint").glob("*mp_rank_00_model_states.pt"))[0]
    torch.save(torch.load(file, weights_only=False) | {"extra": Runs(marker)}, file)


def the_manifest_of_another_run(path: Path, marker: Path, other: Path) -> None:
    code_in_a_file(path, marker, other)
    shutil.copy(other / "manifest.json", path / "manifest.json")


def no_manifest(path: Path, marker: Path, other: Path) -> None:
    code_in_a_file(path, marker, other)
    (path / "manifest.json").unlink()


WAYS: list[Callable[[Path, Path, Path], None]] = [
    a_flipped_byte,
    another_file,
    code_in_a_file,
    the_manifest_of_another_run,
    no_manifest,
]


def tamper(engine: str, folder: Path, world_size: int) -> None:
    """Write two runs, and load checkpoints of the first after each change; then one of a copied run folder."""
    first, second = folder / "first", folder / "second"
    for place in (first, second):
        write(engine, place, world_size)
    good, found = first / LAST, {}

    def attempt(path: Path, marker: Path, fitting: bool = False, trust: bool = False) -> dict[str, Any]:
        run = make(engine, path.parents[1], world_size, trust)
        torch.distributed.barrier()
        told = "loaded"
        try:
            if fitting:
                run.fit(Momentum(), datamodule=Data(), ckpt_path=path)
            else:
                run.test(Momentum(), datamodule=WithTest(), ckpt_path=path, verbose=False)
        except DPRCError as error:
            told = f"{type(error).__name__}: {error}"
        torch.distributed.barrier()
        return {"told": told, "ran": marker.exists()}

    for way in WAYS:
        path, marker = good.with_name(f"{way.__name__}.ckpt"), folder / f"ran-{way.__name__}"
        if RANK == 0:
            shutil.copytree(good, path)
            way(path, marker, second / LAST)
        torch.distributed.barrier()
        found[way.__name__] = attempt(path, marker)
        if way is code_in_a_file:
            found["fit"] = attempt(path, marker, fitting=True)
            found["trusted"] = attempt(path, marker, trust=True)
    copy = folder / "copied"
    if RANK == 0:
        shutil.copytree(first, copy)
    torch.distributed.barrier()
    found["copied"] = attempt(copy / LAST, folder / "no marker")
    found["untouched"] = attempt(good, folder / "no marker")
    if RANK == 0:
        (folder / "found.json").write_text(json.dumps(found))


def kill(engine: str, folder: Path, world_size: int) -> None:
    """The last rank dies in the second write of a folder of the same name."""
    strategy = ENGINES[engine](noise_stream=ZeroNoise())
    save, writes = strategy._save_engine, []

    def dying(checkpoint: dict[str, Any], place: Path) -> None:
        writes.append(place)
        save(checkpoint, place)
        if len(writes) == 2 and RANK == world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)

    strategy._save_engine = dying
    every = ModelCheckpoint(
        folder / "checkpoints", filename="same", every_n_train_steps=1, enable_version_counter=False
    )
    assert isinstance(strategy, ShardedCheckpoints)
    run = trainer(folder, strategy=strategy, devices=world_size, callbacks=[every], enable_checkpointing=True)
    run.fit(Momentum(), datamodule=Data())


def export(engine: str, folder: Path, world_size: int) -> None:
    """A run as `dprc fit` would leave it, and the weights that its model has."""
    import test_export

    module = test_export.Language(privacy(**test_export.SETTINGS))
    every = ModelCheckpoint(folder / "checkpoints")
    strategy = ENGINES[engine]()
    run = trainer(folder, strategy=strategy, devices=world_size, callbacks=[every], enable_checkpointing=True)
    run.fit(module, datamodule=test_export.Sentences())
    module.net = module.model
    keep(folder, "weights.pt", whole_state(module))
    if RANK == 0:
        settings = {**test_export.SETTINGS, "noise_multiplier": 1.0}
        config = {"privacy": settings, "model": {"class_path": "test_export.Language"}}
        (folder / "config.yaml").write_text(json.dumps(config))


def main(action: str, folder: Path, world_size: int, engines: list[str]) -> None:
    warnings.simplefilter("ignore")
    for engine in engines:
        name, _, target = engine.partition("@")
        {"write": write, "resume": resume, "tamper": tamper, "kill": kill, "export": export}[action](
            name, folder / engine.replace("@", "-to-"), world_size
        )
        print("done", engine, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
