"""Which records form a logical batch (Poisson), and how a logical batch is cut into physical micro-batches."""

from dprc_lightning.sampling.microbatch import split_batch as split_batch
from dprc_lightning.sampling.poisson import PoissonBatchSampler as PoissonBatchSampler

__all__ = ["PoissonBatchSampler", "split_batch"]
