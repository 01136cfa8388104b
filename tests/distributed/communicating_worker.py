"""One rank: short private and non-private runs under several strategies, with every collective noted."""

import json
import sys
import warnings
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from dprc_lightning.bench.communication import CommunicationCounter, kind_of
from dprc_lightning.bench.engines import EngineBench, short_run
from dprc_lightning.bench.step import StepShape

# Nothing else of a model or a batch has these many rows or columns.
SKETCH_DIMS = (13, 29)
SHAPE = StepShape(tokens=24, records=2, hidden=32, intermediate=64, layers=3, vocabulary=128)
STRATEGIES = {
    "ddp": ("dprc_ddp", {}),
    "fsdp": ("dprc_fsdp", {}),
    "fsdp2": ("dprc_fsdp2", {}),
    "fsdp2_kept": ("dprc_fsdp2", {"reshard_after_forward": False}),
    "zero2": ("dprc_deepspeed_stage_2", {}),
    "zero3": ("dprc_deepspeed_stage_3", {}),
}


class Tagging(CommunicationCounter):
    """Marks the storage of each tensor with k in its shape (P, sketches, what is made on the way), and looks for it."""

    def __init__(self, k: int) -> None:
        super().__init__()
        self.k = k
        self.marked: dict[int, object] = {}
        self.carried: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if result is NotImplemented:
            return result
        if kind_of(func) is None:
            for leaf in tree_leaves(result):
                if isinstance(leaf, Tensor) and self.k in leaf.shape:
                    # Kept alive, so that its address is not used again.
                    storage = leaf.untyped_storage()
                    self.marked[storage._cdata] = storage
        else:
            for leaf in tree_leaves([args, kwargs or {}, result]):
                if isinstance(leaf, Tensor) and leaf.untyped_storage()._cdata in self.marked:
                    self.carried.append(f"{func} of {tuple(leaf.shape)} in {self.phase()}")
        return result


def main(folder: Path, names: list[str]) -> None:
    warnings.simplefilter("ignore")
    found = {}
    for name in names:
        alias, options = STRATEGIES[name]
        found[name] = {}
        for kind, private, k in [("plain", False, 1), *((f"k={k}", True, k) for k in SKETCH_DIMS)]:
            counter = Tagging(k) if private else CommunicationCounter()
            bench = EngineBench(alias, 2, options, SHAPE, k, micro_batches=2)
            run = short_run(bench, folder / f"{name}-{kind}", private=private, counter=counter)
            found[name][kind] = {
                "last": run["calls"],
                "all": [asdict(call) for call in counter.calls],
                "model_bytes": run["model_bytes"],
                "marked": len(getattr(counter, "marked", {})),
                "carried": getattr(counter, "carried", []),
            }
        print("done", name, flush=True)
    (folder / f"rank{torch.distributed.get_rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
