"""What every strategy with several processes shares: how its ranks tell each other something."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor

from dprc_lightning.strategies import collectives
from dprc_lightning.strategies.private import PrivateStrategy

T = TypeVar("T")


class ManyRanks(PrivateStrategy):
    """Mixed into a Lightning strategy with a process group: the collectives of `PrivateStrategy`."""

    global_rank: Any
    root_device: Any
    broadcast: Any

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
