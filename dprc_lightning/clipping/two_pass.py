"""The paper's way to clip: one backward for the norms, a second one for the sum of the clipped gradients.

The paper rescales the losses. Here the layers rescale the per-record gradients instead, where they form the weight
gradient: the same number, but both backwards then run on the same values and round alike, which in bfloat16 decides
whether the norm that was taken is that of what is added.

Cost beside a non-private step, in matrix products: 1 forward + 1 dX + (1 dX + 1 dW) = 4/3, and the sketch; the norm
pass computes no weight gradient. Source: arXiv 2605.24879, algorithm 1; the two passes go back to Lee & Kifer (arXiv
2009.03106) and Li et al. (arXiv 2110.05679).
"""

import math
import secrets
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch
from torch import Tensor, nn

from dprc_lightning.errors import (
    InvalidArgumentError,
    IsolationError,
    LossShapeError,
    NonFiniteRecordError,
    StepOrderError,
    UnclippedGradientError,
    UnsupportedModuleError,
    UnusedParameterError,
)
from dprc_lightning.layers import Mode, PassState

Unused = Literal["error", "zero"]
OnNonfinite = Literal["raise", "drop"]

MIN_GRAD_NORM = 1e-12
"""Squares of norms below 1e-19 are zero in float32: such a record is not clipped, which is right for any larger C."""

HALF_NORM_SLACK = 2.0**-8
"""Pays for a relative loss of norm of 2^-8 where layers run in bfloat16; on a CPU none was seen above 2e-7."""

_REENTRANT = (
    "no trainable layer of the attached model ran with gradients enabled: reentrant activation checkpointing "
    "(use_reentrant=True) cannot run the norm pass; set use_reentrant=False"
)


def clip_factors(norms: Tensor, max_grad_norm: float) -> Tensor:
    """``min(C / n_i, 1)``.

    Guarantee: given P, record i contributes a vector of norm at most ``C * ||g_i|| / n_i``, or ``||g_i|| <= C *
    ||g_i|| / n_i`` where n_i <= C: the sensitivity ``C * Z`` with ``Z = ||g_i|| / n_i`` that the accountant integrates
    over (arXiv 2605.24879). A record of norm 0 has factor 1 and gradient 0, never NaN.

    Args:
        norms: n_i, [B], float32, finite.
        max_grad_norm: C > 0.

    Returns:
        [B], float32, in (0, 1].
    """
    return (max_grad_norm / norms.clamp(min=torch.finfo(norms.dtype).tiny)).clamp(max=1.0)


def matmul_precision() -> str:
    """What float32 products are made in: torch's own word, ``highest`` for float32.

    torch raises where its old and its new settings were mixed; something lower may then be in force.

    Returns:
        torch's word, or where to look.
    """
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return "set by torch.backends.*.fp32_precision"


def check_losses(losses: Tensor) -> None:
    """Refuse anything but one connected loss per record.

    Args:
        losses: What the caller passed.

    Raises:
        LossShapeError: Not of shape [B], or without a graph.
    """
    if losses.ndim != 1:
        raise LossShapeError(
            f"losses of shape {tuple(losses.shape)}: one loss per record, shape [B], is needed; "
            'use reduction="none" and sum over a record\'s own positions only'
        )
    if losses.dtype not in (torch.float32, torch.float64):
        raise LossShapeError(
            f"losses are {losses.dtype}: multiplied there, a clip factor would be rounded up; make them float32"
        )
    if not losses.requires_grad:
        raise LossShapeError(
            "losses do not require grad: no trainable layer of the attached model took part in making them; "
            "run the forward with gradients enabled and after attach()"
        )


Around = Callable[[], AbstractContextManager[None]]
AnyRank = Callable[[bool], bool]


def norm_pass(state: PassState, losses: Tensor, unused: Unused = "error", around: Around = nullcontext) -> Tensor:
    """First backward: the norm of each record's gradient, over all trainable parameters together.

    Guarantee: record i's norm is a function of its own gradient and of P: every layer keeps the records apart, and the
    sum of the losses has record i's gradient as its i-th term.

    Args:
        state: The attached model's pass state.
        losses: [B], each a function of its own record alone.
        unused: What a trainable parameter is that no loss reaches: ``error``, or ``zero`` (a gradient of zero).
        around: Makes an engine's context for the backward.

    Returns:
        [B], float32. Every parameter's ``.grad`` is what it was before.

    Raises:
        LossShapeError: See `check_losses`; or a layer saw another batch size.
        UnsupportedModuleError: The model runs reentrant checkpointing.
        UnusedParameterError: Trainable parameters that no loss reaches.
        RuntimeError: Whatever else autograd has to say.
    """
    check_losses(losses)
    state.start_norms(losses.shape[0])
    try:
        _backward_to_anchors(state, losses, around)
        # Where several uses of a weight are squared, autocast would do it in half precision.
        with torch.autocast(losses.device.type, enabled=False):
            norms = state.finish_norms()
    finally:
        state.abort()
    if norms is None:
        raise LossShapeError("no trainable parameter of the attached model reaches the losses")
    # A micro-batch without a record reaches nothing in some layers.
    missing = state.unused() if unused == "error" and len(losses) else []
    if missing:
        raise UnusedParameterError(
            f"trainable parameter(s) {', '.join(map(repr, missing))}: no loss reaches them by their module's forward; "
            "freeze them, or set unused=zero (they get noise alone); if the module does run, then under reentrant "
            "checkpointing (set use_reentrant=False), or its weight is used outside of it (call the module)"
        )
    return norms


