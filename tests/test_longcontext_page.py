"""docs/longcontext.md: its links, its figures, its settings, and its numbers by simulation."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import yaml

from dprc_lightning.bench.projection import LayerShape
from dprc_lightning.config import PerformanceConfig

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "figures"
PAGE = (ROOT / "docs" / "longcontext.md").read_text()
README = (ROOT / "README.md").read_text()


@pytest.fixture(scope="module")
def figures():
    spec = importlib.util.spec_from_file_location("longcontext_figures", FOLDER / "longcontext.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def cells(row, text):
    """Numbers of a table's row, by its beginning."""
    (line,) = [line for line in text.splitlines() if line.startswith(f"| {row} |")]
    return [float(cell) for cell in line.strip("|").split("|")[1:] if re.fullmatch(r" *[0-9.]+ *", cell)]


ROWS = {
    "not private, checkpointed": "not private, checkpointed",
    "private, checkpointed": "private, checkpointed",
    "private, + head in blocks, MLP in pieces of 4096": "+ head and MLP in pieces",
    "private, + checkpoints on the host (8 GiB at 131072)": "+ checkpoints on the host",
    "private LoRA r = 8, in pieces": "LoRA r=8, in pieces",
    "private LoRA r = 8, checkpoints on the host": "LoRA r=8, on the host too",
}


def test_links_and_figures(figures):
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", PAGE)
    assert links and all((ROOT / "docs" / link).exists() for link in links if "://" not in link)
    shown = set(re.findall(r"!\[[^]]+\]\(figures/(\w+)\.svg\)", PAGE))
    assert shown == set(figures.FIGURES)
    for name in shown:
        assert f"docs/figures/longcontext.py {name}`" in PAGE, "the caption gives the command"
        assert f"(figures/{name}.png)" in PAGE and (FOLDER / f"{name}.svg").stat().st_size < 60_000
    assert "docs/longcontext.md" in README


def test_settings_exist():
    for name in re.findall(r"`performance\.(\w+)", PAGE):
        assert hasattr(PerformanceConfig(), name), name
    for snippet in re.findall(r"^```yaml\n(.*?)^```", PAGE, flags=re.MULTILINE | re.DOTALL):
        assert not PerformanceConfig(**yaml.safe_load(snippet)["performance"]).problems()


def test_the_readme_shows_the_same_table():
    for row in ROWS:
        assert cells(row, README) == cells(row, PAGE)[:3]


@pytest.mark.parametrize(
    ("row", "place", "tokens"),
    [(row, 0, 4096) for row in ROWS] + [("private, + head in blocks, MLP in pieces of 4096", 1, 32768)],
)
def test_peaks(row, place, tokens, figures, monkeypatch):
    monkeypatch.setattr(figures, "LINES", {ROWS[row]: figures.LINES[ROWS[row]]})
    ((_, (peak,)),) = figures.memory_by_context(tokens=[tokens]).values()
    assert f"{peak:.2f}" == f"{cells(row, PAGE)[place]:.2f}"


def test_memory_by_sketch(figures):
    """The table's lines are for sizes that take minutes; here that the curves part, and where."""
    kept, anew = figures.memory_by_sketch([32, 512], LayerShape(rows=20_000, other=256, tokens=64)).values()
    assert kept[0] == anew[0] == [32, 512]
    assert kept[1][1] > 20_000 * 512 * 4 / 2**20 > anew[1][1]


def test_both_are_drawn_alike_everywhere(figures, tmp_path):
    curves = {"a": ([4096, 8192], [1.0, 2.0])}
    for name in figures.FIGURES:
        figures.draw(name, curves, tmp_path)
        first = (tmp_path / f"{name}.svg").read_bytes()
        figures.draw(name, curves, tmp_path)
        assert (tmp_path / f"{name}.svg").read_bytes() == first
