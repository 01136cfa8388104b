"""What the ranks of a step send each other: collectives by kind and phase, with the sizes of what they carry."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dprc_lightning.timing import OTHER

# torch calls each by several names (`_allgather_base_`, `all_gather_into_tensor`). The longer ones come first.
_KINDS = {
    "allgather": "all_gather",
    "reducescatter": "reduce_scatter",
    "allreduce": "all_reduce",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "scatter": "scatter",
    "gather": "gather",
    "reduce": "reduce",
    "barrier": "barrier",
    "send": "send",
    "recv": "recv",
}
_NAMESPACES = {"c10d", "c10d_functional", "_c10d_functional", "_c10d_functional_autograd"}
_REDUCTIONS = {"reduce_scatter", "all_reduce", "reduce"}


@dataclass(frozen=True)
class Collective:
    """One call of a collective.

    Attributes:
        kind: ``all_gather``, ``reduce_scatter``, ``all_reduce``, ``broadcast``, ...
        phase: Where in the step.
        floating: Whether it carries floating-point numbers: parameters or gradients; else what ranks tell each other.
        sizes: Elements of each tensor that went in or came out.
        bytes: Of the whole that is gathered, reduced or sent, as one rank sees it: the larger of what goes in and what
            comes out. What goes over the wire depends on the backend's algorithm.
    """

    kind: str
    phase: str
    floating: bool
    sizes: tuple[int, ...]
    bytes: int

    @property
    def gathers(self) -> bool:
        """Whether it makes parameters whole again."""
        return self.floating and self.kind == "all_gather"

    @property
    def reduces(self) -> bool:
        """Whether it sums gradients, or other floating-point numbers, over the ranks."""
        return self.floating and self.kind in _REDUCTIONS


class CommunicationCounter(TorchDispatchMode):
    """Notes the collectives that this process takes part in, inside of the context.

    Every backend's calls (gloo, nccl) come through torch's dispatcher, those of DDP's reducer and of backward threads
    too, and none is made of others there: a backend that lacks a kind replaces it further below. So calls are counted
    as the engine makes them.

        with CommunicationCounter(lambda: module.clock.current) as counter:
            trainer.fit(module, datamodule)
        totals(counter.calls)

    Args:
        phase: Called at each collective.

    Attributes:
        phase: The same; whoever makes the module later sets it then.
        calls: All of them, in order.
    """

    def __init__(self, phase: Callable[[], str] = lambda: OTHER) -> None:
        super().__init__()
        self.phase = phase
        self.calls: list[Collective] = []

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operation; note it if it is a collective."""
        if any(issubclass(kind, DTensor) for kind in types):
            # Its own dispatch comes back here with the collectives that it makes.
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        kind = kind_of(func)
        if kind is not None:
            self._note(kind, [*args, *(kwargs or {}).values(), result])
        return result

    def _note(self, kind: str, values: Iterable[Any]) -> None:
        parts = [[leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)] for value in values]
        found = [tensor for part in parts for tensor in part]
        self.calls.append(
            Collective(
                kind,
                self.phase(),
                any(tensor.is_floating_point() for tensor in found),
                tuple(tensor.numel() for tensor in found),
                max((sum(t.numel() * t.element_size() for t in part) for part in parts), default=0),
            )
        )


def kind_of(operation: Any) -> str | None:
    """What kind of collective an operation is.

    Args:
        operation: As a dispatch mode sees it.

    Returns:
        The kind; of a collective that is not known here, its own name. None for any other operation.
    """
    if not isinstance(operation, torch._ops.OpOverload) or operation.namespace not in _NAMESPACES:
        return None
    name = operation._schema.name.split("::")[1].replace("_", "")
    if name.startswith(("wait", "wrap")):
        # They send nothing.
        return None
    return next((kind for part, kind in _KINDS.items() if part in name), name)


def totals(calls: Iterable[Collective]) -> dict[str, dict[str, dict[str, int]]]:
    """Calls and bytes by phase and kind.

    Args:
        calls: From a counter.

    Returns:
        Phase -> kind -> ``calls`` and ``bytes``; what carries no floating-point numbers is of kind ``control``.
    """
    found: dict[str, dict[str, dict[str, int]]] = defaultdict(lambda: defaultdict(lambda: {"calls": 0, "bytes": 0}))
    for call in calls:
        entry = found[call.phase][call.kind if call.floating else "control"]
        entry["calls"] += 1
        entry["bytes"] += call.bytes
    return {phase: dict(kinds) for phase, kinds in found.items()}
