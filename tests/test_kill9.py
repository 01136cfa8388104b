"""Kill -9 at random moments of a real private training: what was begun is counted, and nothing is drawn twice.

The training is this very file, run as a program: a server imports torch once, forks a trainer, and kills it.
"""

import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dprc_lightning.accounting.ledger import Ledger

KILLS = 20
RECORDS, RATE, SIGMA, CLIP, COLUMNS = 64, 0.25, 1.0, 0.5, 4
EVENT = {"noise_multiplier": SIGMA, "sample_rate": RATE, "sketch_dim": COLUMNS}
PHASES = "reserved", "drawn", "noised", "applied", "saved"


def test_kill_9_at_any_moment_counts_every_step_and_repeats_no_draw(tmp_path: Path) -> None:
    kills = train_and_kill(tmp_path, "ledger", KILLS)
    assert len(kills) == KILLS
    drawn, applied = read(tmp_path / "drawn"), read(tmp_path / "applied")
    for kill in kills:
        # Lines are written after the fact, so that at most one step more was begun.
        assert kill["steps"] >= kill["drawn"] >= kill["applied"], kill
    sequences = [line[0] for line in drawn]
    assert sequences == sorted(set(sequences)), "a sequence number was handed out twice"
    assert {line[0] for line in applied} <= set(sequences)
    assert repeats(drawn) == {"projection": 0, "batch": 0}
    # Neither is this for lack of steps, nor of kills where it matters.
    assert len(drawn) > 2 * KILLS
    assert any(kill["drawn"] > kill["applied"] for kill in kills), "no step was cut short after its draw"
    lost = [spent - done for done, spent in read(tmp_path / "restarts")]
    behind = sum(after > before for before, after in zip(lost[:-1], lost[1:], strict=True))
    assert behind >= KILLS // 4, "hardly any restart went back to a checkpoint behind the ledger"
    assert len({kill["phase"] for kill in kills}) >= 3
    # A last, clean run goes on from there: what it reserved too much is given back.
    ledger = Ledger.open(tmp_path, read_only=True)
    assert ledger.steps == ledger.next_sequence == sequences[-1] + 1


def test_the_check_sees_a_run_that_numbers_its_draws_by_its_checkpoints(tmp_path: Path) -> None:
    """The same program with the mistake that the sequence number is there to prevent."""
    train_and_kill(tmp_path, "checkpoint", 6)
    found = repeats(read(tmp_path / "drawn"))
    assert found["projection"] > 0 and found["batch"] > 0


def read(path: Path) -> list[list[Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def repeats(drawn: list[list[Any]]) -> dict[str, int]:
    """How many draws occurred before. A batch has 52 bits, so that equal ones are the same draw."""
    batches, projections = ([line[column] for line in drawn] for column in (1, 2))
    return {
        "projection": len(projections) - len(set(projections)),
        "batch": len(batches) - len(set(batches)),
    }


def train_and_kill(run: Path, numbered_by: str, kills: int) -> list[dict[str, Any]]:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, str(run), numbered_by, str(kills)]
    server = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240, check=False)
    if server.returncode:
        pytest.fail(server.stderr)
    return [json.loads(line) for line in server.stdout.splitlines()]


# ------------------------------------------------------------------------------------------ the program that is killed


