"""Prints what a run promises before it starts, follows epsilon, and writes the report however the run ends."""

import math
import signal
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from dprc_lightning.accounting import StepEvent
from dprc_lightning.callbacks.epsilon import EpsilonLookup
from dprc_lightning.callbacks.run_facts import ending_facts, not_private_because, public_metrics, start_facts
from dprc_lightning.callbacks.step_log import announce_unprotected
from dprc_lightning.clipping import PlanRow
from dprc_lightning.clipping.plan_table import format_plan
from dprc_lightning.errors import InterruptedRun, StepOrderError
from dprc_lightning.report import JSON_NAME, START_NAME, assemble, read_report, write_report, write_start
from dprc_lightning.report.facts import NOT_CERTIFIED, unit
from dprc_lightning.run import PrivateRun, own_folder, step_event

if TYPE_CHECKING:
    # The module brings this callback along; it must not need the module to be imported first.
    from dprc_lightning.module import DPRCModule


class PrivacyReport(pl.Callback):
    """Added by DPRCModule to every trainer. Writes ``report.json``, ``.md`` and ``.html`` into the run folder.

    When fit starts it writes ``resolved.json``, from which, with the ledger, the report can be made after a kill.
    Epsilon so far is logged as an upper bound, see `EpsilonLookup`.

    Guarantee: epsilon is reported only where every step of the run, in this process and before, drew its noise from
    secret randomness; a run that did not is marked in its ledger before its first step.
    """

    def __init__(self) -> None:
        self._lookup: EpsilonLookup | None = None
        self._start: dict[str, Any] = {}
        self._metrics: dict[str, float] = {}
        self._metrics_step: dict[str, int] = {}
        self._steps_seen = 0

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Forget the fit before: an error from here on must not be reported as its.

        Args:
            trainer: The trainer.
            pl_module: The module.
            stage: What begins.
        """
        if stage == "fit":
            self._start, self._lookup = {}, None
            self._metrics, self._metrics_step = {}, {}

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Print the mechanism and the plan, and leave on disk what a report needs.

        Args:
            trainer: The trainer.
            pl_module: The module.
        """
        module = _dprc(pl_module)
        run = _run_of(module)
        self._steps_seen = run.spent
        rows = module.handle.plan() if module.handle else []
        because = not_private_because(trainer, run)
        if run.ledger is not None and because is None:
            spent = [(StepEvent.from_dict(event), count) for event, count in run.ledger.spent()]
            self._lookup = EpsilonLookup(step_event(run.resolved), run.resolved.budget, run.resolved.delta, spent)
        self._start = start_facts(trainer, module, rows, because)
        if trainer.is_global_zero:
            write_start(run.folder, self._start)
        announce_unprotected(trainer, module)
        _say(_opening(module, rows, self._lookup, because))

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
        run = _run_of(_dprc(pl_module))
        if run.resolved.private and run.spent == self._steps_seen:
            raise StepOrderError(
                f"{type(pl_module).__name__}.training_step made no private step: it belongs to the library; write "
                "per_sample_loss, and call super().training_step(batch, batch_idx) where you override it"
            )
        self._steps_seen = run.spent
        if self._lookup is not None:
            # batch_size is a constant: the realised one is private. Rank 0 alone has the ledger.
            epsilon = self._lookup.after(run.spent)
            pl_module.log("privacy/epsilon", epsilon, prog_bar=True, on_step=True, batch_size=1, rank_zero_only=True)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Look at the plan once more: layers may have joined, and at the end of fit the handle is gone.

        Args:
            trainer: The trainer.
            pl_module: The module.
        """
        module = _dprc(pl_module)
        if module.handle is not None:
            self._start = start_facts(trainer, module, module.handle.plan(), self._start["not_private_because"])

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write the report.

        Args:
            trainer: The trainer.
            pl_module: The module.
        """
        module = _dprc(pl_module)
        run = _run_of(module)
        status = "finished"
        if module.stop_agreed is not None:
            status = f"stopped by {signal.Signals(module.stop_agreed).name}"
        elif run.applied < run.resolved.steps:
            status = f"ended with {run.steps_left} steps left"
            if run.steps_left == 0:
                status = f"ended with the budget; {run.resolved.steps - run.applied} steps were lost to crashes"
        self._write(trainer, module, status)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Write the report of what was done before the error.

        Args:
            trainer: The trainer.
            pl_module: The module.
            exception: The error.
        """
        # Before on_fit_start nothing was done that a report could tell of; an InterruptedRun comes after on_fit_end.
        begun = trainer.state.fn == "fit" and _dprc(pl_module).private_run is not None and bool(self._start)
        if begun and not isinstance(exception, InterruptedRun):
            self._write(trainer, _dprc(pl_module), f"stopped by {type(exception).__name__}")

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Keep validation figures; outside of fit, put them into the report.

        Args:
            trainer: The trainer.
            pl_module: The module.
        """
        if trainer.state.fn != "fit":
            self._merge(trainer, _dprc(pl_module))
        elif not trainer.sanity_checking:
            self._metrics = public_metrics(trainer)
            self._metrics_step = dict.fromkeys(self._metrics, _applied_steps(_dprc(pl_module)))

    def on_test_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Put test figures into the report.

        Args:
            trainer: The trainer.
            pl_module: The module.
        """
        self._merge(trainer, _dprc(pl_module))

    @rank_zero_only
    def _write(self, trainer: pl.Trainer, module: "DPRCModule", status: str) -> None:
        run = _run_of(module)
        applied = _applied_steps(module)
        # Figures that no validation gave are of now.
        metrics = public_metrics(trainer) | self._metrics
        report = assemble(
            self._start,
            _begun(run),
            status=status,
            not_private_because=None if run.ledger is None else run.ledger.meta.get("not_private_because"),
            parents=() if run.ledger is None else run.ledger.parents,
            run_id=None if run.ledger is None else run.ledger.run_id,
            steps=run.spent,
            applied_steps=applied,
            metrics=metrics,
            metrics_step=dict.fromkeys(metrics, applied) | self._metrics_step,
            metrics_by_checkpoint=_known_by_checkpoint(run.folder),
            **ending_facts(trainer, module),
        )
        write_report(run.folder, report)
        _say(_closing(report))

    @rank_zero_only
    def _merge(self, trainer: pl.Trainer, module: "DPRCModule") -> None:
        """Figures of the run's last weights are the run's; those of any other checkpoint stand under its name."""
        folder = _evaluated_folder(trainer, module)
        if folder is None:
            return
        report, metrics = read_report(folder), public_metrics(trainer)
        step = report["applied_steps"]
        if trainer.ckpt_path:
            remembered = module._resumed_from or {}
            step = remembered.get("applied_steps", remembered.get("global_step"))
        if step is None or step != report["applied_steps"]:
            name = Path(trainer.ckpt_path or "weights at hand").name
            known = report["metrics_by_checkpoint"].setdefault(name, {"step": step, "metrics": {}})
            known["step"] = step
            known["metrics"].update(metrics)
        else:
            report["metrics"].update(metrics)
            report["metrics_step"] = (report["metrics_step"] or {}) | dict.fromkeys(metrics, step)
        write_report(folder, report)
        _say("  ".join(f"{name} {value:.3f}" for name, value in sorted(metrics.items())))


def _dprc(module: pl.LightningModule) -> "DPRCModule":
    # The callback comes from DPRCModule.configure_callbacks.
    return cast("DPRCModule", module)


def _run_of(module: "DPRCModule") -> PrivateRun:
    assert module.private_run is not None, "the strategy prepares the run before fit starts"
    return module.private_run


def _applied_steps(module: "DPRCModule") -> int:
    return _run_of(module).applied


def _begun(run: PrivateRun) -> list[tuple[dict[str, Any], int]]:
    """What the ledger counts, less what is reserved and not begun: closing the ledger gives that back."""
    spent = [] if run.ledger is None else run.ledger.spent()
    ahead = sum(count for _, count in spent) - run.spent
    if run.ledger is not None and ahead > 0:
        event, count = spent.pop()
        spent += [(event, count - ahead)] if count > ahead else []
    return spent


def _known_by_checkpoint(folder: Path) -> dict[str, Any]:
    """What an earlier report of this folder says of checkpoints that lie there."""
    return read_report(folder)["metrics_by_checkpoint"] if (folder / JSON_NAME).exists() else {}


def _evaluated_folder(trainer: pl.Trainer, module: "DPRCModule") -> Path | None:
    """The run folder of the weights that are being evaluated: that of their checkpoint, or of the fit just made."""
    if not trainer.ckpt_path:
        return None if module.private_run is None else module.private_run.folder
    folder = own_folder(Path(trainer.ckpt_path))
    known = (folder / JSON_NAME).exists() or (folder / START_NAME).exists()
    return folder if known else None


def _opening(module: "DPRCModule", plan: list[PlanRow], lookup: EpsilonLookup | None, because: str | None) -> str:
    run = _run_of(module)
    r = run.resolved
    kind = "records" if r.group_column is None else f"groups (column {r.group_column})"
    batch = f"{r.steps} steps, each a Poisson sample of {r.expected_batch_size:g} expected of {r.num_records} {kind}"
    if not r.private:
        return f"NOT PRIVATE ({because}). {batch}."
    lines = [f"Private run in {run.folder}" if because is None else f"NOT PRIVATE ({because}); run in {run.folder}"]
    if because is None and lookup is not None:
        lines.append(f"  epsilon <= {lookup.final:.4f} at delta {r.delta:g} for {unit(r.to_dict())}, after {batch}")
    else:
        lines.append(f"  {batch}")
    if because is None and not step_event(r).certified:
        lines.append(f"  NOT CERTIFIED: {NOT_CERTIFIED}")
    if r.crash_allowance:
        lines.append(f"  budget {r.budget} steps: {r.crash_allowance} of them may be lost to crashes")
    if run.ledger is not None and run.ledger.parents:
        lines.append("  a fork, with batches of its own: who publishes both continuations pays for the steps of both")
    if run.spent:
        lost = f" ({run.spent - run.applied} of them lost to crashes)" if run.spent > run.applied else ""
        lines.append(f"  {run.spent} steps are spent already{lost}, {run.steps_left} are left")
    sketched = [row for row in plan if row.estimator != "exact"]
    exact = [row for row in plan if row.estimator == "exact"]
    drawn = f" (k = {r.sketch_dim}, {r.projection})" if sketched else ""
    return "\n".join([
        *lines,
        f"  noise multiplier {r.noise_multiplier:.4f}, clipping at {r.max_grad_norm:g}, estimator {r.estimator}",
        f"  sketched norms{drawn}: {_tensors(sketched) if sketched else 'none'}",
        f"  exact norms: {_tensors(exact)}",
        *([] if module.memory_pick is None else [f"  {module.memory_pick.said()}"]),
        textwrap.indent(format_plan(plan), "  "),
    ])


def _tensors(rows: list[PlanRow]) -> str:
    return f"{len(rows)} tensors, {sum(math.prod(row.shape) for row in rows):,} parameters"


def _closing(report: dict[str, Any]) -> str:
    figures = "".join(f"{name} {value:.3f}. " for name, value in sorted(report["metrics"].items()))
    if not report["private"]:
        return f"{figures}NOT PRIVATE: {report['not_private_because']}. Report: {report['paths']['report']}"
    e = report["epsilon"]
    bounds = ", ".join(f"{name} {e[name]:.4f}" for name in ("lower", "estimate", "upper"))
    done = f"after {report['steps']} steps ({report['status']})"
    kind = "" if report["certified"] else " (NOT CERTIFIED)"
    return f"{figures}epsilon{kind} at delta {e['delta']:g}: {bounds} {done}. Report: {report['paths']['report']}"


@rank_zero_only
def _say(text: str) -> None:
    print(text, flush=True)
