"""A private step beside a non-private one under any strategy: what the ranks send each other, and CPU seconds."""

import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.strategies import StrategyRegistry
from torch import Tensor

import dprc_lightning.strategies  # noqa: F401 (registers the aliases)
from dprc_lightning.bench.communication import Collective, CommunicationCounter, totals
from dprc_lightning.bench.ranks import rank_main, run_ranks
from dprc_lightning.bench.step import NON_PRIVATE, StepShape
from dprc_lightning.clipping import causal_lm_loss
from dprc_lightning.config import PerformanceConfig, PrivacyConfig
from dprc_lightning.datamodule import DPRCDataModule
from dprc_lightning.errors import ConfigurationError, InvalidArgumentError
from dprc_lightning.module import DPRCModule

PRIVATE = "private"
STEPS = 3
"""Steps of each short run. In the first ones an engine learns in which order it needs what; the last one counts."""


@dataclass(frozen=True)
class EngineBench:
    """What is measured.

    Attributes:
        strategy: The alias.
        devices: How many processes.
        options: The strategy's own settings.
        shape: Model, and the records of one micro-batch of one rank.
        sketch_dim: k.
        micro_batches: How many each rank runs in a step.
        rounds: How often each kind of step is timed.
    """

    strategy: str
    devices: int = 2
    options: dict[str, Any] = field(default_factory=dict)
    shape: StepShape = StepShape()
    sketch_dim: int = 32
    micro_batches: int = 1
    rounds: int = 3


def aliases() -> list[str]:
    """The strategies that can be measured."""
    return sorted(name for name in StrategyRegistry.available_strategies() if name.startswith("dprc_"))


def measure_engine(
    bench: EngineBench, limit: float = 600.0, progress: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Start the ranks on this machine; each makes short private and non-private runs in turn.

    A step's records are always the same, sampled with probability 1. Noise and ledger are those of a real run; only
    the check of the records' isolation is left out, which a run makes once.

    Args:
        bench: What is measured.
        limit: Seconds until all are stopped.
        progress: Called with what is about to be done.

    Returns:
        Rows (non-private, private) with collectives by phase and kind (calls and bytes, of rank 0, in the last step of
        a run), how often the model's parameters were gathered and its gradients reduced (bytes over the model's), CPU
        and wall-clock seconds of a step (CPU: of all ranks together; minimum and median over the rounds) and their
        ratio (median over the rounds); and the setting.

    Raises:
        InvalidArgumentError: Not an alias, or one that does not run this number of processes.
    """
    if bench.strategy not in aliases():
        raise InvalidArgumentError("--strategy", bench.strategy, f"expected one of {', '.join(aliases())}")
    if bench.devices > 1 and bench.strategy == "dprc_single":
        raise InvalidArgumentError("--devices", bench.devices, "strategy dprc_single runs one device")
    progress(f"{bench.devices} ranks of {bench.strategy}, {1 + bench.rounds} rounds of {STEPS} steps of each kind")
    with tempfile.TemporaryDirectory(prefix="dprc-bench-") as folder:
        ranks = run_ranks(__name__, asdict(bench), bench.devices, Path(folder), limit)
    rows = [_row(kind, ranks) for kind in (NON_PRIVATE, PRIVATE)]
    plain = ranks[0]["model_bytes"]
    for row in rows:
        row["ratio"] = statistics.median(a / b for a, b in zip(row["rounds"], rows[0]["rounds"], strict=True))
        row["gathered_models"] = row["gathered_bytes"] / plain
        row["reduced_models"] = row["reduced_bytes"] / plain
    return {**asdict(bench), "model_bytes": plain, "machine": ranks[0]["machine"], "rows": rows}


def _row(kind: str, ranks: list[dict[str, Any]]) -> dict[str, Any]:
    calls = [Collective(**{**call, "sizes": tuple(call["sizes"])}) for call in ranks[0][kind]["calls"]]
    on_device = ranks[0]["machine"]["accelerator"] != "cpu"
    cpu = [sum(seconds) for seconds in zip(*(rank[kind]["cpu"] for rank in ranks), strict=True)]
    wall = [max(seconds) for seconds in zip(*(rank[kind]["wall"] for rank in ranks), strict=True)]
    return {
        "step": kind,
        "phases": totals(calls),
        "gathers": sum(call.gathers for call in calls),
        "gathered_bytes": sum(call.bytes for call in calls if call.gathers),
        "reductions": sum(call.reduces for call in calls),
        "reduced_bytes": sum(call.bytes for call in calls if call.reduces),
        "control": sum(not call.floating for call in calls),
        "cpu_seconds_min": min(cpu),
        "cpu_seconds_median": statistics.median(cpu),
        "wall_seconds_min": min(wall),
        "wall_seconds_median": statistics.median(wall),
        # What a step costs: on a GPU the host's own time says little.
        "rounds": wall if on_device else cpu,
    }


# What each rank does ------------------------------------------------------------------------------------------------


class _Records(torch.utils.data.Dataset[Tensor]):
    def __init__(self, records: int, shape: StepShape) -> None:
        generator = torch.Generator().manual_seed(0)
        self.ids = torch.randint(0, shape.vocabulary, (records, shape.tokens), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> Tensor:
        return self.ids[index]


class _Data(DPRCDataModule):
    def __init__(self, bench: EngineBench) -> None:
        super().__init__()
        self._records = _Records(bench.devices * bench.micro_batches * bench.shape.records, bench.shape)

    def train_dataset(self) -> _Records:
        """Each of them is in each batch."""
        return self._records


class _Module(DPRCModule):
    def __init__(self, bench: EngineBench, private: bool) -> None:
        super().__init__(
            PrivacyConfig(
                noise_multiplier=1.0,
                delta=1e-3,
                sample_rate=1.0,
                steps=STEPS,
                estimator="hutchinson",
                sketch_dim=bench.sketch_dim,
                check_isolation=False,
                baseline_without_privacy=not private,
                allow_large_delta=True,
            ),
            PerformanceConfig(physical_batch_size=bench.shape.records),
        )
        self.net = bench.shape.build()

    def per_sample_loss(self, batch: Tensor) -> Tensor:
        """See `DPRCModule`."""
        return causal_lm_loss(self.net(input_ids=batch).logits, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain SGD, which every engine takes."""
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class _Stopwatch(pl.Callback):
    """Seconds of each step, and what the counter held as it began."""

    def __init__(self, counter: CommunicationCounter | None) -> None:
        self._counter = counter
        self.cpu: list[float] = []
        self.wall: list[float] = []
        self.before: list[int] = []

    def on_train_batch_start(self, *_: Any) -> None:
        """Begin."""
        self.before.append(0 if self._counter is None else len(self._counter.calls))
        self.cpu.append(-time.process_time())
        self.wall.append(-time.perf_counter())

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        """End."""
        device = trainer.strategy.root_device
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        self.cpu[-1] += time.process_time()
        self.wall[-1] += time.perf_counter()


