"""A language model's head and its loss in one autograd Function, so that the logits [B, T, vocabulary] never exist.

Forward makes them `BLOCK_ROWS` tokens of one record at a time: loss, gradient of the hidden states, and what the norm
of the weight's gradient needs. The norm pass then computes no product at all, the clipped backward makes each block's
logits once more for the weight's gradient. Together that is as many products as of the head as a layer: 2 + 0 + 2
against 1 + 1 + 2. Source of fusing head and loss: Liger (arXiv 2410.10989); the split over the two passes is our own.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dprc_lightning.errors import LossShapeError, StepOrderError, UnsupportedModuleError
from dprc_lightning.layers.instrumentation import ATTRIBUTE, active, parameter_in_use
from dprc_lightning.layers.normed import HeadInput
from dprc_lightning.layers.tracker import ParameterTracker, Uses, terms_of
from dprc_lightning.layers.tracking import PassState
from dprc_lightning.layers.use import hand_over, interleaves, norms_of, wide_dtype
from dprc_lightning.sketch import BLOCK_ROWS, Factors, weighted_sum


@dataclass(frozen=True)
class TokenLoss:
    """The loss of one token, and how a record's tokens are put together.

    Attributes:
        targets: [B, T], int64: the label that each position predicts, ``ignore_index`` where nothing is to be learned.
        mean: Whether a record's loss is the mean over its own labels, else their sum.
        label_smoothing: Weight of the uniform distribution, as `torch.nn.functional.cross_entropy` has it.
        soft_cap: Logits are ``soft_cap * tanh(logits / soft_cap)``; None for as they are.
        ignore_index: The label that is left out.
    """

    targets: Tensor
    mean: bool = True
    label_smoothing: float = 0.0
    soft_cap: float | None = None
    ignore_index: int = -100


@dataclass(eq=False)
class _Tracked:
    """One parameter of the head: what the forward found for its norms, per record and before the losses' gradients."""

    tracker: ParameterTracker
    step: int
    terms: list[Tensor] = field(default_factory=list)
    now: list[Tensor] = field(default_factory=list)
    parts: list[Tensor] = field(default_factory=list)
    # As an autograd node's context has them, which can be asked for one parameter alone.
    seen: Tensor | None = None
    uses: Uses | None = None