def _backward_to_anchors(state: PassState, losses: Tensor, around: Around) -> None:
    if not state.anchors:
        raise UnsupportedModuleError(_REENTRANT)
    try:
        # Lightning calls this under autocast, which would run the sketches in half precision.
        with around(), torch.autocast(losses.device.type, enabled=False):
            torch.autograd.grad(losses.sum(), list(state.anchors.values()), retain_graph=True, allow_unused=True)
    except RuntimeError as error:
        # torch has no type for it.
        if "heckpoint" in str(error) and "use_reentrant" in str(error):
            raise UnsupportedModuleError(_REENTRANT) from error
        raise


def isolation_pass(state: PassState, losses: Tensor, around: Around = nullcontext) -> None:
    """Does each loss reach the rows of its own record alone?

    A backward of a random half of the losses, then one of the other half; no layer may see a gradient in a row of the
    records that were left out. So a row that is not its record (a position, another record after a sort, one row for
    all) is found with a probability of one half at least.

    Args:
        state: The attached model's pass state.
        losses: [B], at least two.
        around: Makes an engine's context for each backward.

    Raises:
        IsolationError: A layer that mixes records.
        UnclippedGradientError: A parameter that the handle does not know reaches the losses.
    """
    check_losses(losses)
    names: list[str] = []
    # Of its own generator: what the model draws next must not change.
    order = torch.randperm(len(losses), generator=torch.Generator().manual_seed(secrets.randbits(60)))
    halves = order[: len(losses) // 2].to(losses.device), order[len(losses) // 2 :].to(losses.device)
    for own, others in (halves, halves[::-1]):
        state.start_isolation(len(losses), others)
        try:
            _backward_to_anchors(state, losses[own], around)
            names += state.mixing()
        finally:
            state.abort()
    if names:
        raise IsolationError(
            f"parameter(s) {', '.join(map(repr, dict.fromkeys(names)))}: a record's loss reaches another record's row "
            "in their layers, so their norms are not those of the records; the first dimension of each trainable "
            "layer's input must be the record, in the order of the losses, and each loss must be its own record's (no "
            "mean or normalisation over the batch, no sorting, positions as [1, T]) (found by check_isolation)"
        )
    strangers = [p for p in _leaves(losses) if isinstance(p, torch.nn.Parameter) and not state.is_known(p)]
    if strangers:
        raise UnclippedGradientError(
            f"{len(strangers)} parameter(s) outside of the attached model reach the losses (the first of shape "
            f"{tuple(strangers[0].shape)}): their gradients would not be clipped; attach the whole model, register its "
            "modules, or freeze them"
        )


def idle_isolation_pass(state: PassState, losses: Tensor, around: Around = nullcontext) -> None:
    """As many backwards as `isolation_pass`, for a rank that has nothing to look at while another one does.

    Args:
        state: The attached model's pass state.
        losses: [B].
        around: Makes an engine's context for each backward.
    """
    check_losses(losses)
    for _ in range(2):
        state.start_isolation(len(losses), torch.zeros(0, dtype=torch.int64))
        try:
            _backward_to_anchors(state, losses, around)
        finally:
            state.abort()


def _leaves(losses: Tensor) -> Iterator[Tensor]:
    """The leaf tensors whose gradients a backward would accumulate; not those inside of a checkpoint."""
    waiting, seen = [losses.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        waiting += [parent for parent, _ in node.next_functions]


def clipped_backward(
    state: PassState,
    losses: Tensor,
    norms: Tensor,
    *,
    max_grad_norm: float,
    weights: Tensor | None,
    scale: float,
    backward: Callable[[Tensor], object],
    on_nonfinite: OnNonfinite = "raise",
    norm_slack: float | None = None,
) -> Tensor:
    """Second backward: ``p.grad += scale * sum_i weights_i * clip_factor_i * grad_i``.

    Guarantee: each record contributes its own gradient times ``weights_i * min(C (1 - norm_slack) / n_i, 1)``. Where
    the norm of what is added exceeds the norm that was taken by a relative ``norm_slack`` at most, the sensitivity is
    the accountant's C * Z: the clipping pays for the slack, not the accountant. A record whose norm is not finite has
    factor 0 and no part in any sum; whether it has depends on that record alone.

    Args:
        state: The attached model's pass state.
        losses: [B], those of the norm pass.
        norms: [B], what it returned for them.
        max_grad_norm: C > 0.
        weights: [B] in [0, 1], or None for ones.
        scale: A public constant.
        backward: What runs the backward of the scalar; an engine's own, so that it reduces as it always does.
        on_nonfinite: What to do with a record whose norm is NaN or infinite: ``raise``, or ``drop`` it.
        norm_slack: See above, in [0, 1). None: 0 in float32, `HALF_NORM_SLACK` where a layer ran in bfloat16.

    Returns:
        The clip factors [B], float32.

    Raises:
        InvalidArgumentError: max_grad_norm or weights out of range.
        LossShapeError: norms or weights are not of the losses' shape.
        NonFiniteRecordError: A norm is NaN or infinite, and on_nonfinite is ``raise``.
        StepOrderError: A norm pass has not come before.
    """
    check_losses(losses)
    if not MIN_GRAD_NORM <= max_grad_norm < float("inf"):
        raise InvalidArgumentError("max_grad_norm", max_grad_norm, f"expected a finite value >= {MIN_GRAD_NORM}")
    if not math.isfinite(scale):
        raise InvalidArgumentError("scale", scale, "expected a finite number")
    for name, value in (("norms", norms), ("weights", weights)):
        if value is not None and value.shape != losses.shape:
            raise LossShapeError(f"{name} of shape {tuple(value.shape)} for losses of shape {tuple(losses.shape)}")
    norms = norms.detach().float()
    finite = torch.isfinite(norms)
    # A dummy (weight 0) is no record: whatever it gives is left out.
    bad = torch.nonzero(~finite if weights is None else ~finite & (weights > 0)).flatten().tolist()
    if on_nonfinite == "raise" and bad:
        raise NonFiniteRecordError(
            f"per-record gradient norm is NaN or infinite for record(s) {bad} of this micro-batch; nothing was "
            "accumulated; remove the records, or set on_nonfinite=drop"
        )
    if norm_slack is None:
        norm_slack = HALF_NORM_SLACK if state.half_precision else 0.0
    factors = clip_factors(norms.where(finite, 1.0), max_grad_norm * (1.0 - norm_slack)).where(finite, 0.0)
    if weights is not None:
        if not bool(((weights >= 0) & (weights <= 1)).all()):
            raise InvalidArgumentError(
                "weights", weights.tolist(), "expected values in [0, 1]: a larger one would exceed the sensitivity"
            )
        factors = factors * weights.to(factors)
    if state.mode is not Mode.IDLE:
        raise StepOrderError("clipped_backward() was called inside another pass")
    state.start_clipping(factors, scale, max_grad_norm)
    try:
        with torch.autocast(losses.device.type, enabled=False):
            # Not rescaled: see the top of this file.
            backward(losses.sum())
        state.check_clipping()
    except BaseException:
        # Whatever was accumulated may be unclipped: nothing is left behind for an optimizer step.
        for tracker in state.trackers.values():
            tracker.parameter.grad = None
            if tracker.stand_in is not None:
                tracker.stand_in.grad = None
        raise
    finally:
        state.abort()
    return factors


def accumulate_in_float32(parameter: nn.Parameter) -> None:
    """The sum of clipped gradients stays in float32 until the noise is in it.

    Guarantee: rounding the sum to bfloat16 BEFORE the noise moves it, for one more record, by more than that record's
    clipped norm; after the noise it is post-processing.

    Args:
        parameter: Any dtype.

    Raises:
        UnclippedGradientError: It holds a gradient in half precision.
        UnsupportedModuleError: This torch cannot.
    """
    if parameter.dtype is not torch.bfloat16:
        return
    if not hasattr(parameter, "grad_dtype"):
        raise UnsupportedModuleError(
            f"bfloat16 parameters need a torch whose gradients may have another dtype; {torch.__version__} has none "
            "(Tensor.grad_dtype); update torch, or keep float32 parameters and use bf16-mixed"
        )
    if parameter.grad is None:
        parameter.grad_dtype = torch.float32
    elif parameter.grad.dtype is not torch.float32:
        raise UnclippedGradientError(
            "a bfloat16 parameter holds a gradient in bfloat16 from an earlier step; call zero_grad(set_to_none=True) "
            "after each step"
        )
