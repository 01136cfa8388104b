"""The report as one HTML file that needs nothing else: no script, no style sheet, no font from elsewhere."""

import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from dprc_lightning.report.sections import Bullets, Paragraph, Section, Table, sections

_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 52rem; margin: 0 auto; padding: 1rem; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; border-bottom: 1px solid #8886; }
.wide { overflow-x: auto; } table { border-collapse: collapse; }
th, td { padding: .3rem .7rem; text-align: left; border-bottom: 1px solid #8884; overflow-wrap: normal; }
code { font-size: .9em; } ul { padding-left: 1.2rem; }
""".strip()


def to_html(report: Mapping[str, Any], others: Sequence[Mapping[str, Any]] = ()) -> str:
    """The report for a browser, from the same sections as the Markdown.

    Args:
        report: The run that the report is about.
        others: Runs to compare its figures with.

    Returns:
        A whole document; whatever stands in the report is escaped.
    """
    title = escape(f"Training report: {report['name']}")
    body = "\n".join(_section(section) for section in sections(report, others))
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>\n{_STYLE}\n</style>\n</head>\n<body>\n<h1>{title}</h1>\n{body}\n"
        "</body>\n</html>\n"
    )


def _section(section: Section) -> str:
    return "\n".join([f"<h2>{_inline(section.title)}</h2>", *(_block(block) for block in section.blocks)])


def _block(block: Paragraph | Bullets | Table) -> str:
    if isinstance(block, Paragraph):
        return f"<p>{_inline(block.text)}</p>"
    if isinstance(block, Table):
        head = "".join(f"<th>{_inline(cell)}</th>" for cell in block.header)
        rows = "\n".join("<tr>" + "".join(f"<td>{_inline(c)}</td>" for c in row) + "</tr>" for row in block.rows)
        return f'<div class="wide"><table>\n<tr>{head}</tr>\n{rows}\n</table></div>'
    return "<ul>\n" + "\n".join(_item(item) for item in block.items) + "\n</ul>"


def _item(item: str | tuple[str, Sequence[str]]) -> str:
    if isinstance(item, str):
        return f"<li>{_inline(item)}</li>"
    text, under = item
    inner = "".join(f"<li>{_inline(entry)}</li>" for entry in under)
    return f"<li>{_inline(text)}" + (f"<ul>{inner}</ul>" if inner else "") + "</li>"


def _inline(text: str) -> str:
    # Escaped first: what the two marks turn into tags is ours alone.
    marked = re.sub(r"`([^`]*)`", r"<code>\1</code>", escape(text))
    return re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", marked)
