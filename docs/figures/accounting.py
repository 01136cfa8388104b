"""Draws the figures of docs/accounting.md from the package's own functions: `make figures`, two minutes of one core.

Every figure is one function that returns its data and one entry of `FIGURES` that says how to draw it. Nothing is
random; SVG and PNG come out the same on every machine with the same matplotlib.
"""

import argparse
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy import special, stats

from dprc_lightning.accounting import Accountant, StepEvent, calibrate_noise_multiplier, envelope_cdf

HERE = Path(__file__).parent
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00")
"""Okabe and Ito's palette, told apart by the colour-blind; the line styles tell the curves apart in grey."""
STYLES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1)))

SKETCHES = (None, 128, 32, 8)
SIGMA, RATE, STEPS = 1.0, 0.05, 200

Curves = dict[str, tuple[np.ndarray, np.ndarray]]


def name_of(sketch_dim: int | None) -> str:
    """The legend of a sketch."""
    return "exact norms" if sketch_dim is None else f"k = {sketch_dim}"


def two_weights(levels: Sequence[float] = (1.1, 1.25, 1.4, 1.6), points: int = 201) -> Curves:
    """P(a X_1 + (1 - a) X_2 <= t) less its larger value at a = 1/2 and a = 1; k = 2 columns, a closed form."""
    a = np.linspace(0.5, 1.0, points)[1:-1]  # at its ends the closed form is 0/0 and exp(-t/0)
    b = 1.0 - a
    out = {}
    for t in levels:
        inside = 1 - (a * np.exp(-t / a) - b * np.exp(-t / b)) / (a - b)
        ends = 1 - np.array([math.exp(-2 * t) * (1 + 2 * t), math.exp(-t)])
        values = np.concatenate([ends[:1], inside, ends[1:]])
        out[f"t = {t:g}"] = (np.linspace(0.5, 1.0, points), values - ends.max())
    return out


def envelopes(k: int = 2, d: int = 8, points: int = 161) -> Curves:
    """The envelope for d eigenvalues and without a limit, between the spectra that attain most of it."""
    t = np.union1d(np.linspace(0.0, 2.2, points), [np.nextafter(1.0, 0.0)])
    return {
        f"envelope, any {d} eigenvalues": (t, envelope_cdf(t, k, d)),
        "envelope, no limit (the accountant's)": (t, envelope_cdf(t, k)),
        "one eigenvalue": (t, special.gammainc(k / 2, k / 2 * t)),
        f"{d} equal eigenvalues": (t, special.gammainc(d * k / 2, d * k / 2 * t)),
    }


def trade_offs(sketches: Sequence[int | None] = SKETCHES, points: int = 101) -> Curves:
    """Smallest false-negative rate that the accountant guarantees, and the Gaussian limit of exact clipping."""
    alpha = np.linspace(0.0, 1.0, points)
    out = {}
    for k in sketches:
        accountant = Accountant([(StepEvent(SIGMA, RATE, k), STEPS)])
        out[name_of(k)] = (alpha, np.asarray(accountant.tradeoff_function(alpha)))
    mu = RATE * math.sqrt(STEPS * math.expm1(SIGMA**-2))
    out[f"Gaussian, mu = {mu:.2f}"] = (alpha, stats.norm.cdf(stats.norm.isf(alpha) - mu))
    return out


def privacy_curves(sketches: Sequence[int | None] = SKETCHES, points: int = 61) -> Curves:
    """The bound on delta against epsilon."""
    epsilon = np.linspace(0.0, 8.0, points)
    return {
        name_of(k): (epsilon, np.asarray(Accountant([(StepEvent(SIGMA, RATE, k), STEPS)]).delta(epsilon)))
        for k in sketches
    }


def _noise(sketch_dim: int | None, bound: str = "best", **setting: float) -> float:
    print(".", end="", flush=True)
    return calibrate_noise_multiplier(sketch_dim=sketch_dim, bound=bound, **setting)  # type: ignore[arg-type]


def _percent(value: float, reference: float) -> float:
    return 100 * (value / reference - 1)