def short_run(
    bench: EngineBench, folder: Path, *, private: bool, counter: CommunicationCounter | None = None
) -> dict[str, Any]:
    """Train for a few steps.

    Args:
        bench: What is measured.
        folder: A new one.
        private: Or the baseline without privacy.
        counter: Notes the collectives; the time is then not to be used.

    Returns:
        ``calls`` of the last step, ``cpu`` and ``wall`` seconds of it, ``model_bytes``, ``accelerator``.
    """
    module = _Module(bench, private)
    model_bytes = sum(p.numel() * p.element_size() for p in module.parameters())
    if counter is not None:
        counter.phase = lambda: module.clock.current
    watch = _Stopwatch(counter)
    accelerator = "gpu" if torch.cuda.is_available() and torch.cuda.device_count() >= bench.devices else "cpu"
    trainer = pl.Trainer(
        default_root_dir=folder,
        accelerator=accelerator,
        devices=bench.devices,
        strategy=_strategy(bench, accelerator),
        # Whatever scheduler this runs under: the ranks are those that were started for the benchmark.
        plugins=[LightningEnvironment()],
        callbacks=[watch],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    with counter or nullcontext():
        trainer.fit(module, datamodule=_Data(bench))
    calls = counter.calls[watch.before[-1] :] if counter else []
    return {
        "calls": [asdict(call) for call in calls],
        "cpu": watch.cpu[-1],
        "wall": watch.wall[-1],
        "model_bytes": model_bytes,
        "accelerator": accelerator,
    }


def _strategy(bench: EngineBench, accelerator: str) -> Any:
    registered: Any = StrategyRegistry[bench.strategy]
    settings = {**registered["init_params"], **bench.options}
    if bench.strategy != "dprc_single":
        settings.setdefault("process_group_backend", "gloo" if accelerator == "cpu" else "nccl")
    if settings.get("stage") == 3 and "config" not in settings:
        # With its own limits ZeRO-3 would keep so small a model whole.
        settings["config"] = _NOTHING_KEPT
    try:
        return registered["strategy"](**settings)
    except TypeError as error:
        raise ConfigurationError([f"--strategy_args={bench.options}: {bench.strategy}: {error}"]) from error
    except ModuleNotFoundError as error:
        raise ConfigurationError([f"--strategy={bench.strategy}: {error}; install the deepspeed extra"]) from error


_NOTHING_KEPT: dict[str, Any] = {
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {
        "stage": 3,
        "stage3_max_live_parameters": 0,
        "stage3_max_reuse_distance": 0,
        "stage3_prefetch_bucket_size": 0,
        "stage3_param_persistence_threshold": 0,
    },
}


def _run(spec: dict[str, Any], folder: Path) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    bench = EngineBench(**{**spec, "shape": StepShape(**spec["shape"])})
    kinds = {NON_PRIVATE: False, PRIVATE: True}
    found: dict[str, Any] = {kind: {"cpu": [], "wall": []} for kind in kinds}
    for i in range(1 + bench.rounds):
        for kind, private in kinds.items():
            counter = CommunicationCounter() if i == 0 else None
            result = short_run(bench, folder / f"{kind}-{i}", private=private, counter=counter)
            if i == 0:
                found[kind]["calls"] = result["calls"]
            else:
                found[kind]["cpu"].append(result["cpu"])
                found[kind]["wall"].append(result["wall"])
            found["model_bytes"] = result["model_bytes"]
            found["machine"] = {
                "accelerator": result["accelerator"],
                "threads": torch.get_num_threads(),
                "cores": os.cpu_count(),
                "torch": torch.__version__,
            }
    return found


if __name__ == "__main__":
    rank_main(_run)
