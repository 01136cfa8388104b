"""Per-record clipping of any module's gradient: norms from a first backward, a second backward of rescaled losses."""

from dprc_lightning.clipping.handle import ClippingHandle, attach
from dprc_lightning.clipping.loss import causal_lm_loss, classification_loss
from dprc_lightning.clipping.plan import PlanRow
from dprc_lightning.clipping.two_pass import clip_factors

__all__ = ["ClippingHandle", "PlanRow", "attach", "causal_lm_loss", "classification_loss", "clip_factors"]
