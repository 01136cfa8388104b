"""Logs what a step tells of its private batch, if that is wanted at all, and says in the log what it is."""

from typing import TYPE_CHECKING

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from dprc_lightning.diagnostics import CLIPPED, LOSS, UNPROTECTED, Reduce, StepStatistics

if TYPE_CHECKING:
    # The module calls these functions; they must not need the module to be imported first.
    from dprc_lightning.module import DPRCModule

_NOTICE = """\
Computed from private data **without noise**, outside of the privacy guarantee: {names}.
Step times and tokens per second tell how many records were drawn. Do not show these figures to those whom the guarantee
is meant to hold against; `privacy.log_unprotected=false` turns all of them off.
"""


def log_step(module: "DPRCModule", statistics: StepStatistics, reduce: Reduce | None = None) -> dict[str, float]:
    """Log the figures of the step that `StepClock.end_step` just ended; under DDP on all ranks.

    Guarantee: with ``privacy.log_unprotected=false`` nothing of the batch is logged, and nothing is reduced.

    Args:
        module: The module, within its training step.
        statistics: Of this rank's part of the batch.
        reduce: Sums a float64 vector on the CPU over ranks; None on a single one.

    Returns:
        What was logged.
    """
    if not module.privacy.log_unprotected:
        return {}
    figures = statistics.means(reduce, module.clock.last)
    shown = {name: value for name, value in figures.items() if name in (LOSS, CLIPPED)}
    rest = {name: value for name, value in figures.items() if name not in shown}
    # batch_size only weighs epoch means, of which there are none; the realised one is private.
    module.log_dict(shown, prog_bar=True, on_step=True, batch_size=1)
    module.log_dict(rest, on_step=True, batch_size=1)
    return figures
    return figures


@rank_zero_only
def announce_unprotected(trainer: pl.Trainer, module: "DPRCModule") -> None:
    """Name the unprotected figures in the log itself: a text ``unprotected``, where the logger takes texts.

    Args:
        trainer: The trainer.
        module: The module, before its first step.
    """
    if not module.privacy.log_unprotected:
        return
    text = _NOTICE.format(names=", ".join(f"`{name}`" for name in UNPROTECTED))
    for logger in trainer.loggers:
        add_text = getattr(getattr(logger, "experiment", None), "add_text", None)
        if add_text is not None:
            add_text("unprotected", text, module.global_step)
