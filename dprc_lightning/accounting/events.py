"""One step of DP-SGD as the accountant and the ledger see it: the mechanism, and nothing that does not matter to it."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any

from dprc_lightning.accounting import _validation
from dprc_lightning.accounting.law import (
    EnvelopeOfLaw,
    ExactLaw,
    GaussianConvexLaw,
    GaussianEnvelopeLaw,
    Order,
    SensitivityLaw,
)
from dprc_lightning.accounting.own_law import require_law
from dprc_lightning.accounting.rademacher import RademacherLaw, SignPairLaw
from dprc_lightning.accounting.slack import CONVEX_MIN_NOISE_MULTIPLIER
from dprc_lightning.errors import InvalidArgumentError

PROJECTIONS = ("gaussian", "rademacher")
BOUNDS = ("best", "convex", "envelope")
ESTIMATORS = ("hutchinson", "hutchpp")
ADD_OR_REMOVE_ONE = "add_or_remove_one"

_SPARSE = (
    "cannot be certified: a sparse hash maps (1, 1) / sqrt(2) to zero with probability 1 / (2 sketch_dim); "
    "use 'gaussian'"
)
_NO_PROJECTION = {"countsketch": _SPARSE, "count_sketch": _SPARSE, "sparse": _SPARSE}


@dataclass(frozen=True)
class StepEvent:
    """The mechanism of one logical step: a Poisson sample, clipped per record, summed, and noised once.

    Guarantee: the accountant's numbers hold for add/remove-one adjacency if

    * each record enters the step independently with probability ``sample_rate``, a declared constant;
    * its clipped gradient is a function of the record, the parameters, the projection and the record's own randomness
      only: not of other records, nor of its position in a batch;
    * the projection is drawn afresh for each logical step, independent of parameters, data and noise, with exactly
      ``sketch_dim`` columns of entries with variance ``1 / sketch_dim``, and shared by all records of the step; it may
      be public (arXiv 2605.24879);
    * the factor never exceeds max_grad_norm / n_hat, and a record without gradient adds nothing;
    * noise of standard deviation ``noise_multiplier * max_grad_norm`` is added once to the sum.

    Where `certified` is False they hold only as far as the law of the estimator does.

    Attributes:
        noise_multiplier: sigma > 0: standard deviation of the noise on the sum over the clipping norm.
        sample_rate: q in (0, 1]: the probability with which each record is drawn.
        sketch_dim: k >= 1, the number of columns really drawn; None: every norm is exact.
        projection: Distribution of the projection's entries: "gaussian", or "rademacher" (signs, one bit each), whose
            law is not certified (`dprc_lightning.accounting.rademacher`) and needs more columns or more noise.
        bound: "convex" is tighter and proved for noise_multiplier >= 12^(-1/2); "envelope" is the paper's; "best" is
            the smaller of the two. A Rademacher sketch has only the convex order.
        estimator: "hutchinson", or "hutchpp" with ``sketch_dim`` columns in its head and as many, independent of them,
            in its tail: the upper bound is the same, but a rank-one gradient is captured exactly, so that the lower
            bound is that of exact norms. Proved for a Gaussian projection only.
        norm_slack: Largest relative under-estimate of a norm by arithmetic, in [0, 1): it multiplies Z by
            1 / (1 - norm_slack). 0 for norms accumulated in float32 and floored.
        neighboring_relation: Only "add_or_remove_one" is covered.
        law: A law of one's own in place of ``sketch_dim``; such an event cannot be written to a ledger.
    """

    noise_multiplier: float
    sample_rate: float
    sketch_dim: int | None = None
    projection: str = "gaussian"
    bound: str = "best"
    estimator: str = "hutchinson"
    norm_slack: float = 0.0
    neighboring_relation: str = ADD_OR_REMOVE_ONE
    law: SensitivityLaw | None = None

    def __post_init__(self) -> None:
        """Validates every field and stores plain Python numbers.

        Raises:
            InvalidArgumentError: If a value cannot be used; it names the field.
        """
        store = object.__setattr__  # the dataclass is frozen
        store(self, "noise_multiplier", _validation.noise_multiplier("noise_multiplier", self.noise_multiplier))
        store(self, "sample_rate", _validation.sampling_rate("sample_rate", self.sample_rate))
        if self.sketch_dim is not None:
            store(self, "sketch_dim", _validation.integer("sketch_dim", self.sketch_dim, 1))
        if not isinstance(self.projection, str) or self.projection not in PROJECTIONS:
            remedy = "its law is not known; use 'gaussian' or 'rademacher'"
            raise InvalidArgumentError("projection", self.projection, _NO_PROJECTION.get(str(self.projection), remedy))
        _validation.choice("bound", self.bound, BOUNDS)
        _validation.choice("estimator", self.estimator, ESTIMATORS)
        if self.projection == "rademacher":
            self._validate_rademacher()
        slack = self.norm_slack
        if isinstance(slack, bool) or not isinstance(slack, Real) or not 0 <= float(slack) < 1:
            raise InvalidArgumentError("norm_slack", slack, "must lie in [0, 1)")
        store(self, "norm_slack", float(slack))
        relation = self.neighboring_relation
        if not isinstance(relation, str) or relation != ADD_OR_REMOVE_ONE:
            raise InvalidArgumentError(
                "neighboring_relation",
                self.neighboring_relation,
                f"only {ADD_OR_REMOVE_ONE!r} is covered; replace-one needs its own proof (doubling epsilon by group "
                "privacy also multiplies delta)",
            )
        if self.law is not None:
            require_law("law", self.law)
            if self.sketch_dim is not None:
                raise InvalidArgumentError("law", self.law, "give either a law or sketch_dim, not both")
            if self.bound == "envelope" and self.law.order is Order.CONVEX_ALONE:
                remedy = "a law in convex order alone bounds no probability; use bound='best' or 'convex'"
                raise InvalidArgumentError("bound", self.bound, remedy)
        if self.bound == "convex" and self.convex_law().order is Order.CONVEX and not self.convex_is_proved:
            raise InvalidArgumentError(
                "noise_multiplier",
                self.noise_multiplier,
                f"bound='convex' is proved from {CONVEX_MIN_NOISE_MULTIPLIER:.4f} on (norm_slack included); "
                "use bound='best' or 'envelope'",
            )

    def _validate_rademacher(self) -> None:
        if self.sketch_dim is None and self.law is None:
            remedy = "needs a sketch: give sketch_dim, or use projection='gaussian' for exact norms"
            raise InvalidArgumentError("projection", self.projection, remedy)
        if self.bound == "envelope":
            remedy = "projection='rademacher' has no envelope, only its convex order; use bound='best' or 'convex'"
            raise InvalidArgumentError("bound", self.bound, remedy)
        if self.estimator == "hutchpp":
            # Its head's share of the norm depends on the projection; with signs no law was proved for what is left.
            remedy = "is proved for projection='gaussian' only; use it, or estimator='hutchinson'"
            raise InvalidArgumentError("estimator", self.estimator, remedy)

    @property
    def certified(self) -> bool:
        """Whether the law of the estimator is proved: not for a Rademacher sketch, nor for a law that says so."""
        return self.convex_law().certified

    @property
    def effective_noise_multiplier(self) -> float:
        """The noise multiplier times (1 - norm_slack): what multiplies Z divides the noise."""
        return self.noise_multiplier * (1.0 - self.norm_slack)

    @property
    def convex_is_proved(self) -> bool:
        """Whether the noise is large enough for the convex order."""
        return self.effective_noise_multiplier >= CONVEX_MIN_NOISE_MULTIPLIER

    def convex_law(self) -> SensitivityLaw:
        """Returns the tightest law of the estimator: the one in convex order, where there is a sketch."""
        if self.law is not None:
            return self.law
        if self.sketch_dim is None:
            return ExactLaw()
        return RademacherLaw(self.sketch_dim) if self.projection == "rademacher" else GaussianConvexLaw(self.sketch_dim)

    def envelope_law(self) -> SensitivityLaw:
        """Returns the law in stochastic order; where there is none, for Rademacher, the same as `convex_law`."""
        if self.law is not None:
            return EnvelopeOfLaw(self.law) if self.law.order is Order.CONVEX else self.law
        if self.sketch_dim is None or self.projection == "rademacher":
            return self.convex_law()
        return GaussianEnvelopeLaw(self.sketch_dim)

    def attained_law(self) -> SensitivityLaw | None:
        """Returns a law that some record's gradient really meets, for the lower bound; None if none is known."""
        if self.law is not None:
            return self.law if self.law.attained else None
        if self.sketch_dim is None or self.estimator == "hutchpp":
            return ExactLaw()
        return SignPairLaw(self.sketch_dim) if self.projection == "rademacher" else GaussianConvexLaw(self.sketch_dim)

    def to_dict(self) -> dict[str, Any]:
        """The event as plain JSON values, for the ledger.

        Returns:
            One entry per field, except ``law``.

        Raises:
            InvalidArgumentError: If the event has a law of its own, which no file can hold.
        """
        if self.law is not None:
            raise InvalidArgumentError("law", self.law, "an event with a law of one's own cannot be written")
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "law"}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "StepEvent":
        """The event that `to_dict` wrote; validated again.

        Args:
            values: One entry per field; fields with a default may be missing.

        Returns:
            The event.

        Raises:
            InvalidArgumentError: If an entry is unknown, missing or cannot be used.
        """
        known = {field.name for field in fields(cls)} - {"law"}
        for name in values:
            if name not in known:
                raise InvalidArgumentError(str(name), values[name], f"unknown field; known: {', '.join(sorted(known))}")
        for name in ("noise_multiplier", "sample_rate"):
            if name not in values:
                raise InvalidArgumentError(name, None, "is missing")
        return cls(**values)


def validate_delta(delta: Any) -> float:
    """A delta in (0, 1), refused by name otherwise.

    Args:
        delta: What was passed.

    Returns:
        The value as a float.
    """
    return _validation.open_unit_float("delta", delta)


def validate_steps(steps: Any, minimum: int = 0, name: str = "steps") -> int:
    """A number of steps, refused by name if it is no integer or too small.

    Args:
        steps: What was passed.
        minimum: The smallest accepted value.
        name: The argument as the caller wrote it.

    Returns:
        The value as an int.
    """
    return _validation.integer(name, steps, minimum)