def serve(run: Path, numbered_by: str, kills: int) -> None:
    """Fork a trainer, kill it, report, so many times. Then let one end by itself."""
    import torch

    import dprc_lightning.clipping  # noqa: F401
    import dprc_lightning.noise  # noqa: F401
    from dprc_lightning.keys import RunSecret

    # A forked child must not find torch's threads gone.
    torch.set_num_threads(1)
    assert "lightning" not in sys.modules and "lightning.pytorch" not in sys.modules
    RunSecret.create(run)
    Ledger.create(run, {"num_records": RECORDS}).close()
    rng = random.Random(0)
    for number in range(kills + 1):
        listen, tell = os.pipe()
        if (child := os.fork()) == 0:
            os.close(listen)
            train(run, numbered_by, tell, random.Random(number), clean=number == kills)
            os._exit(0)
        os.close(tell)
        if number == kills:
            assert os.waitpid(child, 0)[1] == 0, "the last run failed"
            return
        # By what it does and not by the clock, so that a slow machine is hit in the same places; then a little later.
        phase = [os.read(listen, 1) for _ in range(rng.randint(1, 25))][-1]
        assert phase, "the trainer ended before it was killed"
        time.sleep(rng.choice([0, rng.uniform(0, 0.003)]))
        os.kill(child, signal.SIGKILL)
        assert os.waitpid(child, 0)[1] == signal.SIGKILL, "the trainer ended before it was killed"
        os.close(listen)
        steps = Ledger.open(run, read_only=True).steps
        lines = {name: len(read(run / name)) if (run / name).exists() else 0 for name in ("drawn", "applied")}
        print(json.dumps({"phase": PHASES[phase[0]], "steps": steps, **lines}), flush=True)


def train(run: Path, numbered_by: str, tell: int, rng: random.Random, *, clean: bool) -> None:
    """Train a small model from the last checkpoint on: for ever, or seven steps and a clean end."""
    import torch
    from torch import nn

    from dprc_lightning import PoissonBatchSampler, add_gaussian_noise, attach
    from dprc_lightning.keys import Domain, RunSecret

    secret = RunSecret.load(run)
    sampler = PoissonBatchSampler(RECORDS, sample_rate=RATE, steps=1, key=secret.subkey(Domain.SAMPLING))
    torch.manual_seed(0)
    x = torch.randn(RECORDS, 6)
    y = (x[:, 0] > 0).long()
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    done, head, path = 0, None, run / "last.ckpt"
    if path.exists():
        checkpoint = torch.load(path)
        model.load_state_dict(checkpoint["model"])
        done, head = checkpoint["done"], checkpoint["head"]
    ledger = Ledger.open(run, must_contain=head)
    handle = attach(model, estimator="hutchinson", sketch_dim=COLUMNS, key=secret.subkey(Domain.PROJECTION))
    append(run / "restarts", [done, ledger.next_sequence])
    while True:
        reservation = ledger.reserve(EVENT, count=rng.choice([1, 3]))
        for _ in range(reservation.count):
            sequence = reservation.take()
            number = sequence if numbered_by == "ledger" else done
            os.write(tell, b"\0")
            batch = sampler.batch(number)
            handle.begin_step(number)
            losses = nn.functional.cross_entropy(model(x[batch]), y[batch], reduction="none")
            norms = handle.norms(losses)
            # The norm pass drew P: nothing of it is released before the noise.
            append(run / "drawn", [sequence, fingerprint(batch), fingerprint(*projections(handle))])
            os.write(tell, b"\1")
            optimizer.zero_grad()
            handle.clipped_backward(losses, max_grad_norm=CLIP, norms=norms, scale=1 / sampler.expected_batch_size)
            add_gaussian_noise(model.parameters(), SIGMA * CLIP / sampler.expected_batch_size)
            os.write(tell, b"\2")
            optimizer.step()
            append(run / "applied", [sequence])
            os.write(tell, b"\3")
            done += 1
            if rng.random() < 0.4:
                save(torch, path, {"model": model.state_dict(), "done": done, "head": ledger.head})
                os.write(tell, b"\4")
            if clean and sequence % 7 == 0:
                ledger.close()
                return


def projections(handle: Any) -> list[Any]:
    """All of the step's P, as the norm pass used them: one for each of the two matrices."""
    used = handle._state.projections._cache
    assert sorted(used) == ["0.weight", "2.weight"]
    return [used[name].numpy() for name in sorted(used)]


def fingerprint(*arrays: Any) -> str:
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()


def append(path: Path, line: list[Any]) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(descriptor, json.dumps(line).encode() + b"\n")
    os.fsync(descriptor)
    os.close(descriptor)


def save(torch: Any, path: Path, checkpoint: dict[str, Any]) -> None:
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        torch.save(checkpoint, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


if __name__ == "__main__":
    serve(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