class _Sums:
    """Of one record: the sum of its terms' norms, their count, the blocks that have any, and the functional."""

    def __init__(self, device: torch.device) -> None:
        self.terms = torch.zeros(3, device=device)
        self.functional = torch.zeros((), device=device)

    def add(self, sizes: Tensor, functional: Tensor) -> None:
        self.terms = self.terms + torch.stack(terms_of(sizes)).squeeze(1)
        self.functional = self.functional + functional.squeeze(0)

    @property
    def now(self) -> Tensor:
        return torch.stack([self.terms[0], self.functional])


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        anchor: Tensor | None,
        loss: TokenLoss,
        state: PassState | None,
        of_weight: ParameterTracker | None,
        of_bias: ParameterTracker | None,
        source: HeadInput,
    ) -> Tensor:
        tracked = {
            name: _Tracked(tracker, state.step)
            for name, tracker in (("weight", of_weight), ("bias", of_bias))
            if tracker is not None and state is not None
        }
        grad_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        matrix = weight.to(hidden.dtype)
        losses = []
        for i in range(hidden.shape[0]):
            found = hidden.new_zeros((), dtype=torch.float32)
            sums = {name: _Sums(hidden.device) for name in tracked}
            sketched: Tensor | None = None
            summed: Tensor | None = None
            for rows in _blocks(hidden.shape[1]):
                h = source.rows(i, rows)
                loss_sum, dz = _block(h, matrix, bias, loss, i, rows, gradient=any(ctx.needs_input_grad[:3]))
                found += loss_sum
                if dz is None:
                    continue
                if grad_hidden is not None:
                    torch.mm(dz, matrix, out=grad_hidden[i, rows])
                if of_weight is not None and state is not None:
                    use = Factors(dz.unsqueeze(0), h.unsqueeze(0), of_weight.matrix_shape)
                    sums["weight"].add(*_terms(of_weight, use))
                    part = of_weight.part(use, state.projections)
                    sketched = part if sketched is None else sketched.add_(part)
                if of_bias is not None:
                    sums["bias"].add(*_vector_terms(of_bias, dz))
                    part = dz.sum(0, dtype=wide_dtype(of_bias.parameter))
                    summed = part if summed is None else summed.add_(part)
            losses.append(found)
            for name, entry in tracked.items():
                entry.terms.append(sums[name].terms)
                entry.now.append(sums[name].now)
            if sketched is not None:
                tracked["weight"].parts.append(sketched)
            if summed is not None:
                tracked["bias"].parts.append(summed.unsqueeze(0))
        # Where head and bias are frozen the loss's own gradient is all that the backward needs.
        needed = (source.kept, weight, bias) if any(ctx.needs_input_grad[1:3]) else (None, None, None)
        ctx.save_for_backward(*needed, grad_hidden)
        ctx.loss, ctx.state, ctx.tracked, ctx.recipe = loss, state, tracked, source.recipe
        return torch.stack(losses) if losses else hidden.new_zeros(0, dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, grad_losses: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, kept = ctx.saved_tensors
        state: PassState | None = ctx.state
        grad_hidden = None
        if kept is not None:
            # In both passes they are ones, and a copy would be as large as all hidden states.
            ones = all(value == 1.0 for value in grad_losses.tolist())
            grad_hidden = kept if ones else kept * grad_losses.to(kept.dtype).view(-1, 1, 1)
        grad_weight, grad_bias = None, None
        if state is not None and ctx.tracked and state.isolating:
            for entry in ctx.tracked.values():
                state.look_at_others(entry.tracker, grad_losses.unsqueeze(1))
        elif state is not None and ctx.tracked and state.taking_norms:
            for entry in ctx.tracked.values():
                _add_norms(state, entry, grad_losses, hidden)
        elif any(ctx.needs_input_grad[1:3]):
            grad_weight, grad_bias = _weight_gradients(ctx, hidden, weight, bias, grad_losses)
        return grad_hidden, grad_weight, grad_bias, None, None, None, None, None, None


def _blocks(length: int) -> Iterator[slice]:
    for start in range(0, length, BLOCK_ROWS):
        yield slice(start, min(start + BLOCK_ROWS, length))


def _block(
    h: Tensor, matrix: Tensor, bias: Tensor | None, loss: TokenLoss, record: int, rows: slice, *, gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """Some tokens of one record.

    Args:
        h: [rows, d].
        matrix: [vocabulary, d], of h's dtype.
        bias: [vocabulary], or None.
        loss: What is made of them.
        record: Which record.
        rows: Which tokens.
        gradient: Whether the gradient is wanted.

    Returns:
        Their share of the record's loss, float32, and its gradient by the head's output [rows, vocabulary], in h's
        dtype as the layer's own output gradient would be; None if it is not wanted.
    """
    logits = F.linear(h, matrix, None if bias is None else bias.to(h.dtype))
    # Our own in any case: what follows works in place.
    z = logits if logits.dtype is torch.float64 else logits.float()
    capped = None
    if loss.soft_cap is not None:
        capped = z.div_(loss.soft_cap).tanh_()
        z = capped * loss.soft_cap
    targets = loss.targets[record, rows]
    kept = targets != loss.ignore_index
    count = (loss.targets[record] != loss.ignore_index).sum().clamp(min=1) if loss.mean else 1
    share = kept.to(z.dtype) / count
    chosen = targets.clamp(min=0).unsqueeze(1)
    normaliser = z.logsumexp(1)
    epsilon, vocabulary = loss.label_smoothing, z.shape[1]
    per_token = normaliser - (1.0 - epsilon) * z.gather(1, chosen).squeeze(1)
    if epsilon:
        per_token = per_token - epsilon * z.mean(1)
    # Where, not times: an infinite logit of a token that is left out must not be NaN.
    total = torch.where(kept, per_token * share, 0.0).sum().float()
    if not gradient:
        return total, None
    dz = z.sub_(normaliser.unsqueeze(1)).exp_()
    dz.scatter_add_(1, chosen, torch.full_like(chosen, -(1.0 - epsilon), dtype=dz.dtype))
    if epsilon:
        dz.sub_(epsilon / vocabulary)
    if capped is not None:
        dz.mul_(capped.square_().neg_().add_(1.0))
    dz = dz.mul_(share.unsqueeze(1)).masked_fill_(~kept.unsqueeze(1), 0.0)
    return total, dz.to(h.dtype)


def _terms(tracker: ParameterTracker, use: Factors) -> tuple[Tensor, Tensor]:
    return norms_of(use.left, -1) * norms_of(use.right, -1), tracker.functional(use.left, use.right)


def _vector_terms(tracker: ParameterTracker, dz: Tensor) -> tuple[Tensor, Tensor]:
    return norms_of(dz, -1).unsqueeze(0), tracker.vector_functional(dz.float().sum(0, keepdim=True))


def _add_norms(state: PassState, entry: _Tracked, grad_losses: Tensor, hidden: Tensor) -> None:
    """Norm pass: what the forward found, times the losses' gradients, in which all of it is linear."""
    tracker = entry.tracker
    if tracker.estimator != "exact" and entry.step != state.step:
        raise StepOrderError(
            f"module {tracker.modules[0]!r}: causal_lm_losses sketches in the forward, and norms() began another step "
            "since; call begin_step() before the forward"
        )
    entry.uses = state.uses_of(entry, tracker)
    factor = grad_losses.float()
    if entry.parts:
        terms, now = torch.stack(entry.terms, dim=1), torch.stack(entry.now, dim=1)
    else:
        # A micro-batch without a record: its use is counted all the same.
        terms, now = (hidden.new_zeros((rows, 0), dtype=torch.float32) for rows in (3, 2))
        entry.parts.append(_nothing(tracker, state, hidden))
    tracker.merge_terms(terms[0] * factor.abs(), terms[1], terms[2])
    state.witness(entry, tracker, hidden, torch.stack([now[0] * factor.abs(), now[1] * factor]))
    part = torch.cat(entry.parts)
    part = part * factor.to(part.dtype).view(-1, *[1] * (part.ndim - 1))
    state.accumulate(tracker.add_vector(part.float()) if tracker.kind == "vector" else tracker.add_part(part))


def _nothing(tracker: ParameterTracker, state: PassState, hidden: Tensor) -> Tensor:
    """What no record adds."""
    if tracker.kind == "vector":
        return hidden.new_zeros((0, *tracker.shape))
    left, right = (hidden.new_zeros((0, 1, size)) for size in tracker.matrix_shape)
    return tracker.part(Factors(left, right, tracker.matrix_shape), state.projections)


def _weight_gradients(
    ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, grad_losses: Tensor
) -> tuple[Tensor | None, Tensor | None]:
    """Clipped backward, or a backward that is none of ours: each block's logits once more, and the sums."""
    state: PassState | None = ctx.state
    tracked: dict[str, _Tracked] = ctx.tracked if state is not None and not state.idle else {}
    for entry in tracked.values():
        assert state is not None
        entry.uses = state.uses_of(entry, entry.tracker)
    scales = state.weights(hidden.shape[0]) if state is not None and tracked else [1.0] * hidden.shape[0]
    matrix, wide = weight.to(hidden.dtype), wide_dtype(weight)
    source = HeadInput(hidden, ctx.recipe)
    of_weight, of_bias = tracked.get("weight"), tracked.get("bias")
    total = of_weight.uses.total if of_weight is not None and of_weight.uses is not None else None
    if total is None and of_weight is not None and interleaves(scales, of_weight.uses):
        total = weight.new_zeros(weight.shape, dtype=torch.float64)
    total_bias = of_bias.uses.total if of_bias is not None and of_bias.uses is not None else None
    if total_bias is None and bias is not None and ctx.needs_input_grad[2]:
        # As `VectorUse` has it: one that is used again is float64 until it is complete.
        total_bias = torch.zeros_like(bias, dtype=wide if of_bias is None else torch.float64)
    nows: dict[str, list[Tensor]] = {name: [] for name in tracked}
    for i, gradient in enumerate(grad_losses.tolist()):
        # A record that is left out reaches no sum, also where its loss is infinite.
        scale = scales[i] * gradient if scales[i] != 0.0 else 0.0
        sums = {name: _Sums(hidden.device) for name in tracked}
        for rows in _blocks(hidden.shape[1]):
            h = source.rows(i, rows)
            _, dz = _block(h, matrix, bias, ctx.loss, i, rows, gradient=True)
            assert dz is not None
            use = Factors(dz.unsqueeze(0), h.unsqueeze(0), (dz.shape[1], h.shape[1]))
            if ctx.needs_input_grad[1]:
                total = weighted_sum(use, [scale], wide, total)
            if of_weight is not None:
                sums["weight"].add(*_terms(of_weight.tracker, use))
            if total_bias is not None and scale != 0.0:
                total_bias.add_(dz.sum(0, dtype=wide), alpha=scale)
            if of_bias is not None:
                sums["bias"].add(*_vector_terms(of_bias.tracker, dz))
        for name in tracked:
            nows[name].append(sums[name].now * torch.tensor([abs(gradient), gradient], device=hidden.device))
    if total is None and ctx.needs_input_grad[1]:
        total = torch.zeros_like(weight, dtype=wide)
    for name, entry in tracked.items():
        assert state is not None
        now = torch.stack(nows[name], dim=1) if nows[name] else hidden.new_zeros((2, 0), dtype=torch.float32)
        state.witness(entry, entry.tracker, hidden, now)
    if of_weight is not None and of_weight.uses is not None:
        of_weight.uses.total = total
        total = hand_over(of_weight.tracker, of_weight.uses)
    if of_bias is not None and of_bias.uses is not None:
        of_bias.uses.total = total_bias
        total_bias = hand_over(of_bias.tracker, of_bias.uses)
    return total, total_bias


def head_losses(head: nn.Linear, hidden: Tensor, loss: TokenLoss) -> Tensor:
    """Per-record losses of a head, attached or not.

    Guarantee: that of `dprc_lightning.layers.linear` for a head that is attached. Each block's gradient is made by the
    same operations on the same shapes in the forward, whose norms are taken, and in the clipped backward, whose sum is
    released; no block holds tokens of two records.

    Args:
        head: A linear layer.
        hidden: [B, T, d], what the model calls its head with.
        loss: The loss of a token.

    Returns:
        [B], float32.

    Raises:
        LossShapeError: There is not one label for each hidden state.
        UnsupportedModuleError: The head's norms cannot be had in parts.
    """
    if hidden.shape[:-1] != loss.targets.shape:
        raise LossShapeError(
            f"causal_lm_losses: labels of shape {tuple(loss.targets.shape)} for hidden states of shape "
            f"{tuple(hidden.shape)}; give one label for each token of each record, and leave logits_to_keep out"
        )
    device_type = hidden.device.type
    if torch.is_autocast_enabled(device_type):
        hidden = hidden.to(torch.get_autocast_dtype(device_type))
    weight, bias = parameter_in_use(head, "weight"), parameter_in_use(head, "bias")
    assert weight is not None
    if not torch.is_grad_enabled():
        # Then no gradient is made beside the losses.
        hidden, weight, bias = hidden.detach(), weight.detach(), None if bias is None else bias.detach()
    state, of_weight, of_bias, anchor = None, None, None, None
    if ATTRIBUTE in head.__dict__:
        for name in ("weight", "bias"):
            found = active(head, name)
            if found is not None:
                state = found[0]
                of_weight, of_bias = (found[1], of_bias) if name == "weight" else (of_weight, found[1])
        if state is not None:
            anchor = state.anchor(hidden.device)
    if of_weight is not None and of_weight.estimator == "hutchpp":
        raise UnsupportedModuleError(
            f"module {of_weight.modules[0]!r}: estimator=hutchpp needs all logits at once; set estimator=hutchinson, "
            "or make the loss with causal_lm_loss(logits, labels)"
        )
    source = HeadInput(hidden.detach())
    if state is not None and state.normed is not None:
        # The final norm's output is its input and a few operations: as large as all hidden states, it need not stay.
        if state.normed.gave(hidden) and not torch.is_autocast_enabled(device_type):
            source = HeadInput(state.normed.x, state.normed.recipe)
        state.normed = None
    # In the passes autocast is off: the forward must round as they do.
    with torch.autocast(device_type, enabled=False):
        losses: Tensor = _HeadLoss.apply(hidden, weight, bias, anchor, loss, state, of_weight, of_bias, source)
    return losses


@contextmanager
def remembering_norms(head: nn.Module) -> Iterator[None]:
    """Inside, an attached model remembers its last norm, so that the head can make its input anew.

    Args:
        head: The model's head; one that is not attached changes nothing.

    Yields:
        Nothing.
    """
    carried = head.__dict__.get(ATTRIBUTE)
    if carried is None:
        yield
        return
    carried.state.remember_normed = True
    try:
        yield
    finally:
        carried.state.remember_normed, carried.state.normed = False, None
