"""`dprc plan`: from flags to the table, the pick and its reason."""

import argparse
import json
import math
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from dprc_lightning.errors import InvalidArgumentError
from dprc_lightning.plan.choice import Choice, Limits, choose, percent, size
from dprc_lightning.plan.costs import step_flops
from dprc_lightning.plan.settings import Subject, read_subject
from dprc_lightning.plan.table import Row, all_costs, rows

if TYPE_CHECKING:
    from dprc_lightning.plan.pick import Pick


def run(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Make the plan and print it; rows that take seconds each are told on stderr.

    Args:
        options: The flags.
        overrides: Settings of the file that have no flag here.

    Returns:
        Exit status.

    Raises:
        KeyboardInterrupt: Ctrl-C, after the rows that are ready were printed.
        InvalidArgumentError: A flag's value that cannot be used.
    """
    if options.memory is not None:
        return _memory_of_file(options, overrides) if options.config else _memory(options)
    limits = Limits(options.tolerance, options.max_flops, options.max_memory)
    for name, value in asdict(limits).items():
        if not 0 <= value < math.inf:
            raise InvalidArgumentError(f"--{name}", value, "expected a finite value >= 0")
    if min(options.sketch_dim) < 1:
        raise InvalidArgumentError("--sketch_dim", options.sketch_dim, "expected integers >= 1")
    subject = read_subject(options, overrides, _tell)
    sketch_dims = sorted(set(options.sketch_dim))
    exact, *costs = all_costs(subject.model, subject.batch, sketch_dims, subject.mechanism, subject.projection_memory)
    total = step_flops(subject.model, subject.batch)
    # From the cheapest to account to the dearest; the table is by k.
    order = [None, *reversed(sketch_dims)]
    ready: list[Row] = []
    try:
        for row in rows(order, [exact, *reversed(costs)], subject.mechanism, _tell):
            ready.append(row)
    except KeyboardInterrupt:
        _show(subject, _by_k(ready), Choice(None, "interrupted before the last row: no pick"), limits, total, options)
        raise
    picked = None if subject.pick is None else subject.pick(_tell)
    _show(subject, _by_k(ready), choose(_by_k(ready), limits, total), limits, total, options, picked)
    return 0


def _memory(options: argparse.Namespace) -> int:
    """The memory flags of a model at a context, without a word of noise."""
    for name in ("model", "tokens"):
        if getattr(options, name) is None:
            raise InvalidArgumentError(f"--{name}", None, "needed with --memory")
    if not 0 < options.memory < math.inf:
        raise InvalidArgumentError("--memory", options.memory, "expected GiB > 0")
    from dprc_lightning.bench.simulate import SimulatedStep
    from dprc_lightning.plan.memory import memory_rows, to_text

    # One table for each k would say the same: P and the sketches are a hundredth of it.
    sketch_dim = min(options.sketch_dim, key=lambda k: abs(k - 32))
    step = SimulatedStep(
        model=options.model,
        tokens=options.tokens,
        records=options.records or 1,
        lora=options.lora,
        dtype=options.dtype,
        estimator=options.estimator or "auto",
        sketch_dim=sketch_dim,
    )
    limit = options.memory * 2**30
    found = memory_rows(step, limit, _tell)
    fits = found[-1].fits(limit)
    if options.format == "json":
        print(json.dumps({"rows": [asdict(row) for row in found], "pick": found[-1].flags if fits else None}))
    else:
        print(to_text(found, limit, step.tokens, step.records))
    return 0 if fits else 1


def _memory_of_file(options: argparse.Namespace, overrides: Sequence[str]) -> int:
    """What `dprc fit` of these files would pick for a device of this size."""
    if not 0 < options.memory < math.inf:
        raise InvalidArgumentError("--memory", options.memory, "expected GiB > 0")
    for name in ("model", "lora", "tokens", "records"):
        if getattr(options, name) is not None:
            remedy = "goes with --model; with --config and --memory set it in the file"
            raise InvalidArgumentError(f"--{name}", getattr(options, name), remedy)
    from dprc_lightning.plan.file import FileSettings

    _tell("reading " + ", ".join(options.config))
    found = FileSettings(options.config, overrides).pick(options.memory, _tell)
    print(json.dumps(_pick_to_json(found)) if options.format == "json" else found.to_text())
    return 0 if found.fits else 1


def _pick_to_json(found: "Pick") -> dict[str, Any]:
    rows = [asdict(row) for row in found.rows]
    return {"rows": rows, "pick": found.flags if found.fits else None, "said": found.said() if found.fits else None}


def _tell(line: str) -> None:
    print(f"dprc plan: {line}", file=sys.stderr, flush=True)


def _by_k(ready: Sequence[Row]) -> list[Row]:
    return sorted(ready, key=lambda row: math.inf if row.sketch_dim is None else row.sketch_dim)


def _show(
    subject: Subject,
    found: Sequence[Row],
    choice: Choice,
    limits: Limits,
    total: int,
    options: argparse.Namespace,
    picked: "Pick | None" = None,
) -> None:
    if options.format == "json":
        memory = {"memory": _pick_to_json(picked)} if picked else {}
        print(json.dumps(to_json(subject, found, choice, limits, total) | memory))
    else:
        print(to_text(subject, found, choice, total) + (f"\n\n{picked.to_text()}" if picked else ""))


def to_json(subject: Subject, found: Sequence[Row], choice: Choice, limits: Limits, total: int) -> dict[str, Any]:
    """The plan as plain JSON values; what is infinite is null.

    Args:
        subject: What was planned for.
        found: The rows.
        choice: The pick.
        limits: What it may cost.
        total: FLOPs of the step without the norms.

    Returns:
        ``model``, ``records``, ``tokens``, ``num_records``, ``mechanism``, ``step_flops`` (of one micro-batch, without
        the norms), ``rows``, ``limits``, ``pick`` and ``why``.
    """
    pick = None
    if choice.row is not None:
        pick = {
            "sketch_dim": choice.row.sketch_dim,
            "estimator": "exact" if choice.row.sketch_dim is None else subject.mechanism.estimator,
        }
    exact = _exact(found)
    return {
        "model": subject.name,
        "records": subject.batch.records,
        "tokens": subject.batch.tokens,
        "num_records": subject.num_records,
        "mechanism": asdict(subject.mechanism),
        "step_flops": total,
        "rows": [_row_to_json(row, exact, total) for row in found],
        "limits": asdict(limits),
        "pick": pick,
        "why": choice.why,
    }


def _row_to_json(row: Row, exact: Row | None, total: int) -> dict[str, Any]:
    costs = row.costs
    bounds = None if row.epsilon is None else dict(zip(("lower", "estimate", "upper"), row.epsilon, strict=True))
    return {
        "sketch_dim": row.sketch_dim,
        "accounted_sketch_dim": costs.sketch_dim,
        "noise_multiplier": row.noise_multiplier,
        "epsilon": None if bounds is None else {name: _finite(value) for name, value in bounds.items()},
        "certified": row.certified,
        "over_exact": _over_exact(row, exact),
        "flops": costs.flops,
        "flops_share": costs.flops / total,
        "projection_bytes": costs.projection_bytes,
        "norm_bytes": costs.norm_bytes,
        "sketched_parameters": costs.sketched_parameters,
        "exact_parameters": costs.exact_parameters,
        "problem": row.problem,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _exact(found: Sequence[Row]) -> Row | None:
    return next((row for row in found if row.sketch_dim is None), None)


def _over_exact(row: Row, exact: Row | None) -> float | None:
    """How much more noise (or epsilon) than exact norms need, as a share."""
    if exact is None or exact.price is None or row.price is None or not math.isfinite(row.price / exact.price):
        return None
    return row.price / exact.price - 1


def to_text(subject: Subject, found: Sequence[Row], choice: Choice, total: int) -> str:
    """The plan for a terminal.

    Args:
        subject: What was planned for.
        found: The rows.
        choice: The pick.
        total: FLOPs of the step without the norms.

    Returns:
        Lines; no newline at the end.
    """
    mechanism, batch, exact = subject.mechanism, subject.batch, _exact(found)
    if mechanism.epsilon is None:
        target, privacy = f"noise multiplier {mechanism.noise_multiplier:g}", ["eps lower", "estimate", "upper"]
    else:
        target, privacy = f"epsilon {mechanism.epsilon:g}", ["sigma"]
    trained = found[0].costs.sketched_parameters + found[0].costs.exact_parameters if found else 0
    steps = "1 step" if mechanism.steps == 1 else f"{mechanism.steps} steps"
    lines = [
        f"{subject.name}: {trained:,} trainable parameters, micro-batches of {batch.records} x {batch.tokens} tokens",
        f"{target}, delta {mechanism.delta:g}, sample rate {mechanism.sample_rate:.6g}, {steps}",
        "",
    ]
    head = ["k", *privacy, "over exact", "FLOPs", "P", "norms", "sketched", "exact"]
    table = [head, *(_cells(row, exact, total, len(privacy)) for row in found)]
    widths = [max(len(line[i]) for line in table) for i in range(len(head))]
    lines += ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in table]
    lines += [f"{row.name}: {row.problem}" for row in found if row.problem]
    if any(not row.certified for row in found):
        lines.append("* not certified: the law of this projection is known on a grid only")
    picked = "none" if choice.row is None else choice.row.name
    lines += [
        "",
        "sigma: noise multiplier; FLOPs: the norms' against those of the step without them; P: kept for a whole step;",
        "norms: their peak in a micro-batch; sketched, exact: parameters whose norms are estimated, and are not.",
        "",
        f"pick: {picked}",
        *textwrap.wrap(f"why: {choice.why}", 116),
    ]
    return "\n".join(lines)


def _cells(row: Row, exact: Row | None, total: int, numbers: int) -> list[str]:
    costs = row.costs
    if row.price is None:
        privacy = ["-"] * numbers
    elif row.epsilon is None:
        privacy = [f"{row.noise_multiplier:.4f}"]
    else:
        privacy = [f"{value:.4f}" for value in row.epsilon]
    over = _over_exact(row, exact)
    return [
        ("exact" if row.sketch_dim is None else str(row.sketch_dim)) + ("" if row.certified else "*"),
        *privacy,
        "-" if over is None else f"{100 * over:+.1f} %",
        percent(costs.flops, total),
        size(costs.projection_bytes),
        size(costs.norm_bytes),
        f"{costs.sketched_parameters:,}",
        f"{costs.exact_parameters:,}",
    ]
