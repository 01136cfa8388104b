"""What adding the noise costs on one shard of a gradient: memory beyond the gradient, and CPU seconds."""

import os
import statistics
import time
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from dprc_lightning.bench.memory import LiveMemory
from dprc_lightning.noise import CHUNK, NoiseStream, add_gaussian_noise


def measure_noise(
    sizes: Sequence[int], rounds: int, progress: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Add noise to gradients of several sizes, in turn.

    Args:
        sizes: Elements of each gradient, float32: of a sharded one, those of one rank.
        rounds: How often each is timed, after an untimed call that counts memory.
        progress: Called with what is about to be done.

    Returns:
        Rows with ``extra_bytes``, the most that was live at one time beyond parameter and gradient: tensors (see
        `LiveMemory`) plus what Python and NumPy allocate, each at its own peak, so never less than what was really
        live; CPU seconds (minimum and median); and ``seconds_per_billion``, the median extrapolated to 10^9 elements:
        the work is the same for each chunk. Also ``chunk``, the elements that are drawn at once, and the machine.
    """
    stream = NoiseStream.fresh()
    rows = []
    warm = nn.Parameter(torch.zeros(1))
    warm.grad = torch.zeros(1)
    # What is imported at the first use is no part of a row.
    _extra_bytes(warm, stream)
    for size in sizes:
        parameter = nn.Parameter(torch.zeros(size))
        parameter.grad = torch.zeros(size)
        progress(f"{size} elements: memory")
        extra = _extra_bytes(parameter, stream)
        seconds = []
        for i in range(rounds):
            progress(f"{size} elements: round {i + 1} of {rounds}")
            started = time.process_time()
            add_gaussian_noise(parameter, 1.0, stream)
            seconds.append(time.process_time() - started)
        rows.append({
            "elements": size,
            "gradient_bytes": size * parameter.element_size(),
            "extra_bytes": extra,
            "cpu_seconds_min": min(seconds),
            "cpu_seconds_median": statistics.median(seconds),
            "seconds_per_billion": statistics.median(seconds) / size * 1e9,
        })
    machine = {"threads": torch.get_num_threads(), "cores": os.cpu_count(), "torch": torch.__version__}
    return {"chunk": CHUNK, "rounds": rounds, "machine": machine, "rows": rows}


def _extra_bytes(parameter: nn.Parameter, stream: NoiseStream) -> int:
    assert parameter.grad is not None
    tracing = tracemalloc.is_tracing()
    if not tracing:
        tracemalloc.start()
    tracemalloc.reset_peak()
    before, _ = tracemalloc.get_traced_memory()
    try:
        with LiveMemory() as live:
            live.add([parameter, parameter.grad])
            known = live.current
            add_gaussian_noise(parameter, 1.0, stream)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        if not tracing:
            tracemalloc.stop()
    return live.peak - known + peak - before
