"""From what is known when a run begins, and what its ledger and its end tell, to the report."""

import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from dprc_lightning.report.bounds import bounds

FORMAT_VERSION = 2

NOT_CERTIFIED = (
    "the projection's entries are random signs (privacy.projection=rademacher), and the worst case of their law was "
    "found on a grid only: no proof says that epsilon is not larger"
)
"""Why the epsilon of a run may be an estimate: a projection whose law has no certified bound."""

Spent = Sequence[tuple[dict[str, Any], int]]

_ACCOUNTED = ("epsilon", "epsilon_at", "directions", "larger_sketch_dims", "certified")


def versions() -> dict[str, str]:
    """Versions of what the numbers depend on."""
    names = ("dprc-lightning", "torch", "lightning", "transformers", "peft", "dp-accounting", "numpy", "scipy")
    return {"python": platform.python_version(), **{name: version(name) for name in names}}


def assemble(
    start: Mapping[str, Any],
    spent: Spent,
    *,
    status: str,
    not_private_because: str | None = None,
    parents: Sequence[Any] = (),
    **ending: Any,
) -> dict[str, Any]:
    """Make the report.

    Guarantee: epsilon's bounds are those of the steps in ``spent``, by that of `Accountant`; where any part of the run
    was not private, there are none. Where the law of any step is not certified, ``certified`` is false, and
    ``not_certified_because`` tells why.

    Args:
        start: What was known when the run began: the mechanism and all that does not change after.
        spent: `Ledger.spent`; empty for a baseline.
        status: How the run ended.
        not_private_because: Why nothing is protected, if the start does not say so already.
        parents: The runs whose steps this one took over.
        ending: What was known at the end. Without it the run was killed, or still runs.

    Returns:
        The report, ready for JSON.
    """
    because = start.get("not_private_because") or not_private_because
    mechanism = start["mechanism"]
    # A baseline has no ledger; killed, it leaves no count at all.
    begun = ending.pop("steps", None if because else 0)
    steps = sum(count for _, count in spent) if spent else begun
    applied = ending.get("applied_steps")
    report = {
        **start,
        "format": FORMAT_VERSION,
        "status": status,
        "private": because is None,
        "not_private_because": because,
        "unit": unit(mechanism),
        "neighboring_relation": "add or remove one unit of privacy",
        "sampling": "Poisson",
        "steps": steps,
        "applied_steps": applied,
        "discarded_steps": None if applied is None or steps is None else max(steps - applied, 0),
        "phases": [{**event, "steps": count} for event, count in spent],
        "forked_from": list(parents),
        "metrics": {},
        "metrics_step": None,
        "metrics_by_checkpoint": {},
        "dropped_records": None,
        "cost": None,
        **ending,
    }
    if because is None:
        report |= bounds(spent, mechanism["delta"], mechanism["num_records"])
    else:
        report |= dict.fromkeys(_ACCOUNTED)
    report["not_certified_because"] = NOT_CERTIFIED if report["certified"] is False else None
    report["assumptions"] = assumptions(report) if because is None else []
    return report


def unit(mechanism: Mapping[str, Any]) -> str:
    """The unit of privacy in words.

    Args:
        mechanism: `ResolvedPrivacy.to_dict`.

    Returns:
        What one unit is.
    """
    column = mechanism.get("group_column")
    return "one training record" if column is None else f"all training records of one value of column {column}"


def assumptions(report: Mapping[str, Any]) -> list[str]:
    """What the guarantee rests on.

    Args:
        report: All but the assumptions.

    Returns:
        One sentence or two each.
    """
    grouped = report["mechanism"].get("group_column") is not None
    budget = report["mechanism"]["steps"]
    units = "groups" if grouped else "training records"
    lines = [
        f"Unit of privacy: {report['unit']}. Neighbouring data sets differ by adding or removing one such unit.",
        "Every logical batch is a Poisson sample drawn from a secret stream; what it holds stays secret.",
        f"The number of {units}, the sample rate and all settings are public and were fixed before training.",
        "Settings that were chosen by looking at this data set are outside of epsilon, and so are earlier runs on it.",
        "Each record's loss depends on that record and the parameters alone.",
        "Real arithmetic: the noise is drawn and added in floating point (float64 sum, rounded once).",
        "Training loss, clipped fraction and validation figures are computed from data without noise.",
    ]
    if report["not_certified_because"]:
        lines.append(f"NOT certified: {report['not_certified_because']}.")
    if len(report["phases"]) > 1:
        lines.append(
            "The mechanism changed on the way (see the phases): nobody decided to go on, or how far, by looking at "
            "what the earlier steps released."
        )
    if report["steps"] < budget:
        lines.append("The run made fewer steps than planned: nobody ended it by looking at what its steps released.")
    if report["forked_from"]:
        lines.append(
            "This run continues another one and counts its steps. Its epsilon is that of this continuation alone: who "
            "publishes several continuations pays for the union of their steps."
        )
    if report.get("earlier_runs"):
        lines.append(
            f"The parameters were trained before, in {', '.join(map(str, report['earlier_runs']))}: where that was on "
            "the same data, its epsilon counts on top."
        )
    else:
        lines.append(
            "The parameters that the run began with owe nothing to this data set: earlier training on it counts on top."
        )
    return lines
