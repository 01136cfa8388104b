"""The report as Markdown."""

from collections.abc import Mapping, Sequence
from typing import Any

from dprc_lightning.report.sections import Bullets, Paragraph, Section, Table, sections


def to_markdown(report: Mapping[str, Any], others: Sequence[Mapping[str, Any]] = ()) -> str:
    """The report for people.

    Args:
        report: The run that the report is about.
        others: Runs to compare its figures with.

    Returns:
        Markdown.
    """
    return "# Training report\n\n" + "\n\n".join(section_markdown(s) for s in sections(report, others)) + "\n"


def section_markdown(section: Section) -> str:
    """One section.

    Args:
        section: What to write down.

    Returns:
        Markdown without a newline at its end.
    """
    return "\n\n".join([f"## {section.title}", *(_block(block) for block in section.blocks)])


def _block(block: Paragraph | Bullets | Table) -> str:
    if isinstance(block, Paragraph):
        return _line(block.text)
    if isinstance(block, Table):
        rows = [block.header, ["---"] * len(block.header), *block.rows]
        return "\n".join("| " + " | ".join(_line(cell).replace("|", "\\|") for cell in row) + " |" for row in rows)
    lines = []
    for item in block.items:
        text, under = (item, ()) if isinstance(item, str) else item
        lines += [f"* {_line(text)}", *(f"    * {_line(entry)}" for entry in under)]
    return "\n".join(lines)


def _line(text: str) -> str:
    # A newline in a name or a path would end the list or the table that it stands in.
    return " ".join(text.split("\n"))
