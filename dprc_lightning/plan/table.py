"""The rows of `dprc plan`: what each sketch_dim costs, and the noise that it needs or the epsilon that it leaves."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from torch import nn

from dprc_lightning.accounting import EpsilonBounds, StepEvent, calibrate_noise_multiplier, epsilon
from dprc_lightning.errors import AccountingResourceError, CalibrationError, InvalidArgumentError
from dprc_lightning.plan.costs import Batch, NormCosts, norm_costs


@dataclass(frozen=True)
class Mechanism:
    """What is fixed whatever k is.

    Attributes:
        delta: The target delta.
        sample_rate: q.
        steps: Logical steps that may be begun.
        epsilon: The target, to which the noise of each row is calibrated; None if the noise is given.
        noise_multiplier: sigma of all rows; None if epsilon is given.
        estimator: ``auto``, ``hutchinson`` or ``hutchpp``, of the rows with a k.
        projection: Distribution of P's entries.
        bound: Which law is accounted.
    """

    delta: float
    sample_rate: float
    steps: int
    epsilon: float | None = None
    noise_multiplier: float | None = None
    estimator: str = "auto"
    projection: str = "gaussian"
    bound: str = "best"


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        sketch_dim: k; None for exact norms throughout.
        costs: Of the norms.
        noise_multiplier: sigma, given or calibrated; None if none meets the target.
        epsilon: What it costs; None if the noise was calibrated to a target.
        certified: Whether the accounting is proved.
        problem: Why there are no numbers; None if there are.
    """

    sketch_dim: int | None
    costs: NormCosts
    noise_multiplier: float | None
    epsilon: EpsilonBounds | None
    certified: bool
    problem: str | None = None

    @property
    def name(self) -> str:
        """As sentences have it."""
        return "exact norms" if self.sketch_dim is None else f"k = {self.sketch_dim}"

    @property
    def price(self) -> float | None:
        """What privacy costs in this row, the less the better: the upper epsilon, or the noise if epsilon is given."""
        return self.noise_multiplier if self.epsilon is None else self.epsilon.upper


def all_costs(
    model: nn.Module,
    batch: Batch,
    sketch_dims: Sequence[int],
    mechanism: Mechanism,
    projection_memory: float | None = 1.0,
) -> list[NormCosts]:
    """The costs of exact norms, then of each k.

    Args:
        model: The whole model.
        batch: One micro-batch.
        sketch_dims: Each k.
        mechanism: Estimator and projection.
        projection_memory: GiB of P that are kept for a step; None for all.

    Returns:
        One entry more than `sketch_dims` has.
    """
    exact = norm_costs(model, batch, sketch_dim=1, estimator="exact", projection=mechanism.projection)
    sketched = [
        norm_costs(
            model,
            batch,
            sketch_dim=k,
            estimator=mechanism.estimator,
            projection=mechanism.projection,
            projection_memory=projection_memory,
        )
        for k in sketch_dims
    ]
    return [exact, *sketched]


def rows(
    sketch_dims: Sequence[int | None],
    costs: Sequence[NormCosts],
    mechanism: Mechanism,
    progress: Callable[[str], None] = lambda _: None,
) -> Iterator[Row]:
    """The rows, one by one, for each takes the accountant seconds.

    Guarantee: noise and epsilon are those of `dprc_lightning.accounting` for the k that the model really uses, so a run
    with a row's settings gets the row's numbers. The choice of k by this table looks at no data and costs no privacy.

    Args:
        sketch_dims: k of each row; None for exact norms.
        costs: Of each row.
        mechanism: What is fixed.
        progress: Called with what is about to be done.

    Yields:
        A row in the order of `sketch_dims`. Rows that are accounted alike are accounted once.
    """
    known: dict[int | None, tuple[float | None, EpsilonBounds | None, bool, str | None]] = {}
    for number, (sketch_dim, cost) in enumerate(zip(sketch_dims, costs, strict=True)):
        if cost.sketch_dim not in known:
            what = "exact norms" if cost.sketch_dim is None else f"k = {cost.sketch_dim}"
            progress(f"accounting {what} ({number + 1} of {len(costs)})")
            known[cost.sketch_dim] = _account(cost.sketch_dim, mechanism)
        yield Row(sketch_dim, cost, *known[cost.sketch_dim])


def _account(
    sketch_dim: int | None, mechanism: Mechanism
) -> tuple[float | None, EpsilonBounds | None, bool, str | None]:
    # Exact norms have no projection.
    projection = "gaussian" if sketch_dim is None else mechanism.projection
    certified = StepEvent(1.0, mechanism.sample_rate, sketch_dim, projection, mechanism.bound).certified
    try:
        if mechanism.noise_multiplier is not None:
            bounds = epsilon(
                noise_multiplier=mechanism.noise_multiplier,
                delta=mechanism.delta,
                sample_rate=mechanism.sample_rate,
                steps=mechanism.steps,
                sketch_dim=sketch_dim,
                projection=projection,
                bound=mechanism.bound,
            )
            return mechanism.noise_multiplier, bounds, certified, None
        assert mechanism.epsilon is not None
        sigma = calibrate_noise_multiplier(
            epsilon=mechanism.epsilon,
            delta=mechanism.delta,
            sample_rate=mechanism.sample_rate,
            steps=mechanism.steps,
            sketch_dim=sketch_dim,
            projection=projection,
            bound=mechanism.bound,
        )
        return sigma, None, certified, None
    except (CalibrationError, AccountingResourceError, InvalidArgumentError) as error:
        if isinstance(error, InvalidArgumentError) and error.name != "sketch_dim":
            raise
        # A k that cannot meet the target, or has too few columns, is no reason to leave out the others.
        return None, None, certified, str(error)
