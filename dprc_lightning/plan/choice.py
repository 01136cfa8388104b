"""Which row of the table to take, and why, in words."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from dprc_lightning.plan.table import Row


@dataclass(frozen=True)
class Limits:
    """What a pick may cost.

    Attributes:
        tolerance: Percent of noise (or epsilon) that it may lie above the least.
        max_flops: Percent of the step's FLOPs that the norms may take.
        max_memory: GiB that P and the norms may take.
    """

    tolerance: float = 2.0
    max_flops: float = 20.0
    max_memory: float = 2.0

    def broken(self, row: Row, step_flops: int) -> str | None:
        """Which limit a row breaks.

        Args:
            row: Any row.
            step_flops: FLOPs of the step without the norms.

        Returns:
            The flag with its value, or None.
        """
        if 100 * row.costs.flops > self.max_flops * step_flops:
            return f"--max_flops {self.max_flops:g}"
        if row.costs.memory_bytes > self.max_memory * 2**30:
            return f"--max_memory {self.max_memory:g}"
        return None


@dataclass(frozen=True)
class Choice:
    """The pick.

    Attributes:
        row: The row; None if no row keeps within the limits.
        why: One to three sentences.
    """

    row: Row | None
    why: str


def choose(rows: Sequence[Row], limits: Limits, step_flops: int) -> Choice:
    """Pick the smallest k whose price is within the tolerance of the least that any row within the limits has.

    The price is the noise, or epsilon where the noise is given. Exact norms count as the largest k, and are taken
    wherever they cost no more, in FLOPs and memory, than the row found.

    Args:
        rows: By rising k, exact norms last.
        limits: What the pick may cost.
        step_flops: FLOPs of the step without the norms.

    Returns:
        The pick.
    """
    counted = [row for row in rows if row.price is not None and math.isfinite(row.price)]
    allowed = [row for row in counted if limits.broken(row, step_flops) is None]
    if not counted:
        return Choice(None, "no row has a finite epsilon; take more noise, fewer steps or a larger delta")
    if not allowed:
        least = min(counted, key=lambda row: row.costs.flops)
        return Choice(
            None,
            f"no row keeps within --max_flops {limits.max_flops:g} and --max_memory {limits.max_memory:g}; the least "
            f"FLOPs are those of {least.name}: {_costs(least, step_flops)}",
        )
    best = min(allowed, key=_price)
    picked = next(row for row in allowed if _price(row) <= _price(best) * (1 + limits.tolerance / 100))
    exact = next((row for row in allowed if row.sketch_dim is None), None)
    if exact is not None and exact is not picked and _costs_no_more(exact, picked):
        if picked.costs.sketch_dim is None:
            return Choice(
                exact,
                f"each matrix is so small that its exact norm is no dearer than a sketch, from {picked.name} on; exact "
                f"norms have the least {_what(exact)} ({_price(exact):.4g}) and cost {_costs(exact, step_flops)}.",
            )
        return Choice(
            exact,
            f"exact norms cost {_costs(exact, step_flops)}, no more than {picked.name} "
            f"({_costs(picked, step_flops)}), and have {_percent_less(exact, picked)} % less {_what(exact)}.",
        )
    return Choice(picked, " ".join(_reasons(picked, best, counted, limits, step_flops)))


def _reasons(picked: Row, best: Row, counted: Sequence[Row], limits: Limits, step_flops: int) -> list[str]:
    what = _what(picked)
    if picked is best:
        found = f"{picked.name}: no row that the limits allow has a smaller {what} than {_price(picked):.4g}."
    else:
        found = (
            f"{picked.name}: the smallest k whose {what} ({_price(picked):.4g}) is within {limits.tolerance:g} % of "
            f"the least that the limits allow ({_price(best):.4g}, {best.name})."
        )
    larger = counted[counted.index(picked) + 1 :]
    if not larger:
        return [found]
    following = larger[0]
    broken = limits.broken(following, step_flops)
    bought = (
        f"Next, {following.name}, would buy back {_percent_less(following, picked)} % of it for "
        f"{_costs(following, step_flops)} in place of {_costs(picked, step_flops)}"
    )
    return [found, f"{bought}, more than {broken} allows." if broken else f"{bought}."]


def _price(row: Row) -> float:
    assert row.price is not None
    return row.price


def _what(row: Row) -> str:
    return "noise multiplier" if row.epsilon is None else "epsilon"


def _percent_less(row: Row, than: Row) -> str:
    return f"{100 * (1 - _price(row) / _price(than)):.1f}"


def _costs_no_more(row: Row, than: Row) -> bool:
    return row.costs.flops <= than.costs.flops and row.costs.memory_bytes <= than.costs.memory_bytes


def _costs(row: Row, step_flops: int) -> str:
    return f"{percent(row.costs.flops, step_flops)} of the step's FLOPs and {size(row.costs.memory_bytes)}"


def percent(part: float, whole: float) -> str:
    """``4.8 %``; a share too small to be seen with one digit gets two."""
    share = 100 * part / whole
    return f"{share:.1f} %" if share >= 0.95 or share == 0 else f"{share:.2g} %"


def size(number: float) -> str:
    """``159 MiB``."""
    value, units = float(number), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 999.5 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.1f} {units[0]}" if value < 9.95 and units[0] != "B" else f"{value:.0f} {units[0]}"
