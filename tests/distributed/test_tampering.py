"""Code of one's own that reaches into a step of an engine that shards: what would be unprotected is refused."""

import json
import re
from pathlib import Path

import pytest
from filelock import FileLock
from launcher import free_port, launch

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(900)]
WORKER = str(Path(__file__).with_name("tampering_worker.py"))

CLIPPED, CHANGED, OUTSIDE, ORDER = (
    r"UnclippedGradientError: .*not clipped",
    r"UnclippedGradientError: .*changed (after|between)",
    r"UnclippedGradientError: optimizer.step\(\) outside",
    r"UnsupportedModuleError: .*different orders",
)
REFUSED = {
    "before_the_update": CHANGED,
    "earlier_hook": CHANGED,
    "later_hook": CHANGED,
    "backward_of_its_own": CLIPPED,
    "second_backward": CLIPPED,
    "second_step": r"StepOrderError: .*exactly one update",
    "step_outside": OUTSIDE,
    "step_of_the_inner_one": OUTSIDE,
    "step_before": r"(StepOrderError|UnclippedGradientError): .*optimizer.step\(\)",
    "freezes_within": r"StepOrderError: the parameters changed",
    "gradient_hook": r"UnclippedGradientError: .*has a gradient hook",
    "crossed": ORDER,
}
MORE = {
    "after_backward": CHANGED,
    "crossed_frozen": ORDER,
    "reduce_hook": r"UnclippedGradientError: set_all_reduce_hook\(\)",
    "adagrad": r"ConfigurationError: .*makes a Adagrad of its own",
}
# FSDP1 never calls a hook of a slice.
CELLS = {
    "fsdp2": [*REFUSED, "after_backward", "crossed_frozen", "reduce_hook", "drop"],
    "fsdp": [*(name for name in REFUSED if name != "gradient_hook"), "after_backward", "crossed_frozen", "drop"],
    "zero1": [
        "before_the_update",
        "earlier_hook",
        "second_backward",
        "second_step",
        "step_outside",
        "step_before",
        "adagrad",
        "drop",
    ],
    "zero2": [*REFUSED, "adagrad", "drop"],
    "zero3": [*REFUSED, "adagrad", "crossed_frozen", "drop"],
}


@pytest.fixture(scope="session")
def outcome(tmp_path_factory, worker_id):
    """What each rank said, by engine and cell; one launch per engine."""
    base = tmp_path_factory.getbasetemp()
    base = base if worker_id == "master" else base.parent

    def of(engine: str, cell: str) -> list[dict]:
        place = base / f"tampering-{engine}"
        with FileLock(f"{place}.lock"):
            if not (place / "done").exists():
                place.mkdir()
                cells = [f"{name}={free_port()}" for name in CELLS[engine]]
                launch(2, [WORKER, engine, str(place), "2", *cells], place / "logs", limit=800).check()
                (place / "done").touch()
        files = [place / f"{cell}.{rank}.json" for rank in range(2)]
        assert all(file.exists() for file in files), f"{cell} hangs"
        return [json.loads(file.read_text()) for file in files]

    return of


def cells(*names):
    return [(engine, cell) for engine, all_of_it in CELLS.items() for cell in all_of_it if cell in names]


@pytest.mark.parametrize(("engine", "cell"), cells(*REFUSED, *MORE))
def test_it_is_refused_on_every_rank(outcome, engine, cell):
    wanted = MORE.get(cell) or REFUSED[cell]
    for rank in outcome(engine, cell):
        assert "error" in rank, f"it trained: {rank}"
        told = f"{rank['error']}: {rank['message']}"
        assert re.search(wanted, told), told


@pytest.mark.parametrize(("engine", "cell"), cells("drop"))
def test_a_bad_record_leaves_the_others(outcome, engine, cell):
    first, second = outcome(engine, cell)
    assert first == second and first["finite"] and first["moved"] > 1e-3, (first, second)
