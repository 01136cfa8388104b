"""Per-record clipping of any module's gradient: norms from one backward, the clipped sum from another."""

from dprc_lightning.clipping.attachment import attach
from dprc_lightning.clipping.handle import ClippingHandle
from dprc_lightning.clipping.isolation import check_isolation
from dprc_lightning.clipping.loss import causal_lm_loss, causal_lm_losses, classification_loss
from dprc_lightning.clipping.plan import PlanRow
from dprc_lightning.clipping.two_pass import clip_factors

__all__ = [
    "ClippingHandle",
    "PlanRow",
    "attach",
    "causal_lm_loss",
    "causal_lm_losses",
    "check_isolation",
    "classification_loss",
    "clip_factors",
]
