"""One rank: code of one's own that reaches into a step of an engine that shards; what each rank saw goes to a file."""

import copy
import json
import os
import signal
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from cells import CELLS, LM, Cell, Data, Records
from torch import Tensor, nn
from toy import ZeroNoise, trainer
from transformers.modeling_outputs import CausalLMOutput
from worker import ENGINES, FixedBatches, whole_state

from dprc_lightning.run import PrivateRun

RANK = int(os.environ.get("LOCAL_RANK", "0"))
PLAIN = replace(CELLS["plain"], batches=[[0, 1, 2, 3], [4, 5, 6, 7]], physical=1)


def change(module: LM, by: float = 100.0) -> None:
    """What a callback finds of the gradients, each engine's own way."""
    if hasattr(module.trainer.model, "allreduce_gradients"):
        from deepspeed.utils import safe_get_full_grad, safe_set_full_grad

        for p in module.net.parameters():
            found = safe_get_full_grad(p)
            if found is not None:
                safe_set_full_grad(p, found * by + 1.0)
        return
    for p in module.net.parameters():
        if p.grad is not None:
            p.grad.mul_(by)


class AfterBackward(LM):
    def on_after_backward(self):
        change(self)


class BeforeTheUpdate(LM):
    def on_before_optimizer_step(self, optimizer):
        change(self)


class EarlierHook(LM):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        optimizer.register_step_pre_hook(self.grow)
        return optimizer

    def grow(self, optimizer, *_):
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(100.0)


class LaterHook(EarlierHook):
    def configure_optimizers(self):
        self.made = LM.configure_optimizers(self)
        return self.made

    def on_train_start(self):
        self.made.register_step_pre_hook(self.grow)


class SecondBackward(LM):
    def per_sample_loss(self, batch):
        self.batch = batch
        return super().per_sample_loss(batch)

    def on_before_optimizer_step(self, optimizer):
        self.manual_backward(self.per_sample_loss(self.batch).sum())


class BackwardOfItsOwn(SecondBackward):
    def on_before_optimizer_step(self, optimizer):
        self.per_sample_loss(self.batch).sum().backward()


class SecondStep(LM):
    def on_after_backward(self):
        self.optimizers().step()


class StepOutside(LM):
    def on_train_batch_end(self, *_):
        self.optimizers().step()


class StepOfTheInnerOne(LM):
    """Past the engine."""

    def on_train_batch_end(self, *_):
        optimizer = self.optimizers().optimizer
        getattr(optimizer, "optimizer", optimizer).step()


class StepBefore(LM):
    """Of one's own optimizer, before the engine's."""

    def configure_optimizers(self):
        self.made = torch.optim.Adam(self.net.parameters(), lr=0.1)
        return self.made

    def on_before_optimizer_step(self, optimizer):
        self.made.step()


class ReduceHook(LM):
    def on_train_start(self):
        self.net.set_all_reduce_hook(lambda t: t.mul_(100.0))


class Adagrad(LM):
    """DeepSpeed makes one of its own."""

    def configure_optimizers(self):
        return torch.optim.Adagrad(self.net.parameters(), lr=0.1)


class FreezesWithin(LM):
    def on_after_backward(self):
        self.net.lm_head.requires_grad_(False)


class GradientHook(LM):
    def on_train_start(self):
        for p in self.net.parameters():
            p.register_post_accumulate_grad_hook(lambda p: p.grad.mul_(100.0))


class Penalty(LM):
    def per_sample_loss(self, batch):
        losses = super().per_sample_loss(batch)
        return losses + sum((p**2).sum() for p in self.net.parameters())


class PastTheRoot(LM):
    def per_sample_loss(self, batch):
        hidden = self.net.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])[0]
        logits = self.net.lm_head(hidden)
        return logits.square().mean((1, 2))


class Branch(nn.Module):
    def __init__(self, trains: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8).requires_grad_(trains)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()


