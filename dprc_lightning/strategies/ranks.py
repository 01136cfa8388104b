"""What every strategy with several processes shares: how its ranks tell each other something."""

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

from torch import Tensor

from dprc_lightning.errors import UnsupportedModuleError
from dprc_lightning.strategies import collectives
from dprc_lightning.strategies.order import CallOrder
from dprc_lightning.strategies.private import PrivateStrategy

T = TypeVar("T")


def timeout_argument(seconds: float | timedelta | None) -> dict[str, Any]:
    """How Lightning's strategies take a time limit: in a type that no YAML file has.

    Args:
        seconds: How long a collective may wait; None for the default.

    Returns:
        Keyword arguments.
    """
    if seconds is None:
        return {}
    return {"timeout": seconds if isinstance(seconds, timedelta) else timedelta(seconds=seconds)}


class ManyRanks(PrivateStrategy):
    """Mixed into a Lightning strategy with a process group: the collectives of `PrivateStrategy`."""

    global_rank: Any
    root_device: Any
    broadcast: Any
    lightning_module: Any
    strategy_name: str

    def from_rank_zero(self, make: Callable[[], T]) -> T:
        """See `PrivateStrategy`."""
        return collectives.from_rank_zero(make, self.global_rank)

    def on_rank_zero(self, make: Callable[[], T]) -> T | None:
        """See `PrivateStrategy`."""
        return collectives.on_rank_zero(make, self.global_rank)

    def max_over_ranks(self, values: Sequence[int]) -> list[int]:
        """See `PrivateStrategy`."""
        return collectives.max_over_ranks(values, self.root_device)

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """See `PrivateStrategy`."""
        return collectives.sum_over_ranks(values, self.root_device)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """As Lightning's, once in each logical step."""
        self.noise_hook.check_may_step(self.lightning_module.updating)
        return super().optimizer_step(*args, **kwargs)  # type: ignore[misc]

    def refuse_changed(self, protected: Sequence[Tensor], reduced: set[int]) -> None:
        """An engine reduces the gradients of those parameters alone that trained when it took the model.

        Args:
            protected: The parameters that train in this step.
            reduced: Ids of those that the engine reduces.

        Raises:
            UnsupportedModuleError: They are others.
        """
        if {id(parameter) for parameter in protected} != reduced:
            raise UnsupportedModuleError(
                f"parameters were frozen or unfrozen after fit began: {self.strategy_name} reduces those that trained "
                "at its start; freeze and unfreeze before trainer.fit, or train with dprc_single"
            )

    def check_order(self, order: CallOrder, unit_of: Mapping[str, str] | None = None) -> None:
        """All ranks ran the same, in the same order: their collectives were of the same things. A collective.

        Args:
            order: What this rank ran since the step began.
            unit_of: See `CallOrder.mark`.

        Raises:
            UnsupportedModuleError: They did not.
        """
        handle = self.lightning_module.handle
        if handle is not None and not self.all_equal(order.mark(handle.arrivals, unit_of)):
            raise UnsupportedModuleError(
                f"strategy {self.strategy_name}: the ranks ran the model's layers in different orders (a forward that "
                "looks at its batch?), so that weights or gradients of two layers were mixed up; the step was not "
                "applied; run the same layers in the same order for each batch, or train with dprc_ddp"
            )
