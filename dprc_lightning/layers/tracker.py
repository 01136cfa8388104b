"""One trainable parameter in the two passes: what arrived for its norm, and what its layers produced."""

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from dprc_lightning.errors import StepOrderError, UnsupportedModuleError
from dprc_lightning.sketch import (
    BLOCK_ROWS,
    Factors,
    Projections,
    head_name,
    hutchpp_squared_norms,
    sketch,
    squared_norms,
)
from dprc_lightning.sketch.hutchinson import Side

Kind = Literal["matrix", "vector"]
ParameterEstimator = Literal["exact", "hutchinson", "hutchpp"]


UNIT_ROUNDOFF = 2.0**-24
"""Of float32."""


def rounding_share(rows: Tensor, blocks: Tensor, *, may_flip: bool) -> Tensor:
    """The floor of a norm, as a share of S, the sum of its terms' norms.

    Guarantee: where a record's positions nearly cancel, the float32 sum keeps rounding e <= (m + blocks + 1) 2^-24 S
    with m = min(rows, BLOCK_ROWS) (`dprc_lightning.sketch.weighted_sum`), while the norm could be 0 and the factor 1.
    The floor F = 2 (m + blocks + 1) 2^-24 S is ADDED to the norm. What is added to the sum has norm at most f (||g|| +
    e), and f <= C / (n_hat + F), so it is at most C max(Z, e / F) with Z = ||g|| / n_hat of the accountant and e / F <=
    1/2; the rounding of n_hat itself is of the size of e and is paid by the other half. S, rows and blocks are the
    record's own, and so are the roundings that e counts: where terms of other records come in between, the sum is
    float64 (`dprc_lightning.layers.use.interleaves`). P's kind adds nothing to it: random signs share one magnitude
    that is rounded up, so they make no norm smaller (`dprc_lightning.sketch.RademacherMatrix`), and a product that is
    added up over P's row blocks has no longer sums than a single one (measured, one token over 131072 rows of either
    kind: n_hat is off by 5 x 2^-24 at most). For T positions with orthogonal terms of equal norm it adds sqrt(T) 2^-14
    of the norm: 0.02 % at T = 128, 0.4 % at 4096, 3 % at 131072; where terms point the same way it adds next to
    nothing.

    On a device whose kernels may add up in another order each time, layers in bfloat16 round single elements to the
    neighbouring number in one pass and not in the other, and the differences spread through the layers below. There the
    share is max(2^-9, 2^-5 / sqrt(rows)): an estimate from flips injected on a CPU, and no bound.

    Args:
        rows: Positions of each record whose term is not zero, [B].
        blocks: Blocks of `BLOCK_ROWS` that hold them, [B].
        may_flip: Whether layers ran in bfloat16 on a device without deterministic kernels.

    Returns:
        [B], float32.
    """
    share = 2.0 * (rows.clamp(max=BLOCK_ROWS) + blocks + 1.0) * UNIT_ROUNDOFF
    if may_flip:
        share = torch.maximum(share, (2.0**-5 / rows.clamp(min=1).sqrt()).clamp(min=2.0**-9))
    return share


