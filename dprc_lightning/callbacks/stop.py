"""Ctrl-C and SIGTERM end a run after the step at hand, with everything saved; a second one ends it at once."""

import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, cast

import lightning.pytorch as pl
from lightning.fabric.strategies.launchers.subprocess_script import _ChildProcessObserver
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from dprc_lightning.errors import CheckpointError, InterruptedRun, UnclippedGradientError, UnsupportedModuleError
from dprc_lightning.strategies import PrivateStrategy

if TYPE_CHECKING:
    from dprc_lightning.module import DPRCModule

CHECKPOINT_NAME = "interrupted.ckpt"


class GracefulStop(pl.Callback):
    """Added by DPRCModule to every trainer.

    The signal is only noted. When the ranks meet at the beginning of the next step they agree on it, make that step,
    write ``checkpoints/interrupted.ckpt`` and end; `trainer.fit` then raises `InterruptedRun`, which ends a script with
    status 128 + signal. So no rank waits for another one, no step is lost, and a resume equals a run that went on.
    """

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}
        self._stopped: tuple[int, str] | None = None
        self._limit: int | float | None = None
        self._training = False

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Nothing is trained yet, whatever the fit before has left.

        Args:
            trainer: The trainer.
            pl_module: The module.
            stage: What begins.
        """
        self._training, self._stopped = False, None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Take the signals over, where a main thread can.

        Args:
            trainer: The trainer.
            pl_module: The module.
        """
        self._training = True
        if threading.current_thread() is not threading.main_thread():
            return
        handler = self._handler(cast("DPRCModule", pl_module))
        numbers = [signal.SIGINT, signal.SIGTERM]
        # Slurm announces its SIGTERM by another signal, which Lightning answers with a checkpoint and a requeue.
        environment = trainer._accelerator_connector.cluster_environment
        if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:
            numbers.remove(signal.SIGTERM)
        for number in numbers:
            # A shell's background job ignores SIGINT, and should go on doing so.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, handler)

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save and stop, if the ranks agreed to; after the last step of the budget stop with a validation.

        Args:
            trainer: The trainer.
            pl_module: The module.
            outputs: Unused.
            batch: Unused.
            batch_idx: Unused.
        """
        module = cast("DPRCModule", pl_module)
        run = module.private_run
        if run is None or self._stopped:
            return
        if module.stop_agreed is None:
            # At its limit of steps Lightning ends without one, and the last epoch is rarely a whole one.
            trainer.should_stop = trainer.should_stop or run.steps_left == 0
            return
        path = run.folder / "checkpoints" / CHECKPOINT_NAME
        # Within the epoch, as every checkpoint of a step is: after its end the rest of the epoch would be skipped.
        trainer.save_checkpoint(path)
        trainer.should_stop = True
        # Lightning would validate before it stops; whoever sent the signal may not wait so long.
        self._limit, trainer.limit_val_batches = trainer.limit_val_batches, 0
        advice = f"resume with --ckpt_path {_short(path)}"
        strategy = trainer.strategy
        if isinstance(strategy, PrivateStrategy) and not strategy.can_resume:
            advice = f"{_short(path)} has the weights, to test or export, and {strategy.strategy_name} resumes no run"
        self._stopped = (
            module.stop_agreed,
            f"interrupted after step {run.applied} of {run.resolved.steps}; {advice}",
        )

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Give the signals back, before Lightning gives back what it had put there itself.

        Args:
            trainer: The trainer.
            pl_module: The module.
        """
        self._restore()
        self._training = False
        if self._limit is not None:
            trainer.limit_val_batches, self._limit = self._limit, None
        module = cast("DPRCModule", pl_module)
        if self._stopped is None and isinstance(trainer.strategy, PrivateStrategy):
            # One that came in the last step or after it: the run is done, but what follows it is not wanted.
            (number,) = trainer.strategy.max_over_ranks([module.stop_signal or 0])
            if number:
                self._stopped = number, "interrupted after the last step: training is done"

    def on_fit_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Raise, after everything else is done.

        Args:
            trainer: The trainer.
            pl_module: The module.

        Raises:
            InterruptedRun: A signal ended the run.
        """
        if self._stopped is not None:
            number, message = self._stopped
            _let_children_end()
            # Whoever started the processes ends all of them once one has ended: rank 0 writes its report before.
            trainer.strategy.barrier()
            raise InterruptedRun(number, message)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        """Save what a whole step has made, and give the signals back.

        Args:
            trainer: The trainer.
            pl_module: The module.
            exception: What ended the run.
        """
        self._restore()
        module = cast("DPRCModule", pl_module)
        run = module.private_run
        # With several ranks nobody knows whether the others are there to take part.
        alone = trainer.world_size == 1
        # Before training begins the optimizer and the loops are not what the checkpoint at hand says: a refused resume
        # must not put that over it.
        if not self._training or run is None:
            return
        self._training = False
        if not run.applied or module.updating or not alone or _is_unclean(module, exception):
            return
        path = run.folder / "checkpoints" / CHECKPOINT_NAME
        try:
            trainer.save_checkpoint(path)
        except CheckpointError as error:
            # What ended the run is what must be seen last.
            _say(str(error))
        else:
            _say(f"saved after step {run.applied} of {run.resolved.steps}: {_short(path)}")

    def _handler(self, module: "DPRCModule") -> Callable[[int, FrameType | None], None]:
        def note(number: int, frame: FrameType | None) -> None:
            if module.stop_signal is not None:
                # Asked twice: at once, and the step at hand is lost (the ledger counts it).
                self._restore()
                raise KeyboardInterrupt
            module.stop_signal = number
            _say(f"{signal.Signals(number).name}: the next whole step is the last one; again to stop at once")

        return note

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}


def _is_unclean(module: "DPRCModule", exception: BaseException) -> bool:
    """Whether buffers or parameters may hold what the guards refused to release."""
    if isinstance(exception, UnsupportedModuleError | UnclippedGradientError):
        return True
    try:
        if module.handle is not None:
            module.handle.check_kept()
    except (UnsupportedModuleError, UnclippedGradientError) as error:
        _say(f"nothing saved: {error}")
        return True
    return False


def _let_children_end() -> None:
    """Lightning kills the process that started the others as soon as one of them ends with a status of its own."""
    for thread in threading.enumerate():
        if isinstance(thread, _ChildProcessObserver):
            # It has no way to be told.
            thread._run = lambda: True  # type: ignore[method-assign]


def _short(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


@rank_zero_only
def _say(text: str) -> None:
    # On a line of its own: a progress bar may be on this one.
    print(f"\n{text}", file=sys.stderr, flush=True)
