"""The report in words: sections of paragraphs, lists and tables, which `markdown` and `html` only have to write down.

Text may hold `code` between backticks and **strong** words; everything else in it is taken as it stands.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Paragraph:
    """A few sentences."""

    text: str


@dataclass(frozen=True)
class Bullets:
    """A list; an item that is a tuple has a list of its own under its first entry."""

    items: Sequence[str | tuple[str, Sequence[str]]]


@dataclass(frozen=True)
class Table:
    """Rows of cells under a header."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Section:
    """A heading and what stands under it."""

    title: str
    blocks: Sequence[Paragraph | Bullets | Table]


def sections(report: Mapping[str, Any], others: Sequence[Mapping[str, Any]] = ()) -> list[Section]:
    """The whole report.

    Args:
        report: The run that it is about.
        others: Runs to compare its figures with.

    Returns:
        Its sections in order; those that have nothing to say are left out.
    """
    chosen = [privacy(report), _mechanism(report), _results(report, others), _parameters(report), _cost(report)]
    chosen += [_unprotected(report), _assumptions(report), _places(report), _versions(report)]
    return [section for section in chosen if section.blocks]


def privacy(report: Mapping[str, Any]) -> Section:
    """What the run promises.

    Args:
        report: The run.

    Returns:
        The section, also for a model card.
    """
    if not report["private"]:
        return Section("Privacy", [Paragraph(f"**NOT PRIVATE**: {report['not_private_because']}")])
    epsilon, spent, because = report["epsilon"], report["steps"], report["not_certified_because"]
    names = ("lower", "estimate", "upper")
    kind = "certified upper bound" if because is None else "upper bound, **NOT CERTIFIED**"
    blocks: list[Paragraph | Bullets | Table] = [
        Paragraph(
            f"**epsilon = {number(epsilon['upper'])} at delta = {epsilon['delta']:g}** ({kind}) "
            f"for {report['unit']}, added or removed, after {spent} steps"
        ),
        *([] if because is None else [Paragraph(f"**NOT CERTIFIED**: {because}.")]),
        Table(
            ("delta", "lower bound", "estimate", "upper bound"),
            [
                # Reports of earlier releases have no lower bound and no estimate at other deltas.
                (f"{row['delta']:g}", *(number(row[name]) if name in row else "" for name in names))
                for row in (epsilon, *report.get("epsilon_at", ()))
            ],
        ),
    ]
    directions = report.get("directions")
    if directions:
        blocks.append(
            Bullets([
                f"removing a unit: epsilon {number(directions['remove'])}; adding one: {number(directions['add'])}; "
                f"to {directions['dominates']} dominates"
            ])
        )
    return Section("Privacy", blocks)


def _mechanism(report: Mapping[str, Any]) -> Section:
    m, private = report["mechanism"], report["private"]
    items = [f"unit of privacy: {report['unit']}; relation: {report['neighboring_relation']}"]
    items += [_steps(report)]
    if report.get("discarded_steps"):
        items.append(
            f"discarded steps: {report['discarded_steps']} were begun and count, but did not reach these parameters"
        )
    items.append(
        f"{report['sampling']} sampling, q = {m['sample_rate']:.5f}: {m['expected_batch_size']:g} of N = "
        f"{m['num_records']} {'groups' if m.get('group_column') else 'records'} expected in a batch"
    )
    if private:
        kind = "exact norms" if m["sketch_dim"] is None else f"norms sketched with k = {m['sketch_dim']}"
        items.append(
            f"noise multiplier sigma = {m['noise_multiplier']:.4f}, clipping at C = {m['max_grad_norm']:g}, {kind} "
            f"(estimator {m['estimator']}, projection {m['projection']}, bound {m['bound']})"
        )
    if m.get("norm_slack"):
        items.append(
            f"precision {report.get('precision')}: the clipping threshold is lowered by {m['norm_slack']:.2%} of "
            "itself (norm_slack), the noise is not"
        )
    if report.get("on_nonfinite") == "drop":
        count = report["dropped_records"]
        items.append(
            "records whose gradient is not finite are dropped"
            + ("" if count is None else f": {count} times (counted from private data)")
        )
    if report["status"] != "finished":
        items.append(f"status: {report['status']}")
    blocks: list[Paragraph | Bullets | Table] = [Bullets(items)]
    blocks += _phases(report) + (_larger_sketch_dims(report) if private else [])
    return Section("Mechanism", blocks)


