"""The report of a run: what it promises, what it measured, and where everything lies. JSON first, Markdown from it."""

import json
import os
import platform
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from dprc_lightning.errors import LedgerError

JSON_NAME = "report.json"
MARKDOWN_NAME = "report.md"
FORMAT_VERSION = 1

ASSUMPTIONS = (
    "Unit of privacy: one training record. Neighbouring data sets differ by adding or removing one record.",
    "Every logical batch is a Poisson sample drawn from a secret stream; its records stay secret.",
    "The number of training records, the sample rate and all settings are public and were fixed before training.",
    "Settings that were chosen by looking at this data set are outside of epsilon, and so are earlier runs on it.",
    "Each record's loss depends on that record and the parameters alone.",
    "Real arithmetic: the noise is drawn and added in floating point (float64 sum, rounded once).",
    "Training loss, clipped fraction and validation figures are computed from data without noise.",
)


def versions() -> dict[str, str]:
    """Versions of what the numbers depend on."""
    names = ("dprc-lightning", "torch", "lightning", "transformers", "dp-accounting", "numpy", "scipy")
    return {"python": platform.python_version(), **{name: version(name) for name in names}}


def read_report(folder: str | Path) -> dict[str, Any]:
    """Read a run's report.

    Args:
        folder: Run folder.

    Returns:
        The report.

    Raises:
        LedgerError: There is none, or it is damaged.
    """
    path = Path(folder) / JSON_NAME
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        raise LedgerError(f"{path}: not found; give the folder of a run that was fitted") from None
    except json.JSONDecodeError as error:
        raise LedgerError(f"{path}: not valid JSON ({error}); the run's ledger.jsonl still counts its steps") from None


def write_report(folder: Path, report: Mapping[str, Any]) -> None:
    """Write ``report.json`` and ``report.md``; a reader sees the old ones or the new ones, never half of one.

    Args:
        folder: Run folder; made if it is not there.
        report: The report.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _replace(folder / JSON_NAME, json.dumps(report, indent=2, sort_keys=True) + "\n")
    _replace(folder / MARKDOWN_NAME, to_markdown(report))


def _replace(path: Path, text: str) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def to_markdown(report: Mapping[str, Any], others: Sequence[Mapping[str, Any]] = ()) -> str:
    """The report for people.

    Args:
        report: The run that the report is about.
        others: Runs to compare its figures with.

    Returns:
        Markdown.
    """
    lines = ["# Training report", "", *_guarantee(report), "", *_results(report, others), "", *_parameters(report)]
    lines += ["", *_cost(report), "", "## Where things are", ""]
    lines += [f"* {name}: `{path}`" for name, path in report["paths"].items()]
    if report["private"]:
        lines += ["", "## What the guarantee rests on", "", *(f"* {line}" for line in report["assumptions"])]
    return "\n".join(lines) + "\n"


def _guarantee(report: Mapping[str, Any]) -> list[str]:
    lines = ["## Privacy", ""]
    if not report["private"]:
        return [*lines, f"**NOT PRIVATE**: {report['not_private_because']}"]
    mechanism, epsilon = report["mechanism"], report["epsilon"]
    kind = "exact norms" if mechanism["sketch_dim"] is None else f"norms sketched with k = {mechanism['sketch_dim']}"
    lines += [
        f"**epsilon = {_number(epsilon['upper'])} at delta = {epsilon['delta']:g}** (certified upper bound)",
        "",
        "| lower bound | estimate | upper bound |",
        "|---|---|---|",
        f"| {_number(epsilon['lower'])} | {_number(epsilon['estimate'])} | {_number(epsilon['upper'])} |",
        "",
        f"* steps: {report['steps']} counted by the ledger, of {mechanism['steps']} in the budget",
        f"* noise multiplier {mechanism['noise_multiplier']:.4f}, clipping at {mechanism['max_grad_norm']:g}, {kind}",
        f"* sample rate {mechanism['sample_rate']:.5f}: {mechanism['expected_batch_size']:g} of "
        f"{mechanism['num_records']} records expected in a batch",
    ]
    if mechanism.get("norm_slack"):
        lines.append(
            f"* precision {report['precision']}: the clipping threshold is lowered by {mechanism['norm_slack']:.2%} of "
            "itself (norm_slack), the noise is not"
        )
    if report.get("on_nonfinite") == "drop":
        count = report["dropped_records"]
        lines.append(
            "* records whose gradient is not finite are dropped"
            + ("" if count is None else f": {count} times (counted from private data)")
        )
    if report["status"] != "finished":
        lines.append(f"* the run ended early: {report['status']}")
    return lines


def _results(report: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> list[str]:
    names = sorted({name for r in (report, *others) for name in r["metrics"]})
    lines = ["## Results", ""]
    if not names:
        return [*lines, "No validation or test figures yet."]
    lines += ["| run | epsilon | " + " | ".join(names) + " | seconds of training |", "|---" * (len(names) + 3) + "|"]
    for r in (report, *others):
        privacy = _number(r["epsilon"]["upper"]) if r["private"] else "not private"
        figures = " | ".join(f"{r['metrics'][n]:.3f}" if n in r["metrics"] else "" for n in names)
        lines.append(f"| {_label(r)} | {privacy} | {figures} | {r['cost']['training_seconds']:.0f} |")
    majority = report["data"].get("test_majority_class_accuracy")
    if majority is not None:
        cells = " | ".join(f"{majority:.3f}" if n == "test/accuracy" else "" for n in names)
        lines.append(f"| always the majority class | 0 | {cells} | 0 |")
    return lines


def _label(report: Mapping[str, Any]) -> str:
    sketched = sum(p["numel"] for p in report["parameters"] if p["estimator"] != "exact")
    exact = sum(p["numel"] for p in report["parameters"] if p["estimator"] == "exact")
    trained = (
        f"{sketched + exact:,} parameters" if report["private"] else f"{report['trainable_parameters']:,} parameters"
    )
    return f"{report['name']} ({trained})"


def _parameters(report: Mapping[str, Any]) -> list[str]:
    if not report["private"]:
        return []
    lines = ["## Which norms were sketched", ""]
    for title, wanted in (("sketched", True), ("exact", False)):
        chosen = [p for p in report["parameters"] if (p["estimator"] != "exact") == wanted]
        total = sum(p["numel"] for p in chosen)
        lines.append(f"* {title}: {len(chosen)} tensors, {total:,} parameters")
        lines += [f"    * {name}" for name in _grouped([p["parameter"] for p in chosen])]
    return lines


def _grouped(names: Sequence[str]) -> list[str]:
    """``a.4.q``, ``a.5.q`` -> ``a.{4,5}.q``, so that a deep model's list stays readable."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        parts = name.split(".")
        key = tuple("*" if p.isdigit() else p for p in parts)
        groups.setdefault(key, []).append(next((p for p in parts if p.isdigit()), ""))
    shown = []
    for key, numbers in groups.items():
        which = "{" + ",".join(numbers) + "}" if len(numbers) > 1 else numbers[0]
        shown.append(".".join(key).replace("*", which))
    return shown


def _cost(report: Mapping[str, Any]) -> list[str]:
    cost = report["cost"]
    phases = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in cost["phases"].items())
    return [
        "## Cost",
        "",
        f"* step: {cost['median_step_seconds']:.2f} s (median of {cost['measured_steps']}); all: {phases}",
        f"* peak memory of the process: {cost['peak_memory_bytes'] / 2**30:.2f} GiB ({cost['device']})",
    ]


def _number(value: float) -> str:
    return f"{value:.4f}"
