"""One bar over the steps of the whole budget."""

import math
import time
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ProgressBar
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from dprc_lightning.callbacks.pace import Pace
from dprc_lightning.diagnostics import CLIPPED, LOSS, is_unprotected

EPSILON = "privacy/epsilon"
LEGEND = "* from private data, without noise"
_LABELS = {EPSILON: "epsilon", LOSS: "loss", CLIPPED: "clip"}


class StepProgressBar(ProgressBar):
    """Steps, remaining time, epsilon so far, loss and share of clipped records, for the run as a whole.

    A resumed run begins where its checkpoint is, and the remaining time is judged by the steps of this process. Figures
    from private data without noise carry a ``*``; with ``privacy.log_unprotected=false`` there are none. Metrics that
    the user's own code logs with ``prog_bar=True`` are shown as they are. Where the output is no terminal, a plain line
    is written after each twentieth of the steps, or after thirty seconds if that is sooner, and at the end.

    Args:
        console: Where to; default: standard output.
        clock: Tells the time, in seconds.
    """

    def __init__(self, console: Console | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._console, self._clock = console, clock
        self._enabled = True
        self._pace = Pace(0, None, 0.0)
        self._bar: Progress | None = None
        self._train: TaskID | None = None
        self._evaluation: TaskID | None = None

    # What Lightning asks of a progress bar ----------------------------------------------------------------------------

    def enable(self) -> None:
        """Show it."""
        self._enabled = True

    def disable(self) -> None:
        """Show nothing, as on all ranks but the first."""
        self._stop()
        self._enabled = False

    @property
    def is_enabled(self) -> bool:
        """Whether anything is shown."""
        return self._enabled

    def get_metrics(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule
    ) -> dict[str, int | str | float | dict[str, float]]:
        """What is shown beside the steps.

        Args:
            trainer: The trainer.
            pl_module: The module.

        Returns:
            The metrics logged with ``prog_bar=True``, under short names; those from private data without noise with a
            ``*``, or not at all.
        """
        logged = trainer.progress_bar_metrics
        shown: dict[str, int | str | float | dict[str, float]] = {}
        for name in [*_LABELS, *(name for name in logged if name not in _LABELS)]:
            if name not in logged or (is_unprotected(name) and not _may_show_unprotected(pl_module)):
                continue
            value = logged[name]
            if name == EPSILON and math.isfinite(value):
                # Three digits are shown, and an upper bound is rounded up.
                value = math.ceil(value * 1000) / 1000
            label = _LABELS.get(name, name)
            shown[f"{label}*" if is_unprotected(name) else label] = value
        return shown

    # Training ---------------------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Begin at the step that a checkpoint brought."""
        # Another callback logs epsilon when a step ends: shown before that, it would be the one of the step before.
        trainer.callbacks = [*(c for c in trainer.callbacks if c is not self), self]  # type: ignore[attr-defined]
        total = trainer.max_steps if trainer.max_steps > 0 else None
        self._pace = Pace(trainer.global_step, total, self._clock())
        if not self._enabled:
            return
        if _may_show_unprotected(pl_module):
            self._out().print(LEGEND, markup=False, highlight=False)
        bar = self._start()
        if bar is not None:
            self._train = bar.add_task(
                _title(pl_module), completed=trainer.global_step, total=total, text=self._pace.position
            )

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count a step."""
        self._pace.count(trainer.global_step, self._clock())
        if not self._enabled or not (self._bar is not None or self._pace.line_due()):
            return
        figures = self.get_metrics(trainer, pl_module).items()
        text = f"{self._pace.position} ETA {self._pace.remaining} "
        text += " ".join(
            f"{name} {value:.3f}" if isinstance(value, float) else f"{name} {value}" for name, value in figures
        )
        if self._bar is not None and self._train is not None:
            self._bar.update(self._train, completed=trainer.global_step, text=text)
        else:
            self._out().print(f"{_title(pl_module)} {text}", markup=False, highlight=False, soft_wrap=True)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The bar stays on the screen as it is."""
        self._stop()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Give the terminal back."""
        self._stop()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Give the terminal back."""
        self._stop()

    # Evaluation: a line of its own, until it ends ---------------------------------------------------------------------

    def on_validation_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Show it; within training below the bar."""
        if trainer.sanity_checking:
            self._begin_evaluation(self.sanity_check_description, trainer.num_sanity_val_batches)
        else:
            self._begin_evaluation(self.validation_description, trainer.num_val_batches)

    def on_test_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Show it."""
        self._begin_evaluation(self.test_description, trainer.num_test_batches)

    def on_predict_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Show it."""
        self._begin_evaluation(self.predict_description, trainer.num_predict_batches)

    def on_validation_batch_end(self, *_: Any) -> None:
        """Count a batch."""
        self._advance_evaluation()

    def on_test_batch_end(self, *_: Any) -> None:
        """Count a batch."""
        self._advance_evaluation()

    def on_predict_batch_end(self, *_: Any) -> None:
        """Count a batch."""
        self._advance_evaluation()

    def on_validation_end(self, *_: Any) -> None:
        """The line goes."""
        self._end_evaluation()

    def on_test_end(self, *_: Any) -> None:
        """The line goes."""
        self._end_evaluation()

    def on_predict_end(self, *_: Any) -> None:
        """The line goes."""
        self._end_evaluation()

    def _begin_evaluation(self, title: str, counts: list[int | float] | int | float) -> None:
        total = sum(counts) if isinstance(counts, list) else counts
        bar = self._start() if self._enabled else None
        if bar is not None:
            self._evaluation = bar.add_task(title, total=total if math.isfinite(total) else None, text="")

    def _advance_evaluation(self) -> None:
        if self._bar is not None and self._evaluation is not None:
            self._bar.advance(self._evaluation)

    def _end_evaluation(self) -> None:
        if self._bar is not None and self._evaluation is not None:
            self._bar.remove_task(self._evaluation)
            self._evaluation = None
            if self._train is None:
                self._stop()

    # The console ------------------------------------------------------------------------------------------------------

    def _out(self) -> Console:
        if self._console is None:
            self._console = Console()
        return self._console

    def _start(self) -> Progress | None:
        """The bar; None where the output is no terminal, which is spared the control codes."""
        console = self._out()
        if self._bar is None and (console.is_jupyter or (console.is_terminal and not console.is_dumb_terminal)):
            # While it is live, what others print to standard output appears above it.
            text = TextColumn("{task.fields[text]}", markup=False)
            self._bar = Progress(TextColumn("{task.description}"), BarColumn(12), text, console=console)
            self._bar.start()
        return self._bar

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
        self._bar = self._train = self._evaluation = None


def _may_show_unprotected(module: pl.LightningModule) -> bool:
    privacy = getattr(module, "privacy", None)
    return privacy is None or privacy.log_unprotected


def _title(module: pl.LightningModule) -> str:
    privacy = getattr(module, "privacy", None)
    return "NOT PRIVATE" if privacy is not None and privacy.baseline_without_privacy else "Training"
