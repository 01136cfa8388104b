"""Did all ranks run the model's parts in the same order? An engine that shards takes it for granted."""

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn


class CallOrder:
    """The order of one logical step on this rank: which modules ran, and for which gradients came.

    Engines that shard issue a collective as a module runs, or as a gradient comes, and pair the ranks' collectives by
    their order alone. Two layers of one size that run in another order on one rank, because its records say so, are
    mixed up without a word: one layer's weights are made of two, and a record's gradient goes where another record of
    the batch decides.

    Guarantee: none by itself; a step in which the orders differ is found before its update.
    """

    def __init__(self) -> None:
        self._ran: list[str] = []
        self._hooks: list[Any] = []

    def follow(self, modules: Mapping[str, nn.Module]) -> None:
        """Note each forward of some modules, and no longer of others.

        Args:
            modules: Their names, the same on all ranks.
        """
        self.release()
        for name, module in modules.items():
            self._hooks.append(module.register_forward_pre_hook(self._noting(name)))

    def begin_step(self) -> None:
        """Forget the last step."""
        self._ran = []

    def release(self) -> None:
        """Take the hooks back."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def mark(self, arrivals: Iterable[str | None], unit_of: Mapping[str, str] | None = None) -> bytes:
        """What all ranks must have in common.

        Args:
            arrivals: Names of the parameters whose gradients came, in order; None where a backward begins.
            unit_of: Where the engine reduces several parameters together: each one's unit. Then the order within a unit
                is free, and so is whether a rank reaches all of it.

        Returns:
            A hash.
        """
        if unit_of is not None:
            arrivals = _first_of_each(unit_of[name] if name is not None else None for name in arrivals)
        return hashlib.blake2b(repr((self._ran, list(arrivals))).encode()).digest()

    def _noting(self, name: str) -> Any:
        def note(module: nn.Module, args: Any) -> None:
            self._ran.append(name)

        return note


def _first_of_each(units: Iterable[str | None]) -> list[str | None]:
    """Without repetitions between one None and the next."""
    kept: list[str | None] = []
    seen: set[str] = set()
    for unit in units:
        if unit is None:
            seen = set()
        elif unit in seen:
            continue
        else:
            seen.add(unit)
        kept.append(unit)
    return kept


def units_of(units: Mapping[str, nn.Module], parameters: Mapping[str, Tensor]) -> dict[str, str]:
    """Which unit holds which parameter: the innermost one.

    Args:
        units: By their paths.
        parameters: By their names.

    Returns:
        Name of the parameter -> path of its unit.
    """
    holder = {id(p): path for path in sorted(units, key=lambda path: path.count(".")) for p in units[path].parameters()}
    return {name: holder[id(p)] for name, p in parameters.items()}
