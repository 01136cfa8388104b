"""What a ledger has spent, in words for an error message."""

import decimal
import math

from dprc_lightning.accounting.accountant import Accountant
from dprc_lightning.accounting.events import StepEvent
from dprc_lightning.accounting.ledger import Ledger


def spent_summary(ledger: Ledger, delta: float) -> str:
    """What all steps that count cost together, such as ``13 steps are spent: epsilon 7.998 at delta 1e-05``.

    Guarantee: epsilon is the certified upper bound of the composition of everything the ledger counts, rounded up.

    Args:
        ledger: Open or closed.
        delta: In (0, 1).

    Returns:
        One phrase without a full stop.
    """
    accountant = Accountant((StepEvent.from_dict(event), count) for event, count in ledger.spent())
    upper = accountant.upper(delta)
    steps = "1 step is" if accountant.steps == 1 else f"{accountant.steps} steps are"
    return f"{steps} spent: epsilon {_rounded_up(upper)} at delta {delta:g}"


def _rounded_up(value: float) -> str:
    """Four digits, never below the value."""
    if not math.isfinite(value):
        return str(value)
    up = decimal.Context(prec=4, rounding=decimal.ROUND_CEILING)
    return format(up.create_decimal_from_float(value), "f")
