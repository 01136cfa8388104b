"""The figures of docs/accounting.md: their data on small settings, and that what is drawn is what the page shows."""

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from scipy import stats

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "figures"
PAGE = (ROOT / "docs" / "accounting.md").read_text()


@pytest.fixture(scope="module")
def figures() -> ModuleType:
    spec = importlib.util.spec_from_file_location("accounting_figures", FOLDER / "accounting.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_every_figure_is_on_the_page_and_every_file_is_drawn(figures: ModuleType) -> None:
    shown = set(re.findall(r"!\[[^]]+\]\(figures/(\w+)\.svg\)", PAGE))
    assert shown == set(figures.FIGURES)
    assert shown <= {path.stem for path in FOLDER.glob("*.svg")}
    for name in shown:
        assert f"docs/figures/accounting.py {name}`" in PAGE, "the caption gives the command"
        assert f"(figures/{name}.png)" in PAGE
        assert (FOLDER / f"{name}.svg").stat().st_size < 60_000


def test_two_weights_peak_inside(figures: ModuleType) -> None:
    curves = figures.two_weights(levels=(1.25, 1.6), points=51)
    a, above = curves["t = 1.25"]
    best = int(np.argmax(above))
    assert above[best] > 7e-3 and 0.7 < a[best] < 0.9
    assert max(above[0], above[-1]) == 0.0
    # One point from scipy: the ends are chi-squares of two and of four degrees of freedom.
    ends = stats.chi2.cdf(2 * 1.25, 2), stats.chi2.cdf(4 * 1.25, 4)
    assert above[-1] - above[0] == pytest.approx(ends[0] - ends[1], abs=1e-12)
    a, above = curves["t = 1.6"]
    assert int(np.argmax(above)) == 0


def test_envelopes_are_above_what_they_envelop(figures: ModuleType) -> None:
    finite, free, single, equal = (y for _, y in figures.envelopes(k=2, d=3, points=24).values())
    assert np.all(free >= finite - 1e-12)
    assert np.all(finite >= np.maximum(single, equal) - 1e-9)
    assert np.any(finite > np.maximum(single, equal) + 5e-3)


def test_curves_of_one_run_agree(figures: ModuleType) -> None:
    trade_offs = figures.trade_offs(sketches=(None, 32), points=11)
    exact, sketched, _ = (y for _, y in trade_offs.values())
    assert np.all(np.diff(exact) <= 0) and exact[0] == pytest.approx(1.0) and exact[-1] == pytest.approx(0.0)
    assert np.all(sketched <= exact + 1e-9)
    privacy = figures.privacy_curves(sketches=(32,), points=5)
    epsilon, delta = privacy["k = 32"]
    # The line of each (epsilon, delta) lies below the trade-off function.
    alpha = next(iter(trade_offs.values()))[0]
    for e, d in zip(epsilon, delta, strict=True):
        assert np.all(sketched >= 1 - d - np.exp(e) * alpha - 1e-5)


def test_overheads_are_percentages_of_calibrated_noise(
    figures: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the noise multipliers that another implementation found in place of a minute of calibrations."""
    rows = json.loads((Path(__file__).parent / "noise_multipliers.json").read_text())["rows"]

    def known(*, sketch_dim: int | None, bound: str, **setting: float) -> float:
        (row,) = [row for row in rows if all(row[name] == value for name, value in setting.items())]
        if sketch_dim is None:
            return row["exact"]
        return row["sketch_dim"][str(sketch_dim)]["convex" if bound == "best" else bound]

    monkeypatch.setattr(figures, "calibrate_noise_multiplier", known)
    curves = figures.overhead_by_sketch(dims=(16, 32))
    assert [list(x) for x, _ in curves.values()] == 4 * [[16, 32]]
    np.testing.assert_allclose(curves["epsilon 0.7, convex order"][1], [7.97, 3.69], atol=0.01)
    np.testing.assert_allclose(curves["epsilon 9, envelope"][1], [26.6, 10.4], atol=0.05)
    assert len(capsys.readouterr().out) == 10, "a dot for each calibration"


def test_overhead_by_rate_calibrates_for_twenty_passes(figures: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def known(*, sketch_dim: int | None, **setting: float) -> float:
        asked.append((sketch_dim, setting["sample_rate"], setting["steps"]))
        return 1.0 if sketch_dim is None else 1.0 + 1.0 / sketch_dim

    monkeypatch.setattr(figures, "calibrate_noise_multiplier", known)
    curves = figures.overhead_by_rate(rates=(0.003, 1.0), dims=(50, 200))
    assert asked == [(k, *setting) for setting in ((0.003, 6667), (1.0, 20)) for k in (None, 50, 200)]
    assert curves["k = 50"][1] == pytest.approx([2.0, 2.0]) and curves["k = 200"][1] == pytest.approx([0.5, 0.5])


def test_drawing_is_deterministic(figures: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "again").mkdir()
    curves = figures.two_weights(points=21)
    figures.draw("two_weights", curves, tmp_path)
    figures.draw("two_weights", curves, tmp_path / "again")
    for suffix in ("svg", "png"):
        first = (tmp_path / f"two_weights.{suffix}").read_bytes()
        assert first == (tmp_path / "again" / f"two_weights.{suffix}").read_bytes()


def test_an_unknown_figure_is_refused_by_name(figures: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        figures.main(["nonesuch"])
    assert "unknown figure 'nonesuch'" in capsys.readouterr().err
