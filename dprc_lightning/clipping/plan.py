"""What `ClippingHandle.plan` tells of each trainable parameter."""

import math
from collections.abc import Collection
from dataclasses import dataclass

from dprc_lightning.layers import ParameterTracker
from dprc_lightning.sketch import PROJECTIONS
from dprc_lightning.sketch.blocks import rows_at_once
from dprc_lightning.sketch.hutchpp import PRODUCTS, floats_per_record


@dataclass(frozen=True)
class PlanRow:
    """How one trainable parameter's norm is had.

    Attributes:
        parameter: Its name.
        modules: Names of the modules that use it; more than one where tied.
        shape: Its shape.
        estimator: ``exact``, ``hutchinson`` or ``hutchpp``.
        side: ``output`` (first axis) or ``input`` (all others), the one that P contracts; ``-`` where exact.
        projection_floats: Entries of P, once per logical step; of Hutch++ those of S too.
        projection_bytes: What they take from their first use to the end of the step: four bytes for a Gaussian entry,
            a bit for a random sign; 0 where P is not kept.
        sketch_floats: float32 numbers of the sketch, per record of the micro-batch; of Hutch++ the most at one time.
        flops_per_token: Floating-point operations of the sketch, per token; 0 where exact (it depends on T).
        ghost_rows: An exact matrix's norm comes from Gram matrices (ghost) where a record has at most so many rows in
            it, T for each use of the parameter, and from the whole gradient (identity) where it has more; both give
            the same number. None for sketched matrices and for vectors.
        block_bytes: Of a P that is not kept: the block of rows that is made at one time; 0 where it is kept.
    """

    parameter: str
    modules: tuple[str, ...]
    shape: tuple[int, ...]
    estimator: str
    side: str
    projection_floats: int
    projection_bytes: int
    sketch_floats: int
    flops_per_token: int
    ghost_rows: int | None = None
    block_bytes: int = 0


def plan_row(
    tracker: ParameterTracker, sketch_dim: int, projection: str = "gaussian", streamed: Collection[str] = ()
) -> PlanRow:
    """The plan of one parameter.

    Args:
        tracker: The parameter.
        sketch_dim: k; 0 if nothing is sketched.
        projection: Distribution of P's entries.
        streamed: Names of the projections that are not kept for the step.

    Returns:
        Its row.
    """
    shape = tuple(tracker.shape)
    common = (tracker.name, tuple(tracker.modules), shape, tracker.estimator)
    if tracker.kind == "vector":
        return PlanRow(*common, "-", 0, 0, tracker.shape.numel(), 0)
    # A convolution's weight is a matrix whose second axis is all but the first.
    sides = shape[0], math.prod(shape[1:])
    if tracker.estimator == "exact":
        return PlanRow(*common, "-", 0, 0, 0, 0, _ghost_rows(*sides))
    projected, other = sides[tracker.side], sides[1 - tracker.side]
    side = "output" if tracker.side == 0 else "input"
    stored_bytes, draws = PROJECTIONS[projection].stored_bytes, tracker.draws
    held = sum(stored_bytes(rows, sketch_dim) for name, rows in draws.items() if name not in streamed)
    made = max((rows for name, rows in draws.items() if name in streamed), default=0)
    block = 4 * sketch_dim * min(made, rows_at_once(sketch_dim))
    # Each product with the gradient goes through both factors.
    products, floats = 1, sketch_dim * other
    if tracker.estimator == "hutchpp":
        products, floats = PRODUCTS, floats_per_record(projected, other, sketch_dim)
    flops = products * 2 * sketch_dim * (projected + other)
    return PlanRow(*common, side, sketch_dim * sum(draws.values()), held, floats, flops, block_bytes=block)


def _ghost_rows(n0: int, n1: int) -> int:
    """The most rows with ``rows * (n0 + n1) < n0 * n1``, the rule of `dprc_lightning.sketch.exact`."""
    return max(n0 * n1 - 1, 0) // max(n0 + n1, 1)
