"""What a step tells of its private batch without noise: outside of the guarantee, and marked so where it is shown."""

import torch
from torch import Tensor


class StepStatistics:
    """Figures of one logical batch.

    Args:
        private: Whether records are clipped.
    """

    def __init__(self, private: bool) -> None:
        self._private = private
        self._loss = 0.0
        self._clipped = 0
        self._records = 0
        self._dropped = 0

    def add(self, losses: Tensor, norms: Tensor | None, factors: Tensor | None) -> None:
        """Add a micro-batch.

        Args:
            losses: [B].
            norms: [B], or None without clipping.
            factors: [B], or None without clipping.
        """
        losses = losses.detach()
        if norms is None or factors is None:
            self._loss += float(losses.sum())
            self._records += len(losses)
            return
        kept = torch.isfinite(norms)
        self._loss += float(losses[kept].sum())
        self._records += int(kept.sum())
        self._clipped += int((factors[kept] < 1).sum())
        self._dropped += int((~kept).sum())

    def means(self) -> dict[str, float]:
        """Mean loss; with clipping also the share of clipped records and the number of dropped ones."""
        records = max(self._records, 1)
        means = {"train/loss": self._loss / records}
        if self._private:
            means |= {"clip/fraction": self._clipped / records, "clip/dropped": float(self._dropped)}
        return means