def terms_of(sizes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What the floor of a norm needs of the norms of a record's terms.

    Args:
        sizes: [B, positions], float32.

    Returns:
        Their sum, how many are not zero, and how many blocks of `BLOCK_ROWS` have any: [B] each, float32.
    """
    blocks = torch.stack([(part > 0).any(1) for part in sizes.split(BLOCK_ROWS, dim=1)]).sum(0)
    return sizes.sum(1), (sizes > 0).sum(1).float(), blocks.float()


@dataclass(eq=False)
class Uses:
    """The uses of one parameter that one norm pass met; its clipped backward meets them again.

    The gradients of a tied weight go into one buffer, which the last of its uses hands to autograd.

    Attributes:
        count: How many the norm pass met.
        arrived: How many the clipped backward has met.
        total: Their gradient so far.
    """

    count: int = 0
    arrived: int = 0
    total: Tensor | None = None


@dataclass(eq=False)
class ParameterTracker:
    """One trainable parameter: how its per-record gradient norm is had, and what arrived for it in this pass.

    Attributes:
        name: First name in ``model.named_parameters()``: part of the key of P.
        parameter: The parameter that the optimizer steps: itself, or this rank's shard of it.
        shape: Of the whole parameter, when `attach` found it: a shard's own says something else.
        uses: Those of the last norm pass.
        stand_in: Under an engine that shards, the whole parameter, or the view, that the last forward saw in its place.
        kind: ``matrix`` (two factors) or ``vector`` (its per-record gradient is small and summed as it is).
        estimator: ``exact``, ``hutchinson`` or ``hutchpp``.
        side: The axis that P contracts; unused where exact.
        modules: Names of the modules that own it; more than one where tied.
        forward_uses: Uses seen in forwards since the last norm pass.
        contributions: Uses that reached the loss in the last norm pass.
    """

    name: str
    parameter: nn.Parameter
    kind: Kind
    estimator: ParameterEstimator
    side: Side
    modules: list[str] = field(default_factory=list)
    forward_uses: int = 0
    contributions: int = 0
    stand_in: Tensor | None = None
    uses: Uses = field(default_factory=Uses)
    _expected: int = 0
    _sum: Tensor | None = None
    _uses: list[Factors] = field(default_factory=list)
    _projections: Projections | None = None
    _produced_sum: Tensor | None = None
    _produced_size: Tensor | None = None
    _passed_sum: Tensor | None = None
    _probe: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = field(default_factory=dict)
    _terms: Tensor | None = None
    _rows: Tensor | None = None
    _blocks: Tensor | None = None

    def __post_init__(self) -> None:
        """Keep the shape."""
        self.shape = self.parameter.shape

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """A matrix parameter as (n0, n1): a convolution's kernel counts as its second axis."""
        shape = self.shape
        return shape[0], shape[1:].numel()

    @property
    def draws(self) -> dict[str, int]:
        """The projections that its norm needs: their names, as `Projections.matrix` has them, and their rows."""
        if self.estimator == "exact":
            return {}
        contracted, other = self.matrix_shape[self.side], self.matrix_shape[1 - self.side]
        head = {head_name(self.name): other} if self.estimator == "hutchpp" else {}
        return {self.name: contracted, **head}

    def start(self) -> None:
        """Begin a norm pass: uses counted in the forward are now expected, and counting starts anew."""
        self._expected, self.forward_uses = self.forward_uses, 0
        self.clear()
        self.contributions, self.uses = 0, Uses()

    def clear(self) -> None:
        """Drop everything that was kept for the squared norm."""
        self._sum = self._terms = self._rows = self._blocks = None
        self._uses, self._projections = [], None
        self._produced_sum = self._produced_size = self._passed_sum = None

    def add_terms(self, sizes: Tensor) -> None:
        """Add the norms of one use's terms; the uses of a tied weight add before anything is squared.

        Args:
            sizes: [B, positions], float32.
        """
        self.merge_terms(*terms_of(sizes))

    def merge_terms(self, terms: Tensor, rows: Tensor, blocks: Tensor) -> None:
        """Add what `terms_of` made of them.

        Args:
            terms: Sums of the norms, [B], float32.
            rows: How many are not zero, [B], float32.
            blocks: How many blocks of `BLOCK_ROWS` have any, [B], float32.
        """
        if self._terms is None or self._rows is None or self._blocks is None:
            self._terms, self._rows, self._blocks = terms, rows, blocks
        else:
            self._terms, self._rows, self._blocks = self._terms + terms, self._rows + rows, self._blocks + blocks

    def floor(self, *, may_flip: bool) -> Tensor | None:
        """The floor of each record's norm, [B], float32; None if nothing arrived.

        Args:
            may_flip: See `rounding_share`.

        Returns:
            The floor, to be added.
        """
        if self._terms is None or self._rows is None or self._blocks is None:
            return None
        return rounding_share(self._rows, self._blocks, may_flip=may_flip) * self._terms

    def functional(self, left: Tensor, right: Tensor) -> Tensor:
        """``u^T g_i v`` of each record's gradient, with the fixed random vectors of `produced`.

        Args:
            left: [B, T, n0] floating, or ids [B, T].
            right: [B, T, n1].

        Returns:
            [B], float32.
        """
        _, v = self._probes(right.device, right.dtype)
        u, _ = self._probes(left.device, left.dtype if left.is_floating_point() else torch.float32)
        # In the factors' own precision: no copy, and the same in both passes.
        on_left = left @ u if left.is_floating_point() else u[left]
        return (on_left.float() * (right @ v).float()).sum(1)

    def vector_functional(self, per_record: Tensor) -> Tensor:
        """The same of a vector's per-record gradients.

        Args:
            per_record: [B, *shape].

        Returns:
            [B], float32.
        """
        u, v = self._probes(per_record.device, torch.float32)
        matrices = per_record.float().reshape(per_record.shape[0], len(u), len(v))
        return (matrices @ v) @ u

    def produced(self, gradient: Tensor) -> Tensor:
        """Called with each weight gradient that a layer returns in the clipped backward.

        Args:
            gradient: Of the parameter's shape.

        Returns:
            The same tensor.
        """
        total, size = self._fingerprint(gradient)
        self._produced_sum = total if self._produced_sum is None else self._produced_sum + total
        self._produced_size = size if self._produced_size is None else self._produced_size + size
        return gradient

    def foreign(self, gradient: Tensor) -> Tensor:
        """Whether a gradient about to be accumulated is more than the layers produced.

        Args:
            gradient: The sum over all paths to the parameter.

        Returns:
            Scalar, bool.
        """
        return self._is_foreign(self._fingerprint(gradient)[0])

    def passed(self, gradient: Tensor) -> None:
        """Called with what passes through one view of the parameter; a module that ran twice may have seen two.

        Args:
            gradient: The sum over all paths to the view.
        """
        total, _ = self._fingerprint(gradient)
        self._passed_sum = total if self._passed_sum is None else self._passed_sum + total

    def foreign_views(self) -> Tensor | None:
        """Whether more passed through all views than the layers produced.

        Returns:
            Scalar, bool; None if nothing passed.
        """
        return None if self._passed_sum is None else self._is_foreign(self._passed_sum)

    def _is_foreign(self, total: Tensor) -> Tensor:
        if self._produced_sum is None or self._produced_size is None:
            return torch.ones_like(total, dtype=torch.bool)
        # What a single use produced arrives as it is; the sum of several is rounded. Not "greater than", which NaN
        # never is.
        share = 1e-6 if self.contributions == 1 else 3e-5
        return ~((total - self._produced_sum).abs() <= share * self._produced_size + 1e-30)

    def _probes(self, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        if (device, dtype) not in self._probe:
            # Public and fixed on purpose: this finds mistakes, it keeps no secret.
            generator = torch.Generator().manual_seed(0)
            shape = self.shape
            sizes = (shape[0] if shape else 1, shape[1:].numel())
            u, v = (torch.randn(n, generator=generator, dtype=torch.float32).to(device, dtype) for n in sizes)
            self._probe[device, dtype] = (u, v)
        return self._probe[device, dtype]

    def _fingerprint(self, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """A linear functional with random coefficients, and the norm that bounds its rounding.

        A plain sum would not do: the gradient of a softmax sums to zero over the vocabulary.

        Args:
            gradient: Of the parameter's shape.

        Returns:
            u^T G v and ||G||_F, scalars.
        """
        u, v = self._probes(gradient.device, gradient.dtype)
        matrix = gradient.detach().reshape(len(u), len(v))
        return (matrix @ v) @ u, torch.linalg.vector_norm(matrix)

    def _arrived(self) -> bool:
        """Count one contribution.

        Returns:
            Whether it may be squared at once: only a parameter with exactly one counted use can.

        Raises:
            StepOrderError: A second contribution to a parameter whose first was squared already.
        """
        self.contributions += 1
        if self._expected == 1 and self.contributions > 1:
            raise StepOrderError(
                f"parameter {self.name!r}: its forward was counted once but reaches the loss {self.contributions} "
                "times; call norms(losses) right after the forward that made the losses"
            )
        return self._expected == 1

    def add_factors(self, use: Factors, projections: Projections) -> Tensor | None:
        """Add one use of a matrix.

        Args:
            use: Its factors.
            projections: Where P comes from.

        Returns:
            Squared norms [B], float32 or float64, if they are complete already, else None.
        """
        complete = self._arrived()
        if self.estimator != "hutchinson":
            self._projections = projections
            if complete:
                return self._together([use])
            self._uses.append(use)
            return None
        return self._add(self.part(use, projections), complete)

    def part(self, use: Factors, projections: Projections) -> Tensor:
        """What a part of a use adds before anything is squared.

        Args:
            use: Its factors.
            projections: Where P comes from.

        Returns:
            [B, ..., ...], float32: a sketch, or each record's whole gradient where the norm is exact.

        Raises:
            UnsupportedModuleError: Hutch++ takes all factors of a record several times; it has no such parts.
        """
        if self.estimator == "hutchpp":
            raise UnsupportedModuleError(
                f"parameter {self.name!r}: estimator=hutchpp needs all tokens of its layer at once, and this layer "
                "makes them in parts; set estimator=hutchinson, or turn off the performance flag that cuts the layer"
            )
        if self.estimator == "exact":
            records = range(use.right.shape[0])
            return torch.stack([use.dense(i) for i in records]) if records else use.right.new_zeros(0, *use.shape)
        projection = projections.matrix(self.name, self.matrix_shape[self.side], use.right.device)
        return sketch(use, projection, self.side)

    def _together(self, uses: list[Factors]) -> Tensor:
        """Squared norms of what must not be squared use by use, [B]."""
        if self.estimator == "exact":
            return squared_norms(uses)
        assert self._projections is not None, "add_factors keeps it"
        device = uses[0].right.device
        tail, head = (self._projections.matrix(name, rows, device) for name, rows in self.draws.items())
        return hutchpp_squared_norms(uses, tail, head, self.side)

    def add_part(self, value: Tensor) -> Tensor | None:
        """Add one use that came in parts.

        Args:
            value: The sum over them of `part`.

        Returns:
            Squared norms [B], float32, if they are complete already, else None.
        """
        return self._add(value, self._arrived())

    def add_vector(self, per_record: Tensor) -> Tensor | None:
        """Add one use of a vector.

        Args:
            per_record: Its per-record gradients [B, ...], float32.

        Returns:
            Squared norms [B], float32, if they are complete already, else None.
        """
        return self._add(per_record, self._arrived())

    def _add(self, value: Tensor, complete: bool) -> Tensor | None:
        if complete:
            return value.square().flatten(1).sum(1)
        self._sum = value if self._sum is None else self._sum + value
        return None

    def finish(self) -> Tensor | None:
        """Square what was kept over several uses.

        Returns:
            Squared norms [B], float32 or float64, or None if nothing was kept.
        """
        squared = None
        if self._uses and self._sum is not None:
            # One use came whole, another in parts: both are the gradient itself where the norm is exact.
            records = range(len(self._sum))
            whole = [sum((use.dense(i) for use in self._uses), self._sum[i]) for i in records]
            squared = torch.stack(whole).square().flatten(1).sum(1) if whole else self._sum.flatten(1).sum(1)
        elif self._uses:
            squared = self._together(self._uses)
        elif self._sum is not None:
            squared = self._sum.square().flatten(1).sum(1)
        self.clear()
        return squared
