"""What the steps in a ledger cost: at the run's delta and others, per direction, and what a larger k would have saved.

Each row takes up to a second. They are kept for the process: figures that join the report later cost nothing more.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from dprc_lightning.accounting import Accountant, StepEvent
from dprc_lightning.errors import AccountingResourceError

History = tuple[tuple[StepEvent, int], ...]

_NAMES = ("lower", "estimate", "upper")


def bounds(spent: Sequence[tuple[dict[str, Any], int]], delta: float, num_records: int) -> dict[str, Any]:
    """All bounds that a report has.

    Guarantee: the bounds at every delta are certified, by that of `Accountant`, for the steps in the ledger, if the
    laws of all of them are (``certified``). Those of another k are as good for steps that were not made.

    Args:
        spent: `Ledger.spent`.
        delta: The run's.
        num_records: N; the other deltas stay below 1 / N.

    Returns:
        Ready for JSON: ``epsilon``, ``epsilon_at``, ``directions``, ``larger_sketch_dims``, and whether all of it is
        ``certified``. A bound that would need more memory than the accounting may take is None.
    """
    history = Accountant((StepEvent.from_dict(event), count) for event, count in spent).history
    own, directions = _at_own_delta(history, delta)
    return {
        "epsilon": own | {"delta": delta},
        "epsilon_at": [{"delta": other, **_bounds_at(history, other)} for other in other_deltas(delta, num_records)],
        "directions": directions | {"dominates": max(directions, key=lambda name: directions[name])},
        "certified": all(event.certified for event, _ in history),
        "larger_sketch_dims": larger_sketch_dims(history, delta),
    }


def other_deltas(delta: float, num_records: int) -> list[float]:
    """The deltas beside the run's own.

    Args:
        delta: The run's.
        num_records: N.

    Returns:
        The largest power of ten below 1 / N, and a tenth and a hundredth of the run's delta; largest first.
    """
    largest = 10.0 ** (math.ceil(-math.log10(num_records)) - 1)
    # A product of floats would show as 1.0000000000000002e-07.
    chosen = {float(f"{value:.12g}") for value in (largest, delta / 10, delta / 100)}
    return sorted((value for value in chosen if value < 1 / num_records and value != delta), reverse=True)


@lru_cache
def _at_own_delta(history: History, delta: float) -> tuple[dict[str, float], dict[str, float]]:
    accountant = Accountant(history)
    return dict(zip(_NAMES, accountant.epsilon(delta), strict=True)), accountant.directions(delta)


@lru_cache
def _bounds_at(history: History, delta: float) -> dict[str, float | None]:
    try:
        return dict(zip(_NAMES, Accountant(history).epsilon(delta), strict=True))
    except AccountingResourceError:
        # A row of a table is not worth failing the report for; the run's own delta is.
        return dict.fromkeys(_NAMES)


@lru_cache
def _upper(history: History, delta: float) -> float | None:
    try:
        return Accountant(history).upper(delta)
    except AccountingResourceError:
        return None


def larger_sketch_dims(history: History, delta: float) -> list[dict[str, Any]]:
    """What the same noise and steps would have cost with a larger k.

    Args:
        history: The steps.
        delta: The run's.

    Returns:
        Rows for 2 k, 4 k and exact norms, with the upper bound each; none if no norm was sketched.
    """
    if all(event.sketch_dim is None for event, _ in history):
        return []
    found = []
    for factor in (2, 4, None):
        changed = Accountant((_with_larger(event, factor), count) for event, count in history).history
        largest = [event.sketch_dim for event, _ in changed if event.sketch_dim is not None]
        found.append({"sketch_dim": max(largest, default=None), "upper": _upper(changed, delta)})
    return found


def _with_larger(event: StepEvent, factor: int | None) -> StepEvent:
    if event.sketch_dim is None:
        return event
    if factor is None:
        # Exact norms have no projection.
        return replace(event, sketch_dim=None, projection="gaussian")
    return replace(event, sketch_dim=event.sketch_dim * factor)
