"""The model card of an exported model: what it is, and what its training promises to whom."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dprc_lightning.report.markdown import section_markdown
from dprc_lightning.report.sections import Bullets, Paragraph, Section, privacy


@dataclass(frozen=True)
class Contents:
    """What an exported folder has, and what it has not.

    Attributes:
        model_class: Name of the model's class; of the base model's, for an adapter.
        is_adapter: Whether the folder has an adapter alone.
        base_model: What the model was loaded from; empty if that is not known.
        num_layers: Layers of the (base) model; None if it does not say.
        beside: Names and shapes of the tensors that are no part of the model.
        beside_file: The file that has them; None if they were left out.
        has_tokenizer: Whether a tokenizer is in the folder.
    """

    model_class: str
    is_adapter: bool
    base_model: str
    num_layers: int | None
    beside: Mapping[str, tuple[int, ...]]
    beside_file: str | None
    has_tokenizer: bool


def model_card(report: Mapping[str, Any], contents: Contents, *, checkpoint: str, step: int | None) -> str:
    """The card.

    Guarantee: it claims what the report claims, and no more; a run that was not private is called so.

    Args:
        report: The run's.
        contents: What the folder has.
        checkpoint: The checkpoint's name.
        step: How many steps its parameters have had; None if that is not known.

    Returns:
        README.md.
    """
    said = "with differential privacy" if report["private"] else "**without** differential privacy"
    by = f"dprc-lightning {report['versions'].get('dprc-lightning', '')}".strip()
    sections = [privacy(report), _mechanism(report), _contents(contents, checkpoint, step)]
    head = yaml.safe_dump(_metadata(report, contents), sort_keys=False, allow_unicode=True)
    intro = f"# {report['name']}\n\nA {contents.model_class}, fine-tuned {said} by {by}."
    return "\n\n".join([f"---\n{head}---", intro, *map(section_markdown, sections)]) + "\n"


def _metadata(report: Mapping[str, Any], contents: Contents) -> dict[str, Any]:
    found: dict[str, Any] = {"library_name": "peft" if contents.is_adapter else "transformers"}
    if contents.base_model and not Path(contents.base_model).exists():
        found["base_model"] = contents.base_model
    if not report["private"]:
        return found | {"tags": ["not-private"], "differential_privacy": False}
    epsilon, m = report["epsilon"], report["mechanism"]
    return found | {
        "tags": ["differential-privacy", "dp-sgd"],
        "differential_privacy": {
            "epsilon": float(epsilon["upper"]),
            "delta": epsilon["delta"],
            "certified": report["certified"],
            "unit": report["unit"],
            "neighboring_relation": report["neighboring_relation"],
            "phases": [
                {"noise_multiplier": phase["noise_multiplier"], "steps": phase["steps"]} for phase in report["phases"]
            ],
            "max_grad_norm": m["max_grad_norm"],
            "sample_rate": m["sample_rate"],
            "steps": report["steps"],
            "sketch_dim": m["sketch_dim"],
            "projection": m["projection"],
        },
    }


def _mechanism(report: Mapping[str, Any]) -> Section:
    if not report["private"]:
        said = "Nothing protects the training data: the weights may reveal it."
        return Section("What that means", [Paragraph(said)])
    m = report["mechanism"]
    kind = "exact per-record norms"
    if m["sketch_dim"] is not None:
        kind = f"norms sketched with k = {m['sketch_dim']} (projection {m['projection']})"
    lines = [
        "DP-SGD with randomized clipping (arXiv 2605.24879)",
        f"{report['sampling']} sampling at q = {m['sample_rate']:.5f} of N = {m['num_records']}, clipping at C = "
        f"{m['max_grad_norm']:g} with {kind}",
        *(
            f"{phase['steps']} steps with noise multiplier {phase['noise_multiplier']:.4f}"
            for phase in report["phases"]
        ),
        "epsilon covers every step of the training run, and so all of its checkpoints together, not this one alone",
        *report["assumptions"],
    ]
    return Section("Mechanism and assumptions", [Bullets(lines)])


def _contents(contents: Contents, checkpoint: str, step: int | None) -> Section:
    layers = "" if contents.num_layers is None else f" with {contents.num_layers} layers"
    model = f"{contents.model_class}{layers}"
    origin = f" loaded from `{_origin(contents.base_model)}`" if contents.base_model else ""
    items = [
        f"checkpoint `{checkpoint}`" + ("" if step is None else f", after step {step}"),
        f"the adapter alone; its base is a {model}{origin}, and no other will do"
        if contents.is_adapter
        else f"the whole {model}",
        "the tokenizer"
        if contents.has_tokenizer
        else f"NOT in this folder: a tokenizer; take that of the base{origin}",
    ]
    shapes = [f"`{name}` {list(shape)}" for name, shape in contents.beside.items()]
    blocks: list[Paragraph | Bullets] = []
    if shapes and contents.beside_file:
        said = f"`{contents.beside_file}`: tensors that are no part of the {contents.model_class}, such as a task head;"
        blocks = [Bullets([*items, (f"{said} load them into a module of your own", shapes)])]
    elif shapes:
        blocks = [Bullets([*items, ("NOT in this folder: what else the trained module has", shapes)])]
    else:
        blocks = [Bullets(items)]
    return Section("What is in this folder", blocks)


def _origin(base_model: str) -> str:
    # A path tells of the machine, and nothing to anybody else.
    return Path(base_model).name if Path(base_model).exists() else base_model