def _steps(report: Mapping[str, Any]) -> str:
    m, steps = report["mechanism"], report["steps"]
    if not report["private"]:
        return f"steps: {'not known' if steps is None else steps}, of {m['steps']}"
    allowance = m.get("crash_allowance", 0)
    budget = f"{m['steps'] + allowance} in the budget"
    if allowance:
        budget += f" ({m['steps']} to make, {allowance} that crashes may lose)"
    return f"steps: {steps} counted by the ledger, of {budget}"


def _phases(report: Mapping[str, Any]) -> list[Paragraph | Table]:
    phases, parents = report["phases"], report["forked_from"]
    found: list[Paragraph | Table] = []
    if len(phases) > 1:
        found.append(Paragraph("Phases: the mechanism changed on the way; the bounds above are of all steps together."))
        rows = [
            (
                str(i + 1),
                str(phase["steps"]),
                f"{phase['noise_multiplier']:.4f}",
                f"{phase['sample_rate']:.5f}",
                "exact" if phase.get("sketch_dim") is None else str(phase["sketch_dim"]),
            )
            for i, phase in enumerate(phases)
        ]
        found.append(Table(("phase", "steps", "sigma", "q", "k"), rows))
    if parents:
        names = ", ".join(f"run `{parent}`" for parent in parents)
        found.append(
            Paragraph(
                f"Fork: the run took over the steps of {names}. Publishing several continuations of one run costs the "
                "union of their steps, which is more than any one of their reports says."
            )
        )
    return found


def _larger_sketch_dims(report: Mapping[str, Any]) -> list[Paragraph | Table]:
    larger = report.get("larger_sketch_dims")
    if not larger:
        return []
    rows = [(str(report["mechanism"]["sketch_dim"]), number(report["epsilon"]["upper"]))]
    rows += [("exact" if r["sketch_dim"] is None else str(r["sketch_dim"]), number(r["upper"])) for r in larger]
    return [
        Paragraph("What a larger k would buy, with the same noise and steps:"),
        Table(("k", f"epsilon at delta = {report['epsilon']['delta']:g}"), rows),
    ]


