"""One use of a parameter in one backward, whole or in parts along its positions.

Layers that make their activations anew, some tokens at a time, have their factors in parts. What a part adds is linear
in the record's gradient, so the parts of a use add up before anything is squared, as the uses of a tied weight do.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dprc_lightning.layers.tracker import ParameterTracker, Uses
from dprc_lightning.sketch import Factors, weighted_sum

if TYPE_CHECKING:
    from dprc_lightning.layers.tracking import PassState


class MatrixUse:
    """Takes the parts of one use, then gives its gradient.

    Args:
        state: The pass.
        ctx: The autograd node's own context, which lives as long as the graph.
        tracker: The parameter, of shape [n0, ...].
        in_parts: Whether more than one part will come.
    """

    def __init__(self, state: "PassState", ctx: Any, tracker: ParameterTracker, *, in_parts: bool = True) -> None:
        self._state, self._ctx, self._tracker, self._in_parts = state, ctx, tracker, in_parts
        self._seen: Tensor | None = None
        self._whole: Factors | None = None
        self._sketch: Tensor | None = None
        self._total: Tensor | None = None
        self._output_gradient: Tensor | None = None
        self._uses = state.uses_of(ctx, tracker)

    def add(self, output_gradient: Tensor, left: Tensor, right: Tensor) -> None:
        """One part arrived.

        Args:
            output_gradient: [B, ...], as autograd gave it, or what was made of it.
            left: [B, ..., n0] floating, or ids [B, ...].
            right: [B, ..., n1] floating, n1 the product of the parameter's other axes.
        """
        state, tracker = self._state, self._tracker
        state.refuse_float16(tracker, output_gradient)
        if state.isolating:
            state.look_at_others(tracker, output_gradient)
            return
        use = state.factors(tracker, left, right)
        # Of the last part: the passes look at its dtype and device.
        self._output_gradient = output_gradient
        if not state.idle:
            sizes = norms_of(use.right, -1)
            if not use.one_hot:
                sizes = sizes * norms_of(use.left, -1)
            if state.taking_norms:
                tracker.add_terms(sizes)
            now = torch.stack([sizes.sum(1), tracker.functional(use.left, use.right)])
            self._seen = now if self._seen is None else self._seen + now
        if not state.taking_norms:
            total = self._total if self._uses is None else self._uses.total
            weights, wide = state.weights(use.right.shape[0]), wide_dtype(tracker.parameter)
            if total is None and interleaves(weights, self._uses, in_parts=self._in_parts):
                total = use.right.new_zeros(use.shape, dtype=torch.float64)
            total = weighted_sum(use, weights, wide, total)
            if self._uses is None:
                self._total = total
            else:
                self._uses.total = total
        elif self._in_parts:
            part = tracker.part(use, state.projections)
            self._sketch = part if self._sketch is None else self._sketch.add_(part)
        else:
            self._whole = use

    def finish(self) -> Tensor | None:
        """All parts have come.

        Returns:
            The weight gradient, of the parameter's shape and at least float32, of all its uses together with the last
            one; None before that, and in the norm pass.
        """
        state, tracker = self._state, self._tracker
        if state.isolating or self._output_gradient is None:
            return None
        if self._seen is not None:
            state.witness(self._ctx, tracker, self._output_gradient, self._seen)
        if state.taking_norms:
            if self._whole is not None:
                state.accumulate(tracker.add_factors(self._whole, state.projections))
            elif self._sketch is not None:
                state.accumulate(tracker.add_part(self._sketch))
            return None
        if self._uses is None:
            assert self._total is not None
            return self._total.view(tracker.shape).to(wide_dtype(tracker.parameter))
        return hand_over(tracker, self._uses)


def hand_over(tracker: ParameterTracker, uses: Uses) -> Tensor | None:
    """One more use has added its gradient to the buffer that all uses share.

    Args:
        tracker: The parameter.
        uses: Its uses; the buffer leaves with the last.

    Returns:
        The gradient of all uses, of the parameter's shape; None as long as others are to come.
    """
    uses.arrived += 1
    if uses.arrived < uses.count:
        return None
    total, uses.total = uses.total, None
    assert total is not None
    return tracker.produced(total.view(tracker.shape).to(wide_dtype(tracker.parameter)))


def interleaves(weights: Sequence[float], uses: Uses | None, *, in_parts: bool = False) -> bool:
    """Whether terms of other records come into a sum before one record's own are complete.

    Guarantee: then the sum must be float64. A record whose terms cancel may have partial sums of up to C / (6 * 2^-24)
    (the floor of its norm, `dprc_lightning.layers.tracker.rounding_share`, admits no larger ones), beside which float32
    would lose what the others add: their contributions, up to C each, would depend on that record. In float64 what is
    lost is 2^-29 of it. Where each record's terms come one after the other nothing can be lost so.

    Args:
        weights: One per record.
        uses: What the uses of the parameter share; None in a backward that is none of ours.
        in_parts: Whether a use comes in parts along its positions, each of all records.

    Returns:
        Whether they do.
    """
    several = sum(weight != 0.0 for weight in weights) > 1
    return several and (in_parts or (uses is not None and uses.count > 1))


class VectorUse:
    """Takes the parts of one use of a vector, or of any parameter whose per-record gradient is small, as `MatrixUse`.

    Args:
        state: The pass.
        ctx: The autograd node's own context, which lives as long as the graph.
        tracker: The parameter, of shape [*s].
    """

    def __init__(self, state: "PassState", ctx: Any, tracker: ParameterTracker) -> None:
        self._state, self._ctx, self._tracker = state, ctx, tracker
        self._seen: Tensor | None = None
        self._sizes: list[Tensor] = []
        self._per_record: Tensor | None = None
        self._total: Tensor | None = None
        self._output_gradient: Tensor | None = None
        self._uses = state.uses_of(ctx, tracker)

    def add(self, output_gradient: Tensor, per_position: Tensor) -> None:
        """One part arrived.

        Args:
            output_gradient: [B, ...], as autograd gave it.
            per_position: The parameter's gradient before any sum, [B, ..., *s]; summed over the positions in float32.
        """
        state, tracker = self._state, self._tracker
        state.refuse_float16(tracker, output_gradient)
        if state.isolating:
            state.look_at_others(tracker, output_gradient)
            return
        # Of the last part: the passes look at its dtype and device.
        self._output_gradient = output_gradient
        dims, wide = len(tracker.shape), wide_dtype(tracker.parameter)
        if state.idle:
            part = per_position.to(wide).sum_to_size(tracker.shape)
            self._total = part if self._total is None else self._total + part
            return
        state.check_batch(tracker, per_position, trailing=dims)
        positions = tuple(range(1, per_position.ndim - dims))
        part = per_position.sum(positions, dtype=wide) if positions else per_position.to(wide)
        entries = per_position.unsqueeze(-1) if dims == 0 else per_position
        sizes = norms_of(entries, tuple(range(entries.ndim - max(dims, 1), entries.ndim)))
        flat = sizes.flatten(1) if positions else sizes.unsqueeze(1)
        if state.taking_norms:
            # Looked at as a whole: where the parts are cut may depend on how many records there are.
            self._sizes.append(flat)
        now = torch.stack([flat.sum(1), tracker.vector_functional(part)])
        self._seen = now if self._seen is None else self._seen + now
        # However many parts there are: their sum adds no rounding.
        self._per_record = part.double() if self._per_record is None else self._per_record.add_(part)

    def finish(self) -> Tensor | None:
        """All parts have come.

        Returns:
            As `MatrixUse.finish`.
        """
        state, tracker = self._state, self._tracker
        if state.isolating or self._output_gradient is None:
            return None
        if self._per_record is None or self._seen is None:
            return self._total
        state.witness(self._ctx, tracker, self._output_gradient, self._seen)
        per_record, dims = self._per_record, len(tracker.shape)
        if state.taking_norms:
            tracker.add_terms(torch.cat(self._sizes, dim=1))
            value = per_record.float()
            state.accumulate(tracker.add_vector(value.unsqueeze(-1) if dims == 0 else value))
            return None
        weights = state.weights(per_record.shape[0])
        kept = [i for i, weight in enumerate(weights) if weight != 0.0]
        factors = torch.tensor([weights[i] for i in kept], dtype=per_record.dtype, device=per_record.device)
        chosen = per_record if len(kept) == len(weights) else per_record[kept]
        total = (factors.view(-1, *[1] * dims) * chosen).sum(0)
        assert self._uses is not None
        # Float64 by itself (`interleaves`): one record's vectors are small.
        self._uses.total = total if self._uses.total is None else self._uses.total.add_(total)
        return hand_over(tracker, self._uses)


def norms_of(value: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    """Norms along some axes, float32; the sum of squares is formed in float32 or better."""
    if value.dtype is torch.float64:
        return torch.linalg.vector_norm(value, dim=dim).float()
    return torch.linalg.vector_norm(value, dim=dim, dtype=torch.float32)


def wide_dtype(parameter: Tensor) -> torch.dtype:
    """What a parameter's gradients are summed in."""
    return torch.float64 if parameter.dtype is torch.float64 else torch.float32
