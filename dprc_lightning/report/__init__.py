"""The report of a run: what it promises, what it measured, and where everything lies.

`facts` says what is so, `bounds` what it costs, `files` keeps it, `sections` puts it into words, and `markdown` and
`html` write the words down. Nothing here imports torch: ``dprc report`` starts at once.
"""

from dprc_lightning.report.facts import FORMAT_VERSION, assemble, versions
from dprc_lightning.report.files import (
    HTML_NAME,
    JSON_NAME,
    MARKDOWN_NAME,
    START_NAME,
    read_report,
    write_report,
    write_start,
)
from dprc_lightning.report.html import to_html
from dprc_lightning.report.markdown import to_markdown

__all__ = [
    "FORMAT_VERSION",
    "HTML_NAME",
    "JSON_NAME",
    "MARKDOWN_NAME",
    "START_NAME",
    "assemble",
    "read_report",
    "to_html",
    "to_markdown",
    "versions",
    "write_report",
    "write_start",
]
