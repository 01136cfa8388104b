"""What a step tells of its private batch without noise: outside of the guarantee, and marked so where it is shown."""

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from dprc_lightning.timing import OTHER

LOSS, CLIPPED, DROPPED = "train/loss", "clip/fraction", "clip/dropped"
UNPROTECTED = (LOSS, CLIPPED, DROPPED, "time/*", "tokens/s")
"""Every name under which something from private data is logged without noise; times tell of the batch's size."""
PHASES = ("data", "check_isolation", "forward", "norm_pass", "clipped_backward", "reduce", "noise", "optimizer", OTHER)
"""The phases that are logged: the same on all ranks, so that one vector holds them. Others count as `OTHER`."""

Reduce = Callable[[Tensor], Tensor]


def is_unprotected(name: str) -> bool:
    """Whether a logged figure comes from private data without noise.

    Args:
        name: As it is logged.

    Returns:
        Whether `UNPROTECTED` covers it.
    """
    return any(fnmatchcase(name, pattern) for pattern in UNPROTECTED)


def count_tokens(batch: Any) -> int | None:
    """Tokens of a collated micro-batch, padding left out where the batch tells it. Cheap for a batch on the CPU only.

    Args:
        batch: What a collate function returned.

    Returns:
        The sum of its ``attention_mask`` ([B, T], integer or bool) or else of its ``lengths``, or else the number of
        its ``input_ids``; None if it is no text.
    """
    if not isinstance(batch, Mapping):
        return None
    mask, lengths, ids = (batch.get(name) for name in ("attention_mask", "lengths", "input_ids"))
    # Masks of other shapes, and those that are added to scores, do not count tokens.
    if isinstance(mask, Tensor) and mask.ndim == 2 and not mask.is_floating_point():
        return int(mask.sum())
    if isinstance(lengths, Tensor):
        return int(lengths.sum())
    return ids.numel() if isinstance(ids, Tensor) else None


class StepStatistics:
    """Figures of one logical batch.

    Args:
        private: Whether records are clipped.
    """

    def __init__(self, private: bool) -> None:
        self._private = private
        # Loss, records, clipped, dropped: stays on the device, so that the host waits once per step and not per batch.
        self._sums: Tensor | None = None
        self._tokens: int | None = None

    def add(self, losses: Tensor, norms: Tensor | None, factors: Tensor | None, tokens: int | None = None) -> None:
        """Add a micro-batch.

        Args:
            losses: [B].
            norms: [B], or None without clipping.
            factors: [B], or None without clipping.
            tokens: How many it has, if it is text.
        """
        losses = losses.detach().double()
        kept = torch.ones_like(losses, dtype=torch.bool) if norms is None else torch.isfinite(norms)
        clipped = torch.zeros_like(kept) if factors is None else kept & (factors < 1)
        # A dropped record's loss may be NaN: it is left out, not multiplied by zero.
        loss = torch.where(kept, losses, 0.0).sum()
        sums = torch.stack([loss, kept.sum(), clipped.sum(), (~kept).sum()])
        self._sums = sums if self._sums is None else self._sums + sums
        if tokens is not None:
            self._tokens = tokens + (self._tokens or 0)

    def means(self, reduce: Reduce | None = None, times: Mapping[str, float] | None = None) -> dict[str, float]:
        """The step's figures over all ranks, every one of them `UNPROTECTED`. All ranks must call it alike.

        Args:
            reduce: Sums a float64 vector on the CPU over ranks; None on a single one.
            times: Seconds by phase, as `StepClock.last`; None for no times.

        Returns:
            Mean loss; with clipping also the share of clipped records and the number of dropped ones. With times also
            ``time/<phase>`` and ``time/step``, their means over ranks, and for text ``tokens/s`` of all ranks together.
        """
        sums = [0.0] * 4 if self._sums is None else self._sums.tolist()
        seconds = dict.fromkeys(PHASES, 0.0)
        for name, value in (times or {}).items():
            seconds[name if name in seconds else OTHER] += value
        text = [self._tokens or 0, self._tokens is not None]
        vector = torch.tensor([1.0, *sums, *text, *seconds.values()], dtype=torch.float64)
        if reduce is not None:
            vector = reduce(vector)
        ranks, loss, records, clipped, dropped, tokens, ranks_with_text, *phases = vector.tolist()
        records = max(records, 1)
        means = {LOSS: loss / records}
        if self._private:
            means |= {CLIPPED: clipped / records, DROPPED: dropped}
        if times is not None:
            step = sum(phases) / ranks
            means |= {f"time/{name}": value / ranks for name, value in zip(PHASES, phases, strict=True)}
            means["time/step"] = step
            if ranks_with_text and step > 0:
                means["tokens/s"] = tokens / step
        return means