class Crossed(nn.Module):
    """Two branches of one size, run in an order that differs between ranks (as if it depended on their records)."""

    def __init__(self, trains: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(41, 8)
        self.a, self.b = Branch(trains), Branch(trains)
        self.head = nn.Linear(8, 41)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
        x = self.embed(input_ids)
        order = (self.a, self.b) if RANK == 0 else (self.b, self.a)
        found = {branch: branch(x) for branch in order}
        return CausalLMOutput(logits=self.head(found[self.a] + 2 * found[self.b]))


class BadRecord(LM):
    """The gradient of record 1 is not finite."""

    def per_sample_loss(self, batch):
        losses = super().per_sample_loss(batch)
        bad = (batch["input_ids"] == Records().rows[1]["input_ids"]).all(1)
        return losses * torch.where(bad, torch.inf, 1.0)


CROSSED = Cell(lambda: Crossed(True), [[0, 1, 2, 3]])
KINDS: dict[str, tuple[type[LM], Cell]] = {
    "after_backward": (AfterBackward, PLAIN),
    "before_the_update": (BeforeTheUpdate, PLAIN),
    "earlier_hook": (EarlierHook, PLAIN),
    "later_hook": (LaterHook, PLAIN),
    "second_backward": (SecondBackward, PLAIN),
    "backward_of_its_own": (BackwardOfItsOwn, PLAIN),
    "second_step": (SecondStep, PLAIN),
    "step_outside": (StepOutside, PLAIN),
    "step_of_the_inner_one": (StepOfTheInnerOne, PLAIN),
    "step_before": (StepBefore, PLAIN),
    "reduce_hook": (ReduceHook, PLAIN),
    "adagrad": (Adagrad, PLAIN),
    "freezes_within": (FreezesWithin, PLAIN),
    "gradient_hook": (GradientHook, PLAIN),
    "penalty": (Penalty, PLAIN),
    "past_the_root": (PastTheRoot, PLAIN),
    "crossed": (LM, CROSSED),
    "crossed_frozen": (LM, replace(CROSSED, build=lambda: Crossed(False))),
    "drop": (BadRecord, replace(PLAIN, privacy={"on_nonfinite": "drop"})),
}


def run(engine: str, folder: Path, world_size: int, name: str) -> dict[str, Any]:
    """One cell, and what became of it on this rank."""
    kind, cell = KINDS[name]
    PrivateRun.sampler = lambda self: FixedBatches(cell.batches)
    module = kind(cell)
    before = copy.deepcopy(module.net.state_dict())
    wrap = {"wrap": ["Branch"]} if name.startswith("crossed") and "fsdp" in engine else {}
    strategy = ENGINES[engine](noise_stream=ZeroNoise(), **wrap)
    try:
        trainer(folder / name, strategy=strategy, devices=world_size).fit(module, datamodule=Data())
    except Exception as error:
        return {"error": type(error).__name__, "message": str(error)}
    state = whole_state(module)
    return {
        "moved": max(float((state[k] - v).abs().max()) for k, v in before.items()),
        "finite": all(bool(v.isfinite().all()) for v in state.values()),
    }


def main(engine: str, folder: Path, world_size: int, cells: list[str]) -> None:
    """Each cell in a process of its own, that a broken one leaves nothing behind; forked, so that imports cost once.

    Args:
        engine: See `worker.ENGINES`.
        folder: Where the results go.
        world_size: Of the job.
        cells: ``name=port`` of each.
    """
    warnings.simplefilter("ignore")
    for name, port in (cell.split("=") for cell in cells):
        child = os.fork()
        if child == 0:
            os.environ["MASTER_PORT"] = port
            (folder / f"{name}.{RANK}.json").write_text(json.dumps(run(engine, folder, world_size, name)))
            sys.stdout.flush()
            # Without the other rank's end of the group, destructors could wait for it.
            os._exit(0)
        deadline = time.monotonic() + 40
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            if time.monotonic() > deadline:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
                break
            time.sleep(0.05)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
