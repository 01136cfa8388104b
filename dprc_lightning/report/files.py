"""The report's files in a run folder: written whole or not at all, and made again from the ledger after a crash."""

import json
import math
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dprc_lightning.accounting.ledger import LEDGER_NAME, Ledger
from dprc_lightning.errors import ReportError
from dprc_lightning.report.facts import FORMAT_VERSION, assemble, unit
from dprc_lightning.report.html import to_html
from dprc_lightning.report.markdown import to_markdown

JSON_NAME = "report.json"
MARKDOWN_NAME = "report.md"
HTML_NAME = "report.html"
START_NAME = "resolved.json"


def read_report(folder: str | Path) -> dict[str, Any]:
    """A run's report, whatever became of the run.

    Where ``report.json`` is missing, or tells of other steps than the ledger, the run was killed or still runs: the
    report is then made from ``ledger.jsonl`` and ``resolved.json``. Nothing is written.

    Args:
        folder: Run folder.

    Returns:
        The report.

    Raises:
        ReportError: There is nothing to make one from, or it is damaged.
        LedgerError: The ledger is damaged.
    """
    folder = Path(folder)
    path = folder / JSON_NAME
    report = _upgraded(_read(path))
    ledger = Ledger.open(folder / LEDGER_NAME, read_only=True) if os.path.lexists(folder / LEDGER_NAME) else None
    if report is not None and (ledger is None or _is_of(report, ledger)):
        return report
    start = _read(folder / START_NAME)
    if ledger is None and start is None:
        raise ReportError(f"{path}: not found; give the folder of a run that was fitted")
    if start is None:
        assert ledger is not None
        if "mechanism" not in ledger.meta:
            raise ReportError(
                f"{path}: not found, and {ledger.path} names no mechanism: it was not made by dprc fit; "
                "dprc_lightning.accounting.Accountant composes its steps"
            )
        start = _start_from(ledger, folder)
    elif ledger is not None:
        # A run that was resumed with more steps has amended its ledger before anything else.
        start |= {"mechanism": ledger.meta.get("mechanism", start["mechanism"])}
    steps = "no ledger" if ledger is None else f"{ledger.steps} steps in the ledger"
    return assemble(
        start,
        [] if ledger is None else ledger.spent(),
        status=f"killed or still running: {steps}",
        not_private_because=None if ledger is None else ledger.meta.get("not_private_because"),
        parents=() if ledger is None else ledger.parents,
        # Figures of weights that were evaluated by name stay true.
        metrics_by_checkpoint={} if report is None else report["metrics_by_checkpoint"],
    )


def write_report(folder: Path, report: Mapping[str, Any]) -> None:
    """Write ``report.json``, ``report.md`` and ``report.html``; of each, a reader sees the old one or the new one.

    Args:
        folder: Run folder; made if it is not there.
        report: The report.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # JSON last: where the others are stale, so is it, and `read_report` notices.
    _replace(folder / HTML_NAME, to_html(report))
    _replace(folder / MARKDOWN_NAME, to_markdown(report))
    _write(folder / JSON_NAME, report)


def write_start(folder: Path, start: Mapping[str, Any]) -> None:
    """Write ``resolved.json``: what a report needs and only the living process knows.

    Args:
        folder: Run folder; made if it is not there.
        start: The mechanism, and the facts of the start.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _write(folder / START_NAME, {"format": FORMAT_VERSION, **start})


def _is_of(report: Mapping[str, Any], ledger: Ledger) -> bool:
    """Whether the report tells of the very steps that the ledger counts: one may have been put back, or gone on."""
    told = [{name: value for name, value in phase.items() if name != "steps"} for phase in report["phases"]]
    counts = [phase["steps"] for phase in report["phases"]]
    return (
        list(zip(told, counts, strict=True)) == ledger.spent() and report.get("run_id", ledger.run_id) == ledger.run_id
    )


def _upgraded(report: dict[str, Any] | None) -> dict[str, Any] | None:
    """What reports of earlier releases did not have."""
    if report is None:
        return None
    later: dict[str, Any] = {"applied_steps": None, "metrics_step": None, "metrics_by_checkpoint": {}}
    # Their projections were Gaussian, all of them.
    later |= {"phases": [], "forked_from": [], "not_certified_because": None}
    later["certified"] = True if report.get("private") else None
    return {"unit": unit(report["mechanism"]), **later, **report}


def _start_from(ledger: Ledger, folder: Path) -> dict[str, Any]:
    """What the ledger's first line alone knows of the start."""
    return {
        "name": folder.resolve().name,
        "mechanism": ledger.meta["mechanism"],
        "parameters": [],
        "data": {},
        "paths": {"run folder": str(folder), "ledger": str(ledger.path)},
        "versions": {},
        "logged_unprotected": None,
    }


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict) or not isinstance(found.get("mechanism"), dict):
            raise ValueError("it has no mechanism")
        return found
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ReportError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        # Also what is no UTF-8 and what is no JSON.
        raise ReportError(f"{path}: damaged ({error}); move it away, and the report is made from the ledger") from None


def _write(path: Path, content: Mapping[str, Any]) -> None:
    _replace(path, json.dumps(_finite(content), indent=2, sort_keys=True, allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    """JSON has no infinity and no NaN: they become the strings that ``float`` reads."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return value


def _replace(path: Path, text: str) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
