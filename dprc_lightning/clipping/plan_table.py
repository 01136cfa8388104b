"""The plan of a run as a table for a terminal: layers that differ in nothing but their number share a line."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby, product

from dprc_lightning.clipping.plan import PlanRow

WIDTH = 116
"""Columns that the table takes at most: it stays below 120 when it is indented."""

_HEAD = (
    ("", "", "", "", "", "P", "sketch", "FLOPs", "ghost"),
    ("parameter", "count", "shape", "estimator", "side", "bytes", "/record", "/token", "up to T"),
)
_TEXT_COLUMNS = (0, 2, 3, 4)


def format_plan(rows: Sequence[PlanRow]) -> str:
    """The plan as plain text.

    Parameters alike in shape, estimator and side whose names differ in their layer numbers alone share a line:
    ``model.layers.{0-29}.self_attn.q_proj.weight``, count 30. Its bytes of P (kept for a whole step), its float32
    numbers of the sketch (per record) and its FLOPs (per token) are those of all 30 together, so the last line is the
    sum; ``-`` stands for none.
    ``ghost up to T``: with at most so many tokens in a record, an exact matrix's norm comes from Gram matrices, with
    more from the whole gradient (if a forward calls each of its modules once); ``-`` for vectors and sketched ones.

    Args:
        rows: What `ClippingHandle.plan` returned.

    Returns:
        Lines of at most `WIDTH` characters, in the order of the rows; no newline at the end.
    """
    lines = [_cells(name, alike) for name, alike in _groups(rows)]
    sketched = [row for row in rows if row.estimator != "exact"]
    total = f"{_short(_numel(rows))} parameters, {_short(_numel(sketched)) if sketched else 'none'} of them sketched"
    table = [*_HEAD, *lines, (total, str(len(rows)), "", "", "", *_costs(rows), "")]
    widths = [max(len(line[i]) for line in table) for i in range(len(_HEAD[0]))]
    # Only the names give way.
    widths[0] = min(widths[0], WIDTH - sum(widths[1:]) - 2 * (len(widths) - 1))
    return "\n".join(
        "  ".join(
            _fit(cell, width).ljust(width) if i in _TEXT_COLUMNS else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in table
    )


def _groups(rows: Sequence[PlanRow]) -> Iterator[tuple[str, list[PlanRow]]]:
    """Rows that share a line, with the name that stands for exactly all of theirs."""
    found: dict[object, dict[tuple[int, ...], PlanRow]] = {}
    for row in rows:
        parts = row.parameter.split(".")
        pattern = tuple(None if _is_index(part) else part for part in parts)
        key = pattern, replace(row, parameter="", modules=()), len(row.modules)
        found.setdefault(key, {})[tuple(int(part) for part in parts if _is_index(part))] = row
    for by_index in found.values():
        name = next(iter(by_index.values())).parameter.split(".")
        for block in _blocks(by_index):
            ranges = iter(block)
            shown = [_ranges(next(ranges)) if _is_index(part) else part for part in name]
            yield ".".join(shown), [by_index[index] for index in product(*block)]


def _is_index(part: str) -> bool:
    return part.isdecimal() and str(int(part)) == part


def _blocks(indices: Iterable[tuple[int, ...]]) -> list[tuple[list[int], ...]]:
    """Split a set of index tuples into products of sets: (0, 0), (0, 1), (1, 0) is {0} x {0, 1} and {1} x {0}."""
    tails: dict[int, list[tuple[int, ...]]] = {}
    for index in sorted(indices):
        if not index:
            return [()]
        tails.setdefault(index[0], []).append(index[1:])
    heads: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    for head, tail in tails.items():
        heads.setdefault(tuple(tail), []).append(head)
    return [(head, *block) for tail, head in heads.items() for block in _blocks(tail)]


def _ranges(indices: Sequence[int]) -> str:
    """``{0-3,7}`` for 0, 1, 2, 3, 7; a single index as it is."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and runs[-1][-1] == index - 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    if len(indices) == 1:
        return str(indices[0])
    return "{" + ",".join(f"{r[0]}-{r[-1]}" if len(r) > 2 else ",".join(map(str, r)) for r in runs) + "}"


def _cells(name: str, alike: Sequence[PlanRow]) -> tuple[str, ...]:
    row = alike[0]
    ghost = "-" if row.ghost_rows is None else str(row.ghost_rows // max(len(row.modules), 1))
    shape = "x".join(map(str, row.shape))
    return name, str(len(alike)), shape, row.estimator, row.side, *_costs(alike), ghost


def _costs(rows: Sequence[PlanRow]) -> tuple[str, str, str]:
    sums = (
        sum(row.projection_bytes for row in rows),
        sum(row.sketch_floats for row in rows),
        sum(row.flops_per_token for row in rows),
    )
    p, sketch, flops = (_short(number) if number else "-" for number in sums)
    return p, sketch, flops


def _numel(rows: Sequence[PlanRow]) -> int:
    return sum(math.prod(row.shape) for row in rows)


def _short(number: int) -> str:
    """``7.1M`` for 7,077,888."""
    if number < 1000:
        return str(number)
    value = float(number)
    for unit in "kMGT":
        value /= 1000
        # As it would be rounded: 999,999 is 1.0M.
        if value < 999.5:
            return f"{value:.1f}{unit}" if value < 9.95 else f"{value:.0f}{unit}"
    return f"{value:.0f}T"


def _fit(name: str, width: int) -> str:
    """Leave out what says least: whole parts before the layer numbers, then those after, then characters."""
    parts: list[str | None] = list(name.split("."))
    numbers = [i for i, part in enumerate(parts) if part and (part.startswith("{") or _is_index(part))]
    first = numbers[0] if numbers else len(parts) - 2
    spare = [*range(1, first), 0, *range(first + 1, len(parts) - 2)] if len(parts) > 2 else []
    for i in spare:
        if len(name) <= width:
            return name
        if i not in numbers:
            parts[i] = None
            name = "...".join(".".join(filter(None, run)) for kept, run in groupby(parts, key=bool) if kept)
            name = name if parts[0] else f"...{name}"
    if len(name) <= width:
        return name
    tail = (width - 3) * 2 // 3
    return f"{name[: width - 3 - tail]}...{name[-tail:]}"
