"""What `ClippingHandle.plan` tells of each trainable parameter."""

from dataclasses import dataclass

from dprc_lightning.layers import ParameterTracker


@dataclass(frozen=True)
class PlanRow:
    """How one trainable parameter's norm is had.

    Attributes:
        parameter: Its name.
        modules: Names of the modules that use it; more than one where tied.
        shape: Its shape.
        estimator: ``exact`` or ``hutchinson``.
        side: ``output`` (first axis) or ``input`` (second axis), the one that P contracts; ``-`` where exact.
        projection_floats: float32 numbers of P, once per logical step.
        sketch_floats: float32 numbers of the sketch, per record of the micro-batch.
        flops_per_token: Floating-point operations of the sketch, per token; 0 where exact (it depends on T).
    """

    parameter: str
    modules: tuple[str, ...]
    shape: tuple[int, ...]
    estimator: str
    side: str
    projection_floats: int
    sketch_floats: int
    flops_per_token: int


def plan_row(tracker: ParameterTracker, sketch_dim: int) -> PlanRow:
    """The plan of one parameter.

    Args:
        tracker: The parameter.
        sketch_dim: k; 0 if nothing is sketched.

    Returns:
        Its row.
    """
    shape = tuple(tracker.parameter.shape)
    common = (tracker.name, tuple(tracker.modules), shape, tracker.estimator)
    if tracker.estimator == "exact":
        return PlanRow(*common, "-", 0, tracker.parameter.numel() if tracker.kind == "vector" else 0, 0)
    projected, other = shape[tracker.side], shape[1 - tracker.side]
    side = "output" if tracker.side == 0 else "input"
    return PlanRow(*common, side, sketch_dim * projected, sketch_dim * other, 2 * sketch_dim * (projected + other))
