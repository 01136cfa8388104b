"""Draws the figures of docs/longcontext.md and prints their numbers: `make figures`; ten minutes of one core."""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dprc_lightning.bench.projection import LayerShape, measure_projection
from dprc_lightning.bench.simulate import NON_PRIVATE, SimulatedStep, simulate

HERE = Path(__file__).parent
LLAMA = HERE.parents[1] / "examples" / "llama-3.2-1b"
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00")
"""Okabe and Ito's palette, told apart by the colour-blind; the line styles tell the curves apart in grey."""
STYLES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1)))

HEAD = LayerShape()
"""The head of Llama-3.2-1B."""

Curves = dict[str, tuple[list[float], list[float]]]

CHECKPOINTED: dict[str, Any] = {"checkpointing": True}
IN_PIECES = CHECKPOINTED | {"chunked_head": True, "mlp_chunk": 4096}
OFFLOADED = IN_PIECES | {"offload_checkpoints": True}
LINES: dict[str, tuple[bool, dict[str, Any]]] = {
    "not private, checkpointed": (False, CHECKPOINTED),
    "private, checkpointed": (True, CHECKPOINTED),
    "+ head and MLP in pieces": (True, IN_PIECES),
    "+ checkpoints on the host": (True, OFFLOADED),
    "LoRA r=8, in pieces": (True, IN_PIECES | {"lora": 8}),
    "LoRA r=8, on the host too": (True, OFFLOADED | {"lora": 8}),
}


def memory_by_context(tokens: Sequence[int] = (4096, 32768, 131072), model: Path = LLAMA) -> Curves:
    """Peak GiB of a step of one record, simulated, without optimizer; gradients are float32 on both sides."""
    curves: Curves = {}
    for label, (private, flags) in LINES.items():
        peaks = []
        for length in tokens:
            step = SimulatedStep(model=str(model), tokens=length, dtype="bfloat16")
            chunk = {"mlp_chunk": min(flags["mlp_chunk"], length)} if "mlp_chunk" in flags else {}
            step = replace(step, **flags | chunk)
            (row,) = simulate(step, kinds=[step.sketch_name if private else NON_PRIVATE])
            peaks.append(row["peak_bytes"] / 2**30)
        curves[label] = list(tokens), peaks
    return curves


def memory_by_sketch(
    sketch_dims: Sequence[int] = (32, 64, 128, 256, 512, 1024, 2048, 4096), shape: LayerShape = HEAD
) -> Curves:
    """Peak MiB of the norms of one matrix, measured: P kept for the step, and P made where it is used."""
    rows = measure_projection(shape, sketch_dims)["rows"]
    return {
        label: (list(sketch_dims), [row["peak_bytes"] / 2**20 for row in rows if row["kept"] is kept])
        for label, kept in (("P kept for the step", True), ("P made where it is used", False))
    }


@dataclass(frozen=True)
class Figure:
    """How to draw what a function returns."""

    data: Callable[[], Curves]
    x: str
    y: str


FIGURES = {
    "memory_by_context": Figure(memory_by_context, "tokens of the record, T", "peak of a step, GiB (simulated)"),
    "memory_by_sketch": Figure(memory_by_sketch, "columns of the sketch, k", "peak beyond the factors, MiB"),
}


def draw(name: str, curves: Curves, folder: Path) -> None:
    """Writes one figure as SVG and PNG; both axes are logarithmic."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import NullFormatter, ScalarFormatter

    figure = FIGURES[name]
    with matplotlib.rc_context({"svg.hashsalt": name, "svg.fonttype": "none", "font.size": 9, "lines.linewidth": 1.6}):
        canvas, axes = pyplot.subplots(figsize=(5.2, 3.6), layout="constrained")
        for i, (label, (x, y)) in enumerate(curves.items()):
            axes.plot(x, y, label=label, color=COLOURS[i], linestyle=STYLES[i], marker="o", markersize=3.5)
        axes.set(xlabel=figure.x, ylabel=figure.y)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        ticks = sorted({value for x, _ in curves.values() for value in x})
        axes.set_xticks(ticks, labels=[f"{value // 1024}K" if value >= 1024 else str(value) for value in ticks])
        axes.yaxis.set_major_formatter(ScalarFormatter())
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.grid(alpha=0.25, linewidth=0.5)
        axes.legend(frameon=False, fontsize=8)
        canvas.savefig(folder / f"{name}.svg", metadata={"Date": None, "Creator": None})
        canvas.savefig(folder / f"{name}.png", dpi=130, metadata={"Software": None})
        pyplot.close(canvas)


def main(arguments: Sequence[str] | None = None) -> None:
    """Draws all figures, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="default: all of " + ", ".join(FIGURES))
    parser.add_argument("--folder", type=Path, default=HERE, help="where the files go")
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - set(FIGURES):
        parser.error(f"unknown figure {sorted(unknown)[0]!r}; known: {', '.join(FIGURES)}")
    for name in options.names or FIGURES:
        start = time.perf_counter()
        curves = FIGURES[name].data()
        draw(name, curves, options.folder)
        print(f"{name}: {time.perf_counter() - start:.1f} s", flush=True)
        for label, (x, y) in curves.items():
            print(f"  {label}: " + ", ".join(f"{a}: {b:.2f}" for a, b in zip(x, y, strict=True)))


if __name__ == "__main__":
    main()
