"""`attach`: per-record clipping for any `torch.nn.Module`, without Lightning."""

import math
import secrets
from typing import Literal, get_args

from torch import nn

from dprc_lightning.accounting.events import StepEvent
from dprc_lightning.clipping.handle import ClippingHandle, Settings
from dprc_lightning.clipping.two_pass import OnNonfinite, Unused
from dprc_lightning.errors import InvalidArgumentError, UnsupportedModuleError
from dprc_lightning.keys import derive
from dprc_lightning.layers.tracing import forget_tracing
from dprc_lightning.sketch import PROJECTIONS, Projections

Estimator = Literal["auto", "exact", "hutchinson", "hutchpp"]
Projection = Literal["gaussian", "rademacher"]


def attach(
    model: nn.Module,
    estimator: Estimator = "auto",
    sketch_dim: int = 32,
    projection: Projection = "gaussian",
    seed: int | None = None,
    *,
    unused: Unused = "error",
    on_nonfinite: OnNonfinite = "raise",
    norm_slack: float | None = None,
    check_isolation: bool = True,
    projection_memory: float | None = 1.0,
    mlp_chunk: int | None = None,
    lean_norms: bool = True,
    offload_checkpoints: bool = False,
    key: bytes | None = None,
    projections: Projections | None = None,
) -> ClippingHandle:
    """Instrument a model in place, so that the norms of its per-record gradients can be had and clipped.

    Attach the whole model: parameters outside of it are not protected. The first dimension of each trainable layer's
    input must be the record, in the order of the losses; `check_isolation` tries it.

    Every module with a trainable parameter changes its class (and back, by `ClippingHandle.detach`); names, parameters,
    state dict, hooks and `isinstance` stay. Freeze what is not to be trained BEFORE. Under a DPRCModule the library
    calls this itself.

    Estimators: ``hutchinson`` sketches every matrix (vectors are exact); ``exact`` computes every norm; ``auto``
    computes a matrix [n0, n1] exactly where that takes no more memory than its sketch, n0 * n1 <= k * (n0 + n1), and
    sketches the others: a rule of the weight's shape alone, because a rule that looked at the batch would let one
    record decide how another one's norm is had. ``hutchpp`` takes k directions of each gradient exactly and sketches
    what is left (`dprc_lightning.sketch.hutchpp`), and computes a matrix with an axis of at most k exactly: estimates
    far closer to the norm for four times the work of a sketch and the same epsilon; with Gaussian P alone.

    Projections: ``gaussian``, or ``rademacher``: entries +-1/sqrt(k), kept as bits. P then takes a thirty-second of the
    memory; epsilon takes more noise, and is NOT certified (`dprc_lightning.accounting`). Tell the accountant.

    Args:
        model: Any module whose trainable parameters all lie in supported layers.
        estimator: See above.
        sketch_dim: k, columns of P.
        projection: Distribution of P's entries, see above.
        seed: For tests only: a projection that somebody can predict can be cheated. Default: the operating system.
        unused: What a trainable parameter is that no loss reaches: ``error``, or ``zero``: it gets noise alone.
        on_nonfinite: A record whose gradient norm is NaN or infinite: ``raise``, or ``drop``: it gets factor 0 and
            changes nothing else, bit for bit.
        norm_slack: In [0, 1): by how much of itself a norm may be too small; max_grad_norm is lowered by it. Default: 0
            in float32, 2^-8 where layers run in bfloat16.
        check_isolation: Look in the first micro-batches whether each loss reaches the rows of its own record alone, and
            again where another dimension happens to equal the number of records; costs two backwards without weight
            gradients each time.
        projection_memory: GiB of P that are kept for a whole step, in the order of the parameters; the rest is made
            again at each use, the same bit for bit, at most 16 MiB at a time. None keeps all, 0 nothing.
        mlp_chunk: Run the MLP of each layer so many tokens at a time, a multiple of 512, and once more in each
            backward: between the passes it keeps its input alone. Under activation checkpointing at no more products,
            else at one more forward of the MLP in each backward. None runs it at once.
        lean_norms: Run Hugging Face's RMSNorms, frozen ones too, some tokens at a time: the same values, and between
            the passes they keep their input alone.
        offload_checkpoints: Keep the inputs of activation checkpoints in the host's memory (`dprc_lightning.offload`).
        key: 32 secret bytes for the projections, shared by all ranks; instead of `seed`.
        projections: A source of P of one's own, instead of `projection`, `seed` and `key`; for tests.

    Returns:
        The handle.

    Raises:
        InvalidArgumentError: A value out of range, an estimator or projection that is not available, or a flag that
            this model has no use for.
        UnsupportedModuleError: The trainable parameters that cannot be handled, each with the remedy; also a model
            that is attached already or compiled.
    """
    _check_arguments(estimator, sketch_dim, projection, unused, on_nonfinite, norm_slack)
    number = isinstance(projection_memory, int | float) and not isinstance(projection_memory, bool)
    if projection_memory is not None and not (number and 0.0 <= projection_memory < math.inf):
        raise InvalidArgumentError("projection_memory", projection_memory, "expected finite GiB >= 0, or None for all")
    for name, flag in (("lean_norms", lean_norms), ("offload_checkpoints", offload_checkpoints)):
        if not isinstance(flag, bool):
            raise InvalidArgumentError(name, flag, "expected True or False")
    if projections is None:
        if key is None:
            key = secrets.token_bytes(32) if seed is None else derive(bytes(32), "attach seed", seed)
        projections = PROJECTIONS[projection](key, sketch_dim)
    forget_tracing()
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UnsupportedModuleError("the model has no trainable parameter: set requires_grad=True on what to train")
    settings = Settings(
        estimator,
        sketch_dim,
        projection,
        unused,
        on_nonfinite,
        norm_slack,
        check_isolation,
        projection_memory,
        mlp_chunk,
        lean_norms,
        offload_checkpoints,
    )
    return ClippingHandle(model, projections, settings)


def _check_arguments(
    estimator: str, sketch_dim: int, projection: str, unused: str, on_nonfinite: str, norm_slack: float | None
) -> None:
    if estimator not in get_args(Estimator):
        raise InvalidArgumentError("estimator", estimator, f"expected one of {', '.join(get_args(Estimator))}")
    if projection not in get_args(Projection) or estimator == "hutchpp":
        # The accounting knows why.
        StepEvent(1.0, 1.0, 1, projection, estimator="hutchpp" if estimator == "hutchpp" else "hutchinson")
    if isinstance(sketch_dim, bool) or not isinstance(sketch_dim, int) or sketch_dim < 1:
        raise InvalidArgumentError("sketch_dim", sketch_dim, "expected an integer >= 1")
    if unused not in get_args(Unused):
        raise InvalidArgumentError("unused", unused, f"expected one of {', '.join(get_args(Unused))}")
    if on_nonfinite not in get_args(OnNonfinite):
        raise InvalidArgumentError("on_nonfinite", on_nonfinite, f"expected one of {', '.join(get_args(OnNonfinite))}")
    if norm_slack is not None and not 0.0 <= norm_slack < 1.0:
        raise InvalidArgumentError("norm_slack", norm_slack, "expected a value in [0, 1)")
