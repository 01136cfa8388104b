"""Which records are in a batch, and how a batch is cut into pieces that fit into memory."""

from dprc_lightning.sampling.groups import Groups, owners_of
from dprc_lightning.sampling.microbatch import split_batch
from dprc_lightning.sampling.poisson import PoissonBatchSampler

__all__ = ["Groups", "PoissonBatchSampler", "owners_of", "split_batch"]
