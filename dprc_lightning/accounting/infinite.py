"""Why no finite epsilon can be certified, in one line and with what would change it."""

import math

from dprc_lightning.accounting.accountant import History, upper_bounds
from dprc_lightning.accounting.grid import COARSE, MAX_LOSS
from dprc_lightning.errors import AccountingResourceError


def why_infinite(history: History, delta: float) -> str:
    """What costs more than delta by itself, where `Accountant.epsilon` has an infinite upper bound.

    Args:
        history: Events with their counts, at least one.
        delta: The target delta.

    Returns:
        One line: the reason and the remedy.
    """
    steps = sum(count for _, count in history)
    where = f"over {steps} step{'s' if steps > 1 else ''}, delta={delta!r}"
    sketches = [event.sketch_dim for event, _ in history if event.sketch_dim is not None]
    sketch = f"sketch_dim (now {min(sketches)}), " if sketches else ""
    least = min(event.noise_multiplier for event, _ in history)
    missed = -math.expm1(
        -sum(count * event.sample_rate * event.envelope_law().mass_at_infinity for event, count in history)
    )
    try:
        bound = next(iter(upper_bounds(history, delta, COARSE)))
    except AccountingResourceError as error:
        return str(error)
    slack, infinite = bound.slack, bound.infinite_loss
    if missed > delta / 2:
        return f"the norm estimate misses a record with probability {missed:.2g} {where}; raise {sketch}or delta"
    if slack > delta / 2:
        return f"the slack of the convex order is {slack:.2g} {where}; use bound='best', or raise {sketch}or delta"
    if infinite > delta / 2:
        return (
            f"losses above {MAX_LOSS:g} in a single step have probability {infinite:.2g} {where}; raise {sketch}"
            f"noise_multiplier (now {least:.6g}) or delta"
        )
    return f"the errors of the computation leave nothing {where}; raise {sketch}noise_multiplier or delta"
