"""Norms of per-record gradients, exact or estimated, from the factors that a backward pass offers.

A layer with weight W [n0, n1] has, for record i, the gradient ``left_i^T right_i``, where ``left`` [B, T, n0] and
``right`` [B, T, n1] are its output gradients and its inputs. Nothing in here knows of modules or of autograd.
"""

from dprc_lightning.sketch.exact import squared_norms
from dprc_lightning.sketch.factors import BLOCK_ROWS, Factors
from dprc_lightning.sketch.hutchinson import cheaper_side, sketch
from dprc_lightning.sketch.projection import ROWS_PER_BLOCK, GaussianProjections, Projections
from dprc_lightning.sketch.weighted import weighted_sum

__all__ = [
    "BLOCK_ROWS",
    "ROWS_PER_BLOCK",
    "Factors",
    "GaussianProjections",
    "Projections",
    "cheaper_side",
    "sketch",
    "squared_norms",
    "weighted_sum",
]
