"""docs/accounting.md: its examples run, its tables are the numbers of the tests, its links lead somewhere."""

import doctest
import json
import re
from pathlib import Path

import pytest

from dprc_lightning.accounting.law import GaussianConvexLaw
from dprc_lightning.accounting.slack import CONVEX_MIN_NOISE_MULTIPLIER, divergence_slack

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "accounting.md"
TEXT = PAGE.read_text()
EXAMPLES = re.findall(r"^```pycon\n(.*?)^```", TEXT, flags=re.MULTILINE | re.DOTALL)


def test_the_examples_say_what_they_say() -> None:
    assert len(EXAMPLES) >= 4
    # One session for all blocks, as a reader would type it.
    test = doctest.DocTestParser().get_doctest("\n".join(EXAMPLES), {}, PAGE.name, str(PAGE), 0)
    said: list[str] = []
    results = doctest.DocTestRunner(verbose=False).run(test, out=said.append)
    assert results.failed == 0, "".join(said)
    assert results.attempted >= 15


def test_the_table_of_noise_multipliers_is_the_tests() -> None:
    rows = json.loads((Path(__file__).parent / "noise_multipliers.json").read_text())["rows"]
    assert len(rows) == 4
    for row in rows:
        cells = [f"{row['sample_rate']:.4g}", row["steps"], row["epsilon"], row["delta"], f"{row['exact']:#.4g}"]
        cells += [f"{cell['envelope']:#.4g} / {cell['convex']:#.4g}" for cell in row["sketch_dim"].values()]
        assert "| " + " | ".join(str(cell) for cell in cells) + " |" in TEXT


def test_the_table_of_slacks_is_computed() -> None:
    for name, sigma in (("12^(-1/2)", CONVEX_MIN_NOISE_MULTIPLIER), ("0.35", 0.35), ("0.5", 0.5), ("1", 1.0)):
        cells = [f"{divergence_slack(GaussianConvexLaw(k), sigma):.1e}" for k in (1, 4, 8, 16, 32, 64)]
        assert f"| {name} | " + " | ".join(cells) + " |" in TEXT


def test_files_and_names_that_the_page_mentions_exist() -> None:
    for target in re.findall(r"\]\((?!http|#)([^)#]+)", TEXT):
        assert (PAGE.parent / target).exists(), target
    for name in re.findall(r"`(?:tests/accounting/)?(test_\w+\.py)`", TEXT):
        assert (ROOT / "tests" / "accounting" / name).exists(), name
    # [`file.py: first, second`](path) names functions or classes of that file.
    named = re.findall(r"\[`[\w.]+: ([\w., ]+)`\]\(([^)]+)\)", TEXT)
    assert len(named) >= 10
    for names, target in named:
        source = (PAGE.parent / target).read_text()
        for name in re.split(r",\s*", names):
            assert re.search(rf"^\s*(def|class) {name.split('.')[-1]}\b", source, flags=re.MULTILINE), (name, target)


@pytest.mark.parametrize("anchor", sorted(set(re.findall(r"\]\(#([^)]+)\)", TEXT))))
def test_anchors_lead_to_headings(anchor: str) -> None:
    headings = re.findall(r"^#+ (.+)$", TEXT, flags=re.MULTILINE)
    assert anchor in {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_mathematics_is_balanced_and_kept_simple() -> None:
    plain = re.sub(r"^```.*?^```", "", TEXT, flags=re.MULTILINE | re.DOTALL)
    for paragraph in plain.split("\n\n"):
        assert paragraph.count("$") % 2 == 0, paragraph[:80]
    assert TEXT.count("```math") >= 6
    # What GitHub refuses, or takes for a table's cell.
    assert not re.search(r"\\(operatorname|tag|newcommand|def)\b", TEXT)
    for line in TEXT.splitlines():
        assert not (line.startswith("|") and "$" in line), line
        assert len(line) <= 120 or line.startswith("|") or "\\" in line, line
    # A formula that a line break cuts in two could begin with a minus, and be a list.
    assert all(line.count("$") % 2 == 0 for line in plain.splitlines() if not line.startswith("```"))
