"""Memory and CPU seconds of one layer's norm against k: with P kept for the step, and with P made where it is used."""

import os
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dprc_lightning.bench.memory import LiveMemory
from dprc_lightning.sketch import PROJECTIONS, Factors, KeyedProjections, sketch

_KEY = bytes(32)
_CPU = torch.device("cpu")


@dataclass(frozen=True)
class LayerShape:
    """A weight [rows, other] whose longer axis P contracts, and its micro-batch.

    Attributes:
        rows: p, rows of P.
        other: The other axis.
        tokens: T.
        records: B.
        one_hot: Whether it is an embedding, whose left factor is ids.
    """

    rows: int = 128256
    other: int = 2048
    tokens: int = 512
    records: int = 1
    one_hot: bool = False

    def factors(self) -> Factors:
        """Random factors in bfloat16: how large they are changes neither memory nor time."""
        generator = torch.Generator().manual_seed(0)
        size = self.records, self.tokens
        if self.one_hot:
            left = torch.randint(0, self.rows, size, generator=generator)
        else:
            left = torch.randn(*size, self.rows, generator=generator, dtype=torch.bfloat16)
        right = torch.randn(*size, self.other, generator=generator, dtype=torch.bfloat16)
        return Factors(left, right, (self.rows, self.other))


def measure_projection(
    shape: LayerShape,
    sketch_dims: Sequence[int],
    projection: str = "gaussian",
    rounds: int = 1,
    progress: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Take the norms of one micro-batch, in a step of their own, with each k and in both ways.

    Args:
        shape: Layer and micro-batch.
        sketch_dims: Each k.
        projection: Distribution of P's entries.
        rounds: How many steps of two micro-batches are timed, after an untimed one that counts memory.
        progress: Called with what is about to be done.

    Returns:
        Rows with ``kept``, ``kept_bytes`` (of P, from its first use to the end of the step), ``peak_bytes``: the most
        that is live beyond the factors: tensors (see `LiveMemory`) plus what Python and NumPy allocate, each at its own
        peak; ``first_seconds`` and ``next_seconds``: CPU time of the first micro-batch of a step, which draws P, and of
        a later one, the least of all rounds. Also shape, projection and machine.
    """
    use = shape.factors()
    rows = []
    # What is imported or made at the first use is no part of a row.
    warm = _source(projection, 1, kept=True)
    warm.begin_step(0)
    _peak(warm, use, shape.rows)
    for k in sketch_dims:
        for kept in (True, False):
            name = f"k={k}, P {'kept' if kept else 'made anew'}"
            source = _source(projection, k, kept)
            progress(f"{name}: memory")
            source.begin_step(0)
            peak = _peak(source, use, shape.rows)
            seconds: tuple[list[float], list[float]] = [], []
            for i in range(rounds):
                progress(f"{name}: round {i + 1} of {rounds}")
                source.begin_step(i + 1)
                for measured in seconds:
                    started = time.process_time()
                    _norms(source, use, shape.rows)
                    measured.append(time.process_time() - started)
            matrix = source.matrix("weight", shape.rows, _CPU)
            rows.append({
                "sketch_dim": k,
                "kept": kept,
                "kept_bytes": matrix.nbytes,
                "peak_bytes": peak,
                "first_seconds": min(seconds[0]),
                "next_seconds": min(seconds[1]),
            })
            # Before the next one is made, not after.
            del matrix, source
    machine = {"threads": torch.get_num_threads(), "cores": os.cpu_count(), "torch": torch.__version__}
    return {"shape": shape.__dict__, "projection": projection, "rounds": rounds, "machine": machine, "rows": rows}


def _source(projection: str, sketch_dim: int, kept: bool) -> KeyedProjections:
    source = PROJECTIONS[projection](_KEY, sketch_dim)
    source.stream([] if kept else ["weight"])
    return source


def _norms(source: KeyedProjections, use: Factors, rows: int) -> Tensor:
    return sketch(use, source.matrix("weight", rows, _CPU), 0).square().sum((1, 2))


def _peak(source: KeyedProjections, use: Factors, rows: int) -> int:
    tracing = tracemalloc.is_tracing()
    if not tracing:
        tracemalloc.start()
    tracemalloc.reset_peak()
    before, _ = tracemalloc.get_traced_memory()
    try:
        with LiveMemory() as live:
            live.add([use.left, use.right])
            known = live.current
            _norms(source, use, rows)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        if not tracing:
            tracemalloc.stop()
    return live.peak - known + peak - before