def _results(report: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> Section:
    runs = (report, *others)
    earlier = report["metrics_by_checkpoint"]
    names = sorted({n for r in runs for n in r["metrics"]} | {n for c in earlier.values() for n in c["metrics"]})
    if not names:
        return Section("Results", [Paragraph("No validation or test figures yet.")])

    def figures(metrics: Mapping[str, Any]) -> list[str]:
        return [f"{float(metrics[n]):.3f}" if n in metrics else "" for n in names]

    def epsilon(run: Mapping[str, Any]) -> str:
        return number(run["epsilon"]["upper"]) if run["private"] else "not private"

    rows = [[_label(r), epsilon(r), *figures(r["metrics"]), _seconds(r)] for r in runs]
    for checkpoint, found in sorted(earlier.items()):
        step = "" if found["step"] is None else f", step {found['step']}"
        rows.append([f"{checkpoint}{step}", epsilon(report), *figures(found["metrics"]), ""])
    majority = report["data"].get("test_majority_class_accuracy")
    if majority is not None:
        cells = [f"{majority:.3f}" if n == "test/accuracy" else "" for n in names]
        rows.append(["always the majority class", "0", *cells, "0"])
    blocks: list[Paragraph | Table] = [Table(("run", "epsilon", *names, "seconds of training"), rows)]
    taken = report["metrics_step"] or {}
    if taken:
        at = ", ".join(f"{name} after step {step}" for name, step in sorted(taken.items()))
        blocks.append(Paragraph(f"Figures of {report['name']} were taken: {at}."))
    return Section("Results", blocks)


def _seconds(report: Mapping[str, Any]) -> str:
    cost = report.get("cost")
    return "" if cost is None else f"{cost['training_seconds']:.0f}"


def _label(report: Mapping[str, Any]) -> str:
    trained = report.get("trainable_parameters")
    if report["private"] and report["parameters"]:
        trained = sum(p["numel"] for p in report["parameters"])
    return report["name"] if trained is None else f"{report['name']} ({trained:,} parameters)"


def _parameters(report: Mapping[str, Any]) -> Section:
    items: list[tuple[str, Sequence[str]]] = []
    for title, wanted in (("sketched", True), ("exact", False)) if report["private"] and report["parameters"] else ():
        chosen = [p for p in report["parameters"] if (p["estimator"] != "exact") == wanted]
        total = sum(p["numel"] for p in chosen)
        items.append((
            f"{title}: {len(chosen)} tensors, {total:,} parameters",
            grouped([p["parameter"] for p in chosen]),
        ))
    return Section("Which norms were sketched", [Bullets(items)] if items else [])


def grouped(names: Sequence[str]) -> list[str]:
    """``a.4.q``, ``a.5.q`` -> ``a.{4,5}.q``, so that a deep model's list stays readable.

    Args:
        names: Parameter names.

    Returns:
        Fewer names.
    """
    groups: dict[tuple[str, ...], list[str]] = {}
    for name in names:
        parts = name.split(".")
        at = next((i for i, p in enumerate(parts) if p.isdigit()), None)
        # Only the first number may differ: what else is equal is the group's key.
        key = tuple("*" if i == at else p for i, p in enumerate(parts))
        groups.setdefault(key, []).append("" if at is None else parts[at])
    shown = []
    for key, numbers in groups.items():
        which = "{" + ",".join(numbers) + "}" if len(numbers) > 1 else numbers[0]
        shown.append(".".join(which if part == "*" else part for part in key))
    return shown


def _cost(report: Mapping[str, Any]) -> Section:
    cost = report.get("cost")
    # Reports of earlier releases have no such entry.
    picked = [report["memory"]["said"]] if report.get("memory") else []
    if cost is None:
        return Section("Cost", [Bullets(picked)] if picked else [])
    phases = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in cost["phases"].items())
    return Section(
        "Cost",
        [
            Bullets([
                *picked,
                f"step: {cost['median_step_seconds']:.2f} s (median of {cost['measured_steps']}); all: {phases}",
                f"peak memory of the process: {cost['peak_memory_bytes'] / 2**30:.2f} GiB ({cost['device']})",
            ])
        ],
    )


def _unprotected(report: Mapping[str, Any]) -> Section:
    names = report.get("logged_unprotected")
    if not report["private"]:
        return Section("", [])
    if names is None:
        said = "What was logged is not known: the run left no record of its settings."
    elif names:
        shown = ", ".join(f"`{name}`" for name in names)
        said = (
            f"Logged from private data without noise (privacy.log_unprotected=true), outside of epsilon: {shown}. Step "
            "times follow the sizes of the batches drawn, in this report too."
        )
    else:
        said = (
            "No figure of the training data was logged (privacy.log_unprotected=false). The times of files and log "
            "entries still tell how long steps took."
        )
    return Section(
        "Outside of the guarantee",
        [Paragraph(said)],
    )


def _assumptions(report: Mapping[str, Any]) -> Section:
    lines = list(report.get("assumptions") or ()) if report["private"] else []
    return Section("What the guarantee rests on", [Bullets(lines)] if lines else [])


def _places(report: Mapping[str, Any]) -> Section:
    return Section("Where things are", [Bullets([f"{name}: `{path}`" for name, path in report["paths"].items()])])


def _versions(report: Mapping[str, Any]) -> Section:
    found = ", ".join(f"{name} {number}" for name, number in report["versions"].items())
    return Section("Versions", [Paragraph(found)] if found else [])


def number(value: float | str | None) -> str:
    """A bound for people.

    Args:
        value: As JSON has it; None where it was not computed.

    Returns:
        Four decimals; words where there is no finite number.
    """
    if value is None:
        return "not computed"
    value = float(value)
    return "no finite bound" if value == float("inf") else f"{value:.4f}"