def overhead_by_sketch(dims: Sequence[int] = (16, 32, 64, 128, 256)) -> Curves:
    """Percent of noise more than exact norms need, against k."""
    out = {}
    for target, steps in ((0.7, 208), (9.0, 200)):
        setting = {"epsilon": target, "delta": 1e-5, "sample_rate": 64 / 1225, "steps": steps}
        exact = _noise(None, **setting)
        for bound, name in (("best", "convex order"), ("envelope", "envelope")):
            extra = [_percent(_noise(k, bound, **setting), exact) for k in dims]
            out[f"epsilon {target:g}, {name}"] = (np.array(dims), np.array(extra))
    return out


def overhead_by_rate(
    rates: Sequence[float] = (1e-3, 3e-3, 1e-2, 3e-2, 0.2, 1.0), dims: Sequence[int] = (32, 64, 256)
) -> Curves:
    """Percent of noise more than exact norms need, against q, for 20 passes over the data."""
    extra: dict[int, list[float]] = {k: [] for k in dims}
    for rate in rates:
        setting = {"epsilon": 2.0, "delta": 1e-6, "sample_rate": rate, "steps": round(20 / rate)}
        exact = _noise(None, **setting)
        for k in dims:
            extra[k].append(_percent(_noise(k, **setting), exact))
    return {name_of(k): (np.array(rates), np.array(extra[k])) for k in dims}


@dataclass(frozen=True)
class Figure:
    """How one figure is drawn."""

    data: Callable[[], Curves]
    x: str
    y: str
    log_x: bool = False
    log_y: bool = False
    marker: str = ""
    y_range: tuple[float, float] | None = None


EXTRA = "noise beyond that of exact norms, %"

FIGURES = {
    "two_weights": Figure(
        two_weights, "a, the larger of two eigenvalues", "P(a X1 + (1 - a) X2 <= t), less its larger end"
    ),
    "envelope": Figure(envelopes, "t", "P(estimate / true squared norm <= t), k = 2"),
    "trade_off": Figure(trade_offs, "false-positive rate of a test", "smallest false-negative rate"),
    "privacy_curve": Figure(privacy_curves, "epsilon", "delta", log_y=True, y_range=(1e-10, 1.0)),
    "overhead_k": Figure(overhead_by_sketch, "columns of the sketch, k", EXTRA, log_x=True, log_y=True, marker="o"),
    "overhead_q": Figure(
        overhead_by_rate, "sample rate q, for 20 / q steps", EXTRA, log_x=True, log_y=True, marker="o"
    ),
}


def draw(name: str, curves: Curves, folder: Path) -> None:
    """Writes one figure as SVG and PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import ScalarFormatter

    figure = FIGURES[name]
    with matplotlib.rc_context({"svg.hashsalt": name, "svg.fonttype": "none", "font.size": 9, "lines.linewidth": 1.6}):
        canvas, axes = pyplot.subplots(figsize=(5.2, 3.6), layout="constrained")
        for i, (label, (x, y)) in enumerate(curves.items()):
            style = {"color": COLOURS[i % len(COLOURS)], "linestyle": STYLES[i % len(STYLES)], "marker": figure.marker}
            axes.plot(x, y, label=label, markersize=3.5, **style)
            if name == "two_weights":  # the maximum, inside for all but the last
                best = int(np.argmax(y))
                axes.plot(x[best], y[best], "o", color=style["color"], markersize=6, markerfacecolor="none")
        axes.set(xlabel=figure.x, ylabel=figure.y)
        if figure.log_x:
            axes.set_xscale("log", base=2 if name == "overhead_k" else 10)
            if name == "overhead_k":
                axes.xaxis.set_major_formatter(ScalarFormatter())
        if figure.log_y:
            axes.set_yscale("log")
            if figure.y == EXTRA:
                axes.set_yticks([0.5, 1, 2, 5, 10, 20], labels=["0.5", "1", "2", "5", "10", "20"], minor=False)
                axes.minorticks_off()
        if figure.y_range is not None:
            axes.set_ylim(*figure.y_range)
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
            some = list(zip(x, y, strict=True))[:: max(1, len(x) // 7)]
            print(f"  {label}: " + ", ".join(f"{a:.4g}: {b:.4g}" for a, b in some))


if __name__ == "__main__":
    main()
