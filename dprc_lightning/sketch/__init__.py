"""Norms of per-record gradients, exact or estimated, from the factors that a backward pass offers.

A layer with weight W [n0, n1] has, for record i, the gradient ``left_i^T right_i``, where ``left`` [B, T, n0] and
``right`` [B, T, n1] are its output gradients and its inputs. Nothing in here knows of modules or of autograd.
"""

from dprc_lightning.sketch.blocks import ROWS_PER_BLOCK, StreamedMatrix, not_kept
from dprc_lightning.sketch.exact import squared_norms
from dprc_lightning.sketch.factors import BLOCK_ROWS, Factors
from dprc_lightning.sketch.hutchinson import cheaper_side, sketch
from dprc_lightning.sketch.hutchpp import head_name, hutchpp_squared_norms
from dprc_lightning.sketch.matrix import DenseMatrix, ProjectionMatrix
from dprc_lightning.sketch.projection import GaussianProjections, KeyedProjections, Projections
from dprc_lightning.sketch.rademacher import RademacherMatrix, RademacherProjections
from dprc_lightning.sketch.weighted import weighted_sum

PROJECTIONS: dict[str, type[KeyedProjections]] = {
    "gaussian": GaussianProjections,
    "rademacher": RademacherProjections,
}
"""By the name of the distribution of P's entries, as `attach` and `PrivacyConfig` have it."""

__all__ = [
    "BLOCK_ROWS",
    "PROJECTIONS",
    "ROWS_PER_BLOCK",
    "DenseMatrix",
    "Factors",
    "GaussianProjections",
    "KeyedProjections",
    "ProjectionMatrix",
    "Projections",
    "RademacherMatrix",
    "RademacherProjections",
    "StreamedMatrix",
    "cheaper_side",
    "head_name",
    "hutchpp_squared_norms",
    "not_kept",
    "sketch",
    "squared_norms",
    "weighted_sum",
]
