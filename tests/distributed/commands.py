"""`dprc fit` of a toy on two devices, as a shell starts it."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from launcher import TESTS, free_port

CONFIG = """
seed_everything: 0
privacy: {{noise_multiplier: 1.0, delta: 1.0e-3, sample_rate: 0.25, steps: {steps}, max_grad_norm: 0.5}}
performance: {{physical_batch_size: 3}}
model: {{class_path: toy.{model}}}
data: {{class_path: toy.ToyData}}
test_after_fit: true
trainer:
  accelerator: cpu
  devices: 2
  num_sanity_val_steps: 0
  limit_val_batches: 0
  logger:
    class_path: lightning.pytorch.loggers.TensorBoardLogger
    init_args: {{save_dir: {folder}, name: toy}}
"""


STRATEGIES = Path(__file__).parents[2] / "configs" / "strategy"


def fit_arguments(
    folder: Path, *arguments: str, steps: int = 4, engine: str = "ddp", model: str = "ToyModule"
) -> list[str]:
    """What follows `python`, or `torchrun`."""
    config = folder / "toy.yaml"
    config.write_text(CONFIG.format(folder=folder / "runs", steps=steps, model=model))
    strategy = STRATEGIES / f"{engine}.yaml"
    return ["-m", "dprc_lightning.cli", "fit", "--config", str(config), "--config", str(strategy), *arguments]


def start(folder: Path, *arguments: str, **settings: Any) -> subprocess.Popen:
    """The command starts the other process itself."""
    return run([sys.executable, *fit_arguments(folder, *arguments, **settings)])


def run(command: list[str], **environment: str) -> subprocess.Popen:
    own = {"PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    port = {} if "MASTER_PORT" in environment else {"MASTER_PORT": str(free_port())}
    return subprocess.Popen(
        command,
        env=os.environ | own | port | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        # A shell gives its background jobs an ignored SIGINT, and what runs the tests may be one.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )


def finish(process: subprocess.Popen, limit: float = 240) -> str:
    """What it said; it is ended if it hangs."""
    try:
        return process.communicate(timeout=limit)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise AssertionError("it hangs: " + process.communicate()[0][-3000:]) from None
