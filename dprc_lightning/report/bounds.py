"""What the steps in a ledger cost: at the run's delta and others, per direction, and what a larger k would have saved.

Each number takes up to a second. They are kept for the process: figures that join the report later cost nothing more.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from dprc_lightning.accounting import Accountant, StepEvent
from dprc_lightning.accounting.accountant import upper_bounds
from dprc_lightning.accounting.grid import FINE
from dprc_lightning.errors import AccountingResourceError

History = tuple[tuple[StepEvent, int], ...]


def bounds(spent: Sequence[tuple[dict[str, Any], int]], delta: float, num_records: int) -> dict[str, Any]:
    """All bounds that a report has.

    Guarantee: the bounds at the run's own delta are certified, by that of `Accountant`, for the steps in the ledger.
    Those at other deltas and other k are the same computation without its last certified rounding: they agree with it
    to about 1e-6, at deltas below 1e-10 to 1e-3, and are for orientation.

    Args:
        spent: `Ledger.spent`.
        delta: The run's.
        num_records: N; the other deltas stay below 1 / N.

    Returns:
        Ready for JSON: ``epsilon``, ``epsilon_at``, ``directions``, ``larger_sketch_dims``. A bound that would need
        more memory than the accounting may take is None.
    """
    history = Accountant((StepEvent.from_dict(event), count) for event, count in spent).history
    own, directions = _at_own_delta(history, delta)
    return {
        "epsilon": own | {"delta": delta},
        "epsilon_at": [{"delta": other, "upper": _upper(history, other)} for other in other_deltas(delta, num_records)],
        "directions": directions | {"dominates": max(directions, key=lambda name: directions[name])},
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
    return accountant.epsilon(delta)._asdict(), accountant.directions(delta)


@lru_cache
def _upper(history: History, delta: float) -> float | None:
    """The upper bound without certification of the last digits (see `bounds`), in half the time."""
    if not history:
        return 0.0
    try:
        return min(bound.fast_epsilon(bound.composers()) for bound in upper_bounds(history, delta, FINE))
    except AccountingResourceError:
        # A row of a table is not worth failing the report for; the run's own delta is.
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
    return replace(event, sketch_dim=None if factor is None else event.sketch_dim * factor)
