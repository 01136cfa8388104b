"""Noise multipliers that another implementation found, each to be met within 0.3 percent."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dprc_lightning.accounting import StepEvent
from dprc_lightning.accounting.accountant import upper_bounds
from dprc_lightning.accounting.grid import FINE
from dprc_lightning.accounting.privacy_loss import UpperBound

ROWS = json.loads((Path(__file__).parent / "noise_multipliers.json").read_text())["rows"]


def _cells() -> list[Any]:
    cells = []
    for row in ROWS:
        setting = (row["sample_rate"], row["steps"], row["epsilon"], row["delta"])
        name = f"q{row['sample_rate']:.3g}-T{row['steps']}-eps{row['epsilon']:g}"
        cells.append(pytest.param(*setting, None, "best", row["exact"], id=f"{name}-exact"))
        for k, values in row["sketch_dim"].items():
            for bound, value in values.items():
                cells.append(pytest.param(*setting, int(k), bound, value, id=f"{name}-k{k}-{bound}"))
    return cells


def test_the_table_is_whole() -> None:
    assert len(_cells()) == 44


@pytest.mark.parametrize(("sample_rate", "steps", "target", "delta", "sketch_dim", "bound", "reference"), _cells())
def test_reference_cell(
    sample_rate: float,
    steps: int,
    target: float,
    delta: float,
    sketch_dim: int | None,
    bound: str,
    reference: float,
) -> None:
    def bounds(sigma: float) -> Iterator[UpperBound]:
        return upper_bounds([(StepEvent(sigma, sample_rate, sketch_dim, bound=bound), steps)], delta, FINE)

    # The smallest sufficient noise multiplier lies between these two: the reference suffices, rounded up in its last
    # digit, and is at most 0.3 percent too large.
    assert min(b.epsilon() for b in bounds(1.00015 * reference)) <= target
    # That less noise does not suffice may be told by the faster composition: it is the tighter or equal one.
    assert min(b.fast_epsilon(b.composers()) for b in bounds(0.997 * reference)) > target


def test_the_cells_say_that_a_larger_sketch_needs_less_noise_and_more_than_exact_clipping() -> None:
    for row in ROWS:
        for bound in ("envelope", "convex"):
            values = [cell[bound] for _, cell in sorted(row["sketch_dim"].items(), key=lambda item: int(item[0]))]
            assert values == sorted(values, reverse=True)
            assert values[-1] > row["exact"]
        assert all(cell["convex"] < cell["envelope"] for cell in row["sketch_dim"].values())
