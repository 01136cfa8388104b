"""Prints what a run promises before it starts, follows epsilon, and writes the report however the run ends."""

import math
import resource
import sys
import textwrap
from bisect import bisect_left
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from dprc_lightning.accounting import Accountant, StepEvent, epsilon_schedule
from dprc_lightning.clipping import PlanRow
from dprc_lightning.clipping.plan_table import format_plan
from dprc_lightning.datamodule import DPRCDataModule
from dprc_lightning.errors import StepOrderError
from dprc_lightning.report import ASSUMPTIONS, FORMAT_VERSION, JSON_NAME, read_report, versions, write_report
from dprc_lightning.run import step_event

if TYPE_CHECKING:
    # The module brings this callback along; it must not need the module to be imported first.
    from dprc_lightning.module import DPRCModule

_MILESTONES = 20


class PrivacyReport(pl.Callback):
    """Added by DPRCModule to every trainer. Writes ``report.json`` and ``report.md`` into the run folder.

    Epsilon so far is logged as an upper bound: that of the next of twenty milestones, computed once at the start,
    because composing after each step would cost more than the step.
    """

    def __init__(self) -> None:
        self._milestones: list[int] = []
        self._epsilons: list[float] = []
        self._report: dict[str, Any] | None = None
        self._plan: list[dict[str, Any]] = []
        self._steps_seen = 0

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Print the mechanism and the plan.

        Args:
            trainer: The trainer.
            pl_module: The module.
        """
        module = _dprc(pl_module)
        run = module.private_run
        assert run is not None, "the strategy prepares the run before fit starts"
        self._report = None
        self._steps_seen = run.ledger.steps if run.ledger else 0
        rows = module.handle.plan() if module.handle else []
        self._plan = _plan_facts(rows)
        if run.resolved.private:
            steps = run.resolved.steps
            self._milestones = sorted({math.ceil(steps * i / _MILESTONES) for i in range(1, _MILESTONES + 1)})
            self._epsilons = epsilon_schedule(step_event(run.resolved), self._milestones, run.resolved.delta)
        _say(_opening(module, rows, self._epsilons))

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log epsilon so far.

        Args:
            trainer: The trainer.
            pl_module: The module.
            outputs: Unused.
            batch: Unused.
            batch_idx: Unused.

        Raises:
            StepOrderError: An overridden training step made no step.
        """
        run = _dprc(pl_module).private_run
        if run is not None and run.ledger is not None:
            if run.ledger.steps == self._steps_seen:
                raise StepOrderError(
                    f"{type(pl_module).__name__}.training_step made no private step: it belongs to the library; write "
                    "per_sample_loss, and call super().training_step(batch, batch_idx) where you override it"
                )
            self._steps_seen = run.ledger.steps
            index = min(bisect_left(self._milestones, run.ledger.steps), len(self._milestones) - 1)
            # batch_size is a constant: the realised one is private.
            pl_module.log("privacy/epsilon", self._epsilons[index], prog_bar=True, on_step=True, batch_size=1)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Look at the plan once more: layers may have joined, and at the end of fit the handle is gone.

        Args:
            trainer: The trainer.
            pl_module: The module.
        """
        handle = _dprc(pl_module).handle
        if handle is not None:
            self._plan = _plan_facts(handle.plan())

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write the report.

        Args:
            trainer: The trainer.
            pl_module: The module.
        """
        run = _dprc(pl_module).private_run
        left = 0 if run is None else run.steps_left
        self._write(trainer, _dprc(pl_module), f"ended with {left} steps left" if left else "finished")

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Write the report of what was done before the error.

        Args:
            trainer: The trainer.
            pl_module: The module.
            exception: The error.
        """
        if trainer.state.fn == "fit" and _dprc(pl_module).private_run is not None:
            self._write(trainer, _dprc(pl_module), f"stopped by {type(exception).__name__}")

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keep validation figures; outside of fit, put them into the report.

        Args:
            trainer: The trainer.
            pl_module: The module.
        """
        self._merge(trainer, _dprc(pl_module))

    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Put test figures into the report.

        Args:
            trainer: The trainer.
            pl_module: The module.
        """
        self._merge(trainer, _dprc(pl_module))

    @rank_zero_only
    def _write(self, trainer: pl.Trainer, module: "DPRCModule", status: str) -> None:
        run = module.private_run
        assert run is not None
        self._report = _build(trainer, module, self._plan, status)
        write_report(run.folder, self._report)
        _say(_closing(self._report))

    @rank_zero_only
    def _merge(self, trainer: pl.Trainer, module: "DPRCModule") -> None:
        if trainer.state.fn == "fit" or trainer.sanity_checking:
            return
        folder = _report_folder(trainer, module)
        if folder is not None:
            report = read_report(folder)
            report["metrics"].update(_metrics(trainer))
            write_report(folder, report)


def _plan_facts(rows: list[PlanRow]) -> list[dict[str, Any]]:
    return [
        {
            "parameter": row.parameter,
            "shape": list(row.shape),
            "numel": math.prod(row.shape),
            "estimator": row.estimator,
            "side": row.side,
            "modules": list(row.modules),
        }
        for row in rows
    ]


def _dprc(module: pl.LightningModule) -> "DPRCModule":
    # The callback comes from DPRCModule.configure_callbacks.
    return cast("DPRCModule", module)


def _report_folder(trainer: pl.Trainer, module: "DPRCModule") -> Path | None:
    """Where the report of the weights that are being evaluated lies, if there is one."""
    if module.private_run is not None:
        return module.private_run.folder
    if trainer.ckpt_path:
        folder = Path(trainer.ckpt_path).resolve().parent.parent
        if (folder / JSON_NAME).exists():
            return folder
    return None


def _metrics(trainer: pl.Trainer) -> dict[str, float]:
    return {
        name: float(value)
        for name, value in trainer.callback_metrics.items()
        if name.split("/")[0] in ("val", "test") and not name.endswith(("_step", "_epoch"))
    }


def _build(trainer: pl.Trainer, module: "DPRCModule", plan: list[dict[str, Any]], status: str) -> dict[str, Any]:
    run = module.private_run
    assert run is not None
    because = None
    if not run.resolved.private:
        because = "privacy.baseline_without_privacy=true: no clipping and no noise"
    elif run.secret.is_test or trainer.strategy.noise_hook.is_test:  # type: ignore[attr-defined]
        because = "a fixed stream for tests replaced secret randomness"
    spent = run.ledger.spent() if run.ledger else []
    bounds = Accountant((StepEvent.from_dict(event), count) for event, count in spent).epsilon(run.resolved.delta)
    steps = module.clock.steps
    datamodule = getattr(trainer, "datamodule", None)
    facts: dict[str, Any] = datamodule.report_facts() if isinstance(datamodule, DPRCDataModule) else {}
    return {
        "format": FORMAT_VERSION,
        "name": run.folder.parent.name if run.folder.name.startswith("version_") else run.folder.name,
        "status": status,
        "private": because is None,
        "not_private_because": because,
        "epsilon": {**bounds._asdict(), "delta": run.resolved.delta} if because is None else None,
        "mechanism": run.resolved.to_dict(),
        "neighboring_relation": "add or remove one record",
        "sampling": "Poisson",
        "steps": run.ledger.steps if run.ledger else len(steps),
        "on_nonfinite": module.privacy.on_nonfinite,
        "dropped_records": module.dropped_records if module.privacy.log_unprotected else None,
        "precision": str(trainer.precision),
        "parameters": plan,
        "trainable_parameters": sum(p.numel() for p in module.parameters() if p.requires_grad),
        "metrics": _metrics(trainer),
        "data": facts,
        "cost": {
            "training_seconds": sum(steps),
            "median_step_seconds": sorted(steps)[len(steps) // 2] if steps else 0.0,
            "measured_steps": len(steps),
            "phases": dict(module.clock.phases),
            "peak_memory_bytes": _peak_memory(module.device),
            "device": _device_name(module.device),
        },
        "logged_unprotected": ["train/loss", "clip/fraction", "clip/dropped"] if module.privacy.log_unprotected else [],
        "assumptions": list(ASSUMPTIONS),
        "paths": _paths(trainer, run.folder),
        "versions": versions(),
    }


def _paths(trainer: pl.Trainer, folder: Path) -> dict[str, str]:
    checkpoint = trainer.checkpoint_callback
    paths = {"run folder": str(folder), "report": str(folder / "report.md"), "ledger": str(folder / "ledger.jsonl")}
    if not (folder / "ledger.jsonl").exists():
        del paths["ledger"]
    if isinstance(checkpoint, ModelCheckpoint) and checkpoint.best_model_path:
        paths["checkpoint"] = checkpoint.best_model_path
    if trainer.logger is not None and trainer.log_dir:
        paths["TensorBoard log"] = f"tensorboard --logdir {trainer.log_dir}"
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


def _opening(module: "DPRCModule", plan: list[PlanRow], epsilons: list[float]) -> str:
    run = module.private_run
    assert run is not None
    r = run.resolved
    batch = f"{r.steps} steps, each a Poisson sample of {r.expected_batch_size:g} expected of {r.num_records} records"
    if not r.private:
        return f"NOT PRIVATE (privacy.baseline_without_privacy=true): no clipping, no noise. {batch}."
    sketched = [row for row in plan if row.estimator != "exact"]
    exact = [row for row in plan if row.estimator == "exact"]
    return "\n".join([
        f"Private run in {run.folder}",
        f"  epsilon <= {epsilons[-1]:.4f} at delta {r.delta:g}, after {batch}",
        f"  noise multiplier {r.noise_multiplier:.4f}, clipping at {r.max_grad_norm:g}, estimator {r.estimator}",
        f"  sketched norms (k = {r.sketch_dim}): {_tensors(sketched)}" if sketched else "  sketched norms: none",
        f"  exact norms: {_tensors(exact)}",
        textwrap.indent(format_plan(plan), "  "),
    ])


def _tensors(rows: list[PlanRow]) -> str:
    return f"{len(rows)} tensors, {sum(math.prod(row.shape) for row in rows):,} parameters"


def _closing(report: dict[str, Any]) -> str:
    if not report["private"]:
        return f"NOT PRIVATE: {report['not_private_because']}. Report: {report['paths']['report']}"
    e = report["epsilon"]
    bounds = ", ".join(f"{name} {e[name]:.4f}" for name in ("lower", "estimate", "upper"))
    done = f"after {report['steps']} steps ({report['status']})"
    return f"epsilon at delta {e['delta']:g}: {bounds} {done}. Report: {report['paths']['report']}"


@rank_zero_only
def _say(text: str) -> None:
    print(text, flush=True)
