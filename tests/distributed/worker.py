"""One rank: trains every cell of the list and saves what came out."""

import os
import signal
import sys
import warnings
from functools import partial
from pathlib import Path

import lightning.pytorch as pl
import numpy as np
import torch
from cells import CELLS, LM, Data
from torch.nn.parallel import DistributedDataParallel
from toy import ZeroNoise
from toy import trainer as cpu_trainer

from dprc_lightning.errors import InterruptedRun
from dprc_lightning.keys import RunSecret
from dprc_lightning.noise import NoiseStream
from dprc_lightning.run import PrivateRun
from dprc_lightning.strategies import (
    PrivateDDPStrategy,
    PrivateDeepSpeedStrategy,
    PrivateFSDP2Strategy,
    PrivateFSDPStrategy,
)

# `make test-gpu`: the same matrix over nccl.
ON_GPUS = os.environ.get("DPRC_TEST_ACCELERATOR") == "gpu"
BACKEND = "nccl" if ON_GPUS else "gloo"
trainer = partial(cpu_trainer, accelerator="gpu") if ON_GPUS else cpu_trainer

# With its own limits ZeRO-3 never partitions so small a model again after the first step.
SMALL = {
    1: {},
    2: {},
    3: {
        "config": {
            "zero_optimization": {
                "stage": 3,
                "stage3_max_live_parameters": 0,
                "stage3_max_reuse_distance": 0,
                "stage3_prefetch_bucket_size": 0,
                "stage3_param_persistence_threshold": 0,
            },
            "zero_allow_untested_optimizer": True,
        }
    },
}

ENGINES = {
    "ddp": PrivateDDPStrategy,
    **{
        f"zero{stage}": lambda stage=stage, **kwargs: PrivateDeepSpeedStrategy(
            stage=stage, process_group_backend=BACKEND, **SMALL[stage], **kwargs
        )
        for stage in (1, 2, 3)
    },
    "fsdp": lambda **kwargs: PrivateFSDPStrategy(process_group_backend=BACKEND, **kwargs),
    "fsdp2_offload": lambda **kwargs: PrivateFSDP2Strategy(process_group_backend=BACKEND, cpu_offload=True, **kwargs),
    "zero2_offload": lambda **kwargs: PrivateDeepSpeedStrategy(
        stage=2, offload_optimizer=True, process_group_backend=BACKEND, **kwargs
    ),
    "zero3_offload": lambda **kwargs: PrivateDeepSpeedStrategy(
        stage=3, offload_optimizer=True, offload_parameters=True, process_group_backend=BACKEND, **kwargs
    ),
    "hsdp": lambda **kwargs: PrivateFSDP2Strategy(process_group_backend=BACKEND, replicas=2, **kwargs),
    "fsdp2_sharded": lambda **kwargs: PrivateFSDP2Strategy(
        process_group_backend=BACKEND, save_distributed_checkpoint=True, **kwargs
    ),
    "fsdp2": lambda **kwargs: PrivateFSDP2Strategy(process_group_backend=BACKEND, **kwargs),
}


class FixedBatches:
    def __init__(self, batches):
        self.batches = batches

    def batch(self, sequence):
        return np.asarray(self.batches[sequence], dtype=np.int64)


class Terminate(pl.Callback):
    """One rank alone is asked to stop, in the middle of a step."""

    def __init__(self, step):
        self.step = step

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_step == self.step - 1 and trainer.global_rank == trainer.world_size - 1:
            os.kill(os.getpid(), signal.SIGTERM)


def fit(name: str, folder: Path, strategy: pl.strategies.Strategy, devices: int = 1, make=PrivateDDPStrategy) -> LM:
    cell = CELLS[name]
    PrivateRun.sampler = lambda self: FixedBatches(cell.batches)
    module, settings = LM(cell), {"precision": cell.precision}
    if cell.stop is not None and devices > 1:
        try:
            told = {"callbacks": [Terminate(cell.stop)]} | settings
            stopping = trainer(folder, strategy=strategy, devices=devices, **told)
            stopping.fit(module, datamodule=Data())
        except InterruptedRun as error:
            assert error.signal == signal.SIGTERM and module.private_run.applied == cell.stop
        module, checkpoint = LM(cell), folder / "checkpoints" / "interrupted.ckpt"
        resuming = trainer(folder, strategy=make(noise_stream=noise_of(name)), devices=devices, **settings)
        resuming.fit(module, datamodule=Data(), ckpt_path=checkpoint)
        return module
    trainer(folder, strategy=strategy, devices=devices, **settings).fit(module, datamodule=Data())
    return module


def noise_of(name: str) -> NoiseStream | None:
    return {"none": ZeroNoise, "test": lambda: NoiseStream.for_testing(5), "real": lambda: None}[CELLS[name].noise]()


def whole_state(module):
    parameters = list(module.net.parameters())
    if hasattr(parameters[0], "ds_id"):
        import deepspeed

        with deepspeed.zero.GatheredParameters(parameters):
            return {key: value.cpu().clone() for key, value in module.net.state_dict().items()}
    whole = {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in module.net.state_dict().items()}
    return {key: value.cpu() for key, value in whole.items()}


def run_straight(name, folder, engine, world_size):
    """The same steps with the same secret, without the stop."""
    key = (folder / name / "secret.key").read_bytes()
    create = RunSecret.create

    def copied(where):
        path = Path(where) / "secret.key"
        path.write_bytes(key)
        path.chmod(0o600)
        return RunSecret.load(where)

    RunSecret.create = copied
    try:
        cell = CELLS[name]
        module = LM(cell)
        strategy = ENGINES[engine](noise_stream=noise_of(name))
        trainer(folder / f"{name}_straight", strategy=strategy, devices=world_size).fit(module, datamodule=Data())
    finally:
        RunSecret.create = create
    return module


def main(engine: str, folder: Path, world_size: int, names: list[str]) -> None:
    warnings.simplefilter("ignore")
    silent: list[str] = []
    no_sync = DistributedDataParallel.no_sync
    DistributedDataParallel.no_sync = lambda self: (silent.append("micro-batch"), no_sync(self))[1]
    for name in names:
        strategy = ENGINES[engine](noise_stream=noise_of(name))
        silent.clear()
        module = fit(name, folder / name, strategy, world_size, ENGINES[engine])
        straight = None
        if CELLS[name].stop is not None:
            straight = whole_state(run_straight(name, folder, engine, world_size))
        result = {"state": whole_state(module), "silent": len(silent), "straight": straight}
        torch.save(result, folder / name / f"rank{module.global_rank}.pt")
        print("done", name, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
