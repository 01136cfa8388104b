"""What the report asks of a living run: the trainer, the module, the machine."""

import math
import resource
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from dprc_lightning.clipping import PlanRow
from dprc_lightning.datamodule import DPRCDataModule
from dprc_lightning.diagnostics import UNPROTECTED, is_unprotected
from dprc_lightning.report import HTML_NAME, MARKDOWN_NAME, versions
from dprc_lightning.run import PrivateRun

if TYPE_CHECKING:
    from dprc_lightning.module import DPRCModule

_OWN = ("train", "clip", "privacy", "time", "tokens")
"""Groups of figures that the library logs itself; the report has them elsewhere, or they are of one step alone."""


def not_private_because(trainer: pl.Trainer, run: PrivateRun) -> str | None:
    """Why nothing is protected.

    Args:
        trainer: The trainer.
        run: The run; what its ledger remembers of earlier processes counts too.

    Returns:
        The reason; None for a private run.
    """
    if not run.resolved.private:
        return "privacy.baseline_without_privacy=true: no clipping and no noise"
    if run.secret.is_test or trainer.strategy.noise_hook.is_test:  # type: ignore[attr-defined]
        return "a fixed stream for tests replaced secret randomness"
    return None if run.ledger is None else run.ledger.meta.get("not_private_because")


def start_facts(trainer: pl.Trainer, module: "DPRCModule", plan: list[PlanRow], because: str | None) -> dict[str, Any]:
    """What is known when fit starts.

    Args:
        trainer: The trainer.
        module: The module.
        plan: How norms are had.
        because: Why the run is not private.

    Returns:
        Ready for JSON.
    """
    run = module.private_run
    assert run is not None, "the strategy prepares the run before fit starts"
    datamodule = getattr(trainer, "datamodule", None)
    return {
        "name": run.folder.parent.name if run.folder.name.startswith("version_") else run.folder.name,
        "not_private_because": because,
        "mechanism": run.resolved.to_dict(),
        "on_nonfinite": module.privacy.on_nonfinite,
        "precision": str(trainer.precision),
        "world_size": trainer.world_size,
        "parameters": [_plan_row(row) for row in plan],
        "memory": module.memory_pick.to_dict() if module.memory_pick else None,
        "trainable_parameters": sum(p.numel() for p in module.parameters() if p.requires_grad),
        "earlier_runs": list(getattr(module, "earlier_runs", ())),
        "data": datamodule.report_facts() if isinstance(datamodule, DPRCDataModule) else {},
        "logged_unprotected": _unprotected(trainer, module),
        "paths": _paths(trainer, run.folder),
        "versions": versions(),
    }


def ending_facts(trainer: pl.Trainer, module: "DPRCModule") -> dict[str, Any]:
    """What is known when fit ends.

    Args:
        trainer: The trainer.
        module: The module.

    Returns:
        Ready for JSON.
    """
    run = module.private_run
    assert run is not None, "there is no end without a start"
    steps = module.clock.steps
    return {
        "dropped_records": module.dropped_records if module.privacy.log_unprotected else None,
        "logged_unprotected": _unprotected(trainer, module),
        "paths": _paths(trainer, run.folder),
        # Seconds follow the sizes of the batches that were drawn.
        "cost": None
        if not module.privacy.log_unprotected
        else {
            "training_seconds": sum(steps),
            "median_step_seconds": sorted(steps)[len(steps) // 2] if steps else 0.0,
            "measured_steps": len(steps),
            "phases": dict(module.clock.phases),
            "peak_memory_bytes": _peak_memory(module.device),
            "device": _device_name(module.device),
        },
    }


def public_metrics(trainer: pl.Trainer) -> dict[str, float]:
    """The figures that the user's own module logged, under whatever names.

    Args:
        trainer: The trainer.

    Returns:
        Its callback metrics without those of the library; of a figure that Lightning has per step and per epoch, one.
    """
    found = trainer.callback_metrics
    return {
        name: float(value)
        for name, value in found.items()
        if name.split("/")[0] not in _OWN
        and not (name.endswith(("_step", "_epoch")) and name.rsplit("_", 1)[0] in found)
    }


def _unprotected(trainer: pl.Trainer, module: "DPRCModule") -> list[str]:
    """What of the training data is logged without noise, if the user allows it; and what was logged all the same."""
    logged = {*trainer.callback_metrics, *trainer.logged_metrics}
    return list(UNPROTECTED) if module.privacy.log_unprotected else sorted(filter(is_unprotected, logged))


def _plan_row(row: PlanRow) -> dict[str, Any]:
    return {
        "parameter": row.parameter,
        "shape": list(row.shape),
        "numel": math.prod(row.shape),
        "estimator": row.estimator,
        "side": row.side,
        "modules": list(row.modules),
    }


def _paths(trainer: pl.Trainer, folder: Path) -> dict[str, str]:
    checkpoint = trainer.checkpoint_callback
    paths = {"run folder": str(folder), "report": str(folder / MARKDOWN_NAME), "page": str(folder / HTML_NAME)}
    if (folder / "ledger.jsonl").exists():
        paths["ledger"] = str(folder / "ledger.jsonl")
    if isinstance(checkpoint, ModelCheckpoint) and checkpoint.best_model_path:
        paths["checkpoint"] = checkpoint.best_model_path
    # The logger's own, because the trainer's log_dir is a collective and this is rank 0 alone.
    log_dir = getattr(trainer.logger, "log_dir", None)
    if log_dir:
        paths["TensorBoard log"] = f"tensorboard --logdir {log_dir}"
    return paths


def _peak_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Kibibytes on Linux, bytes on macOS.
    return peak if sys.platform == "darwin" else peak * 1024


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu, {torch.get_num_threads()} threads"
