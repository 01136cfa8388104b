"""A private training loop of your own, without a trainer. The guarantee is the order of the calls.

    python examples/plain_torch.py [RUN_FOLDER]

The folder (by default runs/plain_torch) gets the ledger, the secret and the checkpoint. The same command again goes on
after a crash or Ctrl-C; when all steps are spent it only says what they cost.
"""

import sys
from pathlib import Path

import torch
from torch import nn

from dprc_lightning import PoissonBatchSampler, add_gaussian_noise, attach
from dprc_lightning.accounting import Accountant, Ledger, StepEvent, calibrate_noise_multiplier
from dprc_lightning.checkpoint import DurableCheckpointIO
from dprc_lightning.keys import Domain, RunSecret

RECORDS, BATCH, STEPS, CHECKPOINT_EVERY = 4000, 200, 60, 10
EPSILON, DELTA, CLIP, SKETCH_DIM = 3.0, 1e-5, 1.0, 32


def make_data(n: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Four classes in 64 dimensions; each class has two centres, so that a linear model would not do."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)) / 4
    y = torch.randint(4, (n,), generator=generator)
    sign = torch.randint(2, (n, 1), generator=generator) * 2 - 1
    return sign * centres[y] + 0.4 * torch.randn(n, 64, generator=generator), y


def main(folder: Path) -> None:
    """Train or go on training in this folder."""
    x, y = make_data(RECORDS, seed=1)
    torch.manual_seed(0)  # initial weights are public; nothing that must be secret comes from torch's seed
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

    # Batches and projections come from the run's secret: who could predict them would undo the guarantee.
    folder.mkdir(parents=True, exist_ok=True)
    secret = RunSecret.load(folder) if (folder / "secret.key").exists() else RunSecret.create(folder)
    sampler = PoissonBatchSampler(RECORDS, sample_rate=BATCH / RECORDS, steps=STEPS, key=secret.subkey(Domain.SAMPLING))
    handle = attach(model, sketch_dim=SKETCH_DIM, key=secret.subkey(Domain.PROJECTION))
    # Calibrate with the k that the model really uses: sketched norms need a little more noise than exact ones.
    mechanism = {"sample_rate": sampler.sample_rate, "sketch_dim": handle.sketch_dim}
    sigma = calibrate_noise_multiplier(epsilon=EPSILON, delta=DELTA, steps=STEPS, **mechanism)
    event = StepEvent(noise_multiplier=sigma, **mechanism).to_dict()
    expected = sampler.expected_batch_size  # a constant: the size of the batch that was drawn is private

    checkpoints, file = DurableCheckpointIO(), folder / "checkpoints" / "last.ckpt"
    meta = {"num_records": RECORDS, "event": event}
    saved = checkpoints.load_checkpoint(file) if file.exists() else {"steps": 0, "ledger_head": None}
    if file.exists() or (folder / "ledger.jsonl").exists():
        # A ledger that lacks the checkpoint's last entry has forgotten steps that are in the weights.
        ledger = Ledger.open(folder, must_contain=saved["ledger_head"])
        if ledger.meta != meta:
            sys.exit(f"{folder} was begun with other settings ({ledger.meta}): restore them, or give another folder")
        print(f"{folder}: {ledger.steps} of {STEPS} steps are spent, {saved['steps']} of them are in the weights")
    else:
        ledger = Ledger.create(folder, meta)
    if "model" in saved:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
    done = saved["steps"]

    with ledger:  # an error leaves the step that was begun counted
        while ledger.steps < STEPS:  # what a crash lost stays spent: training makes as many steps fewer
            # First on disk, then drawn: a step that is nowhere written down could be released and not counted.
            # The number is the ledger's, not a step counter: a counter that is set back would draw a batch twice.
            sequence = ledger.reserve(event).take()
            indices = torch.from_numpy(sampler.batch(sequence))
            handle.begin_step(sequence)  # one projection for all records of the step, in whichever micro-batch
            for rows in indices.split(64) if len(indices) else ():  # an empty batch is a step too: noise alone
                # One loss per record, of that record alone: no mean, nothing computed over the batch.
                losses = nn.functional.cross_entropy(model(x[rows]), y[rows], reduction="none")
                handle.clipped_backward(losses, max_grad_norm=CLIP, scale=1 / expected)
            # Once per step, on the sum of all micro-batches, in the same scale as the gradients.
            add_gaussian_noise(handle.parameters, sigma * CLIP / expected)
            optimizer.step()
            optimizer.zero_grad()  # what stayed in .grad would be added to the next sum
            done += 1
            if done % CHECKPOINT_EVERY == 0 or ledger.steps == STEPS:
                states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                checkpoints.save_checkpoint({**states, "steps": done, "ledger_head": ledger.head}, file)
    handle.detach()

    spent = Accountant((StepEvent.from_dict(each), count) for each, count in ledger.spent()).epsilon(delta=DELTA)
    test_x, test_y = make_data(2000, seed=2)
    accuracy = (model(test_x).argmax(-1) == test_y).float().mean()
    print(f"all {STEPS} steps are spent: to train again, give another folder (that is a run more on the same data)")
    print(f"epsilon at delta {DELTA:g}: {spent.upper:.4f} (target {EPSILON:g})")
    print(f"test accuracy: {accuracy:.3f} (chance: .25)")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/plain_torch"))
