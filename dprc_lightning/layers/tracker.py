"""One trainable parameter in the two passes: what arrived for its norm, and what its layers produced."""

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from dprc_lightning.errors import StepOrderError
from dprc_lightning.sketch import Factors, Projections, sketch, squared_norms
from dprc_lightning.sketch.hutchinson import Side

Kind = Literal["matrix", "vector"]
ParameterEstimator = Literal["exact", "hutchinson"]


ROUNDING = 2.0**-20
"""Floor of a norm, as a share of the sum of its terms' norms.

Guarantee: where a record's positions nearly cancel, the float32 weight gradient keeps rounding of about 1e-8 times
S = sum_t ||left_t|| ||right_t||, while the norm could be 0 and the factor 1: the record would move the sum by far more
than C. With n_hat^2 + (ROUNDING * S)^2 in place of n_hat^2, the rounding that is let through stays near 0.01 C. The
floor depends on the record alone and only enlarges the norm, so the accounting holds; where S is below a hundred times
the norm it changes the norm by less than 1e-8. That the sum of a real contribution and its rounding exceeds C * Z by no
more than about 1e-4 of C is an estimate, not a proof, and is not charged.
"""

HALF_ROUNDING = 2.0**-9
"""The floor's share where layers run in bfloat16 on a device whose kernels may add up in another order each time.

Half a unit in the last place of bfloat16. Both passes compute the same output gradients with the same operations; on a
CPU, and under ``torch.use_deterministic_algorithms(True)``, bit for bit. Elsewhere single elements may be rounded to
the neighbouring number in one pass, and where positions cancel the norm pass would not see it. For 4096 positions that
do not cancel the floor adds less than 1 % to the norm. It is an estimate and was not measured on a GPU.
"""


@dataclass(eq=False)
class ParameterTracker:
    """One trainable parameter: how its per-record gradient norm is had, and what arrived for it in this pass.

    Attributes:
        name: First name in ``model.named_parameters()``: part of the key of P.
        parameter: The parameter itself.
        kind: ``matrix`` (two factors) or ``vector`` (its per-record gradient is small and summed as it is).
        estimator: ``exact`` or ``hutchinson``.
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
    _expected: int = 0
    _sum: Tensor | None = None
    _uses: list[Factors] = field(default_factory=list)
    _produced_sum: Tensor | None = None
    _produced_size: Tensor | None = None
    _probe: tuple[Tensor, Tensor] | None = None
    _terms: Tensor | None = None

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """A matrix parameter as (n0, n1): a convolution's kernel counts as its second axis."""
        shape = self.parameter.shape
        return shape[0], shape[1:].numel()

    def start(self) -> None:
        """Begin a norm pass: uses counted in the forward are now expected, and counting starts anew."""
        self._expected, self.forward_uses = self.forward_uses, 0
        self.clear()
        self.contributions = 0

    def clear(self) -> None:
        """Drop everything that was kept for the squared norm."""
        self._sum = self._terms = None
        self._uses = []
        self._produced_sum = self._produced_size = None

    def add_terms(self, sizes: Tensor) -> None:
        """Add the norms of one use's terms, summed over its positions; uses of a tied weight add before squaring.

        Args:
            sizes: [B], float32.
        """
        self._terms = sizes if self._terms is None else self._terms + sizes

    def squared_floor(self, share: float) -> Tensor | None:
        """``(share * S)^2`` of each record, [B], float32; None if nothing arrived.

        Args:
            share: `ROUNDING` or `HALF_ROUNDING`.

        Returns:
            The square of the floor.
        """
        return None if self._terms is None else (share * self._terms).square()

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
        total, _ = self._fingerprint(gradient)
        if self._produced_sum is None or self._produced_size is None:
            return torch.ones_like(total, dtype=torch.bool)
        # Rounding stays below 1e-5; a foreign gradient of a thousandth of the layers' own is seen.
        return (total - self._produced_sum).abs() > 1e-3 * self._produced_size + 1e-30

    def _fingerprint(self, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """A linear functional with random coefficients, and the norm that bounds its rounding.

        A plain sum would not do: the gradient of a softmax sums to zero over the vocabulary.

        Args:
            gradient: Of the parameter's shape.

        Returns:
            u^T G v and ||G||_F, scalars.
        """
        matrix = gradient.detach().reshape(gradient.shape[0] if gradient.ndim else 1, -1)
        if self._probe is None or self._probe[0].device != matrix.device:
            # Public and fixed on purpose: this finds mistakes, it keeps no secret.
            generator = torch.Generator().manual_seed(0)
            draws = [torch.randn(n, generator=generator).to(matrix) for n in matrix.shape]
            self._probe = (draws[0], draws[1])
        return (matrix @ self._probe[1]) @ self._probe[0], torch.linalg.vector_norm(matrix)

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
            Squared norms [B], float32, if they are complete already, else None.
        """
        complete = self._arrived()
        if self.estimator == "exact":
            if complete:
                return squared_norms([use])
            self._uses.append(use)
            return None
        projection = projections.matrix(self.name, self.matrix_shape[self.side], use.right.device)
        return self._add(sketch(use, projection, self.side), complete)

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
            Squared norms [B], float32, or None if nothing was kept.
        """
        squared = None
        if self._uses:
            squared = squared_norms(self._uses)
        elif self._sum is not None:
            squared = self._sum.square().flatten(1).sum(1)
        self.clear()
        return squared
