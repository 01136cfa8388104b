"""What the ranks send each other: nothing in the norm pass but parameters, and never a projection or a sketch."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from communicating_worker import SHAPE, SKETCH_DIMS, STRATEGIES, Tagging
from filelock import FileLock
from launcher import launch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from dprc_lightning.bench.communication import Collective, CommunicationCounter, totals

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(600)]
WORKER = str(Path(__file__).with_name("communicating_worker.py"))
JOBS = {"torch": ["ddp", "fsdp", "fsdp2", "fsdp2_kept"], "deepspeed": ["zero2", "zero3"]}
PRIVATE = [f"k={k}" for k in SKETCH_DIMS]
UNITS = SHAPE.layers + 1
MICRO_BATCHES = 2


@pytest.fixture(scope="module")
def found_by(tmp_path_factory, worker_id):
    """From a strategy to what each rank noted. One launch for torch's engines and one for DeepSpeed's."""
    base = tmp_path_factory.getbasetemp()
    base = base if worker_id == "master" else base.parent

    def found(name: str) -> list[dict]:
        job = next(job for job, names in JOBS.items() if name in names)
        place = base / f"communication-{job}"
        with FileLock(f"{place}.lock"):
            if not (place / "done").exists():
                launch(2, [WORKER, str(place), *JOBS[job]], place / "logs", limit=500).check()
                (place / "done").touch()
        return [json.loads((place / f"rank{rank}.json").read_text())[name] for rank in range(2)]

    return found


def calls(run: dict, which: str = "last") -> list[Collective]:
    return [Collective(**{**call, "sizes": tuple(call["sizes"])}) for call in run[which]]


def by_phase(run: dict, kind: str) -> Counter:
    return Counter(call.phase for call in calls(run) if call.floating and call.kind == kind)


@pytest.mark.parametrize("name", STRATEGIES)
def test_the_norm_pass_reduces_nothing(found_by, name):
    for ranks in found_by(name):
        assert any(call.reduces and call.phase == "clipped_backward" for call in calls(ranks["plain"]))
        for kind in PRIVATE:
            # In any step, the first one too.
            inside = [call for call in calls(ranks[kind], "all") if call.phase == "norm_pass"]
            assert all(call.gathers or (not call.floating and call.bytes <= 8) for call in inside)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_private_step_reduces_what_a_non_private_one_does(found_by, name):
    """Gradients once for each micro-batch under ZeRO, once for each step elsewhere; and some figures to be logged."""
    for ranks in found_by(name):
        plain, *private = ([call for call in calls(ranks[kind]) if call.reduces] for kind in ["plain", *PRIVATE])
        assert private == [plain, plain]
        gradients = sum(c.bytes for c in calls(ranks["plain"]) if c.reduces and c.phase == "clipped_backward")
        assert gradients == ranks["plain"]["model_bytes"] * (MICRO_BATCHES if name.startswith("zero") else 1)


@pytest.mark.parametrize("name", STRATEGIES)
def test_no_collective_carries_a_projection_or_a_sketch(found_by, name):
    for ranks in found_by(name):
        for kind in PRIVATE:
            assert ranks[kind]["marked"] > 100, "projections and sketches were made"
            assert ranks[kind]["carried"] == []
        # Whatever held a part of one, a bucket too, would be of another size for another k.
        first, second = (calls(ranks[kind], "all") for kind in PRIVATE)
        assert first == second and len(first) > 10


@pytest.mark.parametrize("name", STRATEGIES)
def test_what_ranks_agree_on_takes_a_few_bytes(found_by, name):
    for ranks in found_by(name):
        for kind in ["plain", *PRIVATE]:
            told = [call for call in calls(ranks[kind]) if not call.floating]
            assert 0 < len(told) <= 2 + 2 * MICRO_BATCHES and all(call.bytes <= 32 for call in told)


@pytest.mark.parametrize("name", ["fsdp", "fsdp2"])
def test_gathers_of_full_sharding(found_by, name):
    """Layers three times for two; the root, which keeps its weights from the forward on, once for once."""
    layers = UNITS - 1
    for ranks in found_by(name):
        once = {"forward": MICRO_BATCHES * UNITS, "clipped_backward": MICRO_BATCHES * layers}
        assert by_phase(ranks["plain"], "all_gather") == once
        for kind in PRIVATE:
            assert by_phase(ranks[kind], "all_gather") == once | {"norm_pass": MICRO_BATCHES * layers}


def test_gathers_without_reshard_after_forward(found_by):
    for ranks in found_by("fsdp2_kept"):
        for kind in ["plain", *PRIVATE]:
            assert by_phase(ranks[kind], "all_gather") == {"forward": MICRO_BATCHES * UNITS}


def test_gathers_of_zero(found_by):
    for ranks in found_by("zero2"):
        for kind in ["plain", *PRIVATE]:
            # The new parameters, once.
            assert by_phase(ranks[kind], "all_gather") == {"optimizer": 1}
    for ranks in found_by("zero3"):
        plain = by_phase(ranks["plain"], "all_gather")
        assert plain["norm_pass"] == 0 < plain["forward"] == plain["clipped_backward"]
        for kind in PRIVATE:
            found = by_phase(ranks[kind], "all_gather")
            assert found["forward"] == found["norm_pass"] == plain["forward"]
            # The embedding's weight is not asked for in its backward.
            assert 0.9 * plain["forward"] < found["clipped_backward"] <= plain["forward"]


# The counter itself -------------------------------------------------------------------------------------------------


@pytest.fixture
def alone(tmp_path):
    """A process group of this process."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_kinds_phases_sizes_and_bytes(alone):
    phase = ["first"]
    x = torch.ones(6)
    with CommunicationCounter(lambda: phase[0]) as counter:
        dist.all_reduce(x)
        dist.all_gather_into_tensor(torch.empty(6), x)
        dist.all_gather([torch.empty(6)], x)
        phase[0] = "second"
        dist.reduce_scatter_tensor(torch.empty(6), x)
        dist.broadcast(x.double(), 0)
        dist.all_reduce(torch.ones(3, dtype=torch.int64))
        dist.barrier()
        dist.all_reduce(x, async_op=True).wait()
        torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce(x, "sum", "0"))
    assert [(c.kind, c.phase, c.floating, c.bytes) for c in counter.calls] == [
        ("all_reduce", "first", True, 24),
        ("all_gather", "first", True, 24),
        ("all_gather", "first", True, 24),
        ("reduce_scatter", "second", True, 24),
        ("broadcast", "second", True, 48),
        ("all_reduce", "second", False, 24),
        ("barrier", "second", False, counter.calls[6].bytes),
        ("all_reduce", "second", True, 24),
        ("all_reduce", "second", True, 24),
    ]
    assert all(set(c.sizes) == {6} for c in counter.calls if c.floating)
    assert totals(counter.calls)["second"]["all_reduce"] == {"calls": 2, "bytes": 48}
    assert totals(counter.calls)["first"]["all_gather"] == {"calls": 2, "bytes": 48}


def test_calls_of_the_reducer(alone):
    model = DistributedDataParallel(torch.nn.Linear(3, 2))
    with CommunicationCounter() as counter:
        model(torch.ones(4, 3)).sum().backward()
    assert [(c.kind, c.bytes) for c in counter.calls] == [("all_reduce", 32)]


def test_calls_of_sharded_tensors():
    """A group of one makes none, and nothing is sent here."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        shard = DTensor.from_local(torch.ones(5), mesh, [Shard(0)])
        with CommunicationCounter() as counter:
            shard.full_tensor()
        assert [(c.kind, c.bytes) for c in counter.calls] == [("all_gather", 40)]
    finally:
        dist.destroy_process_group()


def test_a_sketch_that_is_sent_would_be_seen(alone):
    with Tagging(13) as counter:
        sketch = torch.zeros(7, 13) + 1
        dist.all_reduce(torch.zeros(7))
        assert counter.carried == []
        dist.all_reduce(sketch.view(-1)[:20])
    assert set(counter.carried) == {"c10d.allreduce_.default of (20,) in other"}
