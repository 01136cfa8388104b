"""validate and test give the same figures under every engine: before a fit, within it, after it, from a checkpoint."""

import json
from pathlib import Path

import pytest
from filelock import FileLock
from launcher import launch

pytestmark = pytest.mark.timeout(600)
WORKER = str(Path(__file__).with_name("evaluating_worker.py"))
ENGINES = ["ddp", "fsdp2", "fsdp2_sharded", "fsdp", "zero1", "zero2", "zero3"]


def evaluate(engine: str, folder: Path, world_size: int) -> dict[str, float]:
    launch(world_size, [WORKER, engine, str(folder), str(world_size)], folder / "logs").check()
    return json.loads((folder / "found.json").read_text())


@pytest.fixture(scope="session")
def expected(tmp_path_factory, worker_id):
    """Of one process; made once for all test workers."""
    base = tmp_path_factory.getbasetemp()
    place = (base if worker_id == "master" else base.parent) / "evaluation-single"
    with FileLock(f"{place}.lock"):
        if not (place / "found.json").exists():
            evaluate("single", place, 1)
    return json.loads((place / "found.json").read_text())


@pytest.mark.parametrize("engine", ENGINES)
def test_all_figures_equal_those_of_one_process(engine, expected, tmp_path):
    found = evaluate(engine, tmp_path, 2)
    assert abs(expected["untrained"] - expected["tested"]) > 1e-3, "the steps must change the figures"
    # What a checkpoint was exported to is the very weights.
    assert found.pop("exported", 0) == 0
    assert found == {name: pytest.approx(expected[name], abs=1e-6) for name in found}
    missing = {"exported", "from a checkpoint"} if engine == "fsdp" else {"exported"}
    assert set(found) == set(expected) - missing
