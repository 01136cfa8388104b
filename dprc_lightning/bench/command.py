"""``dprc bench``: the arguments of the benchmarks, and what they print. Nothing slow is imported before one runs."""

import argparse
import json
import sys
from typing import Any

from dprc_lightning.errors import InvalidArgumentError
from dprc_lightning.show import show


def add_benchmarks(benches: Any) -> None:
    """Declare them.

    Args:
        benches: What `argparse.ArgumentParser.add_subparsers` returned.
    """
    step = benches.add_parser("step", help="FLOPs, peak memory and CPU seconds of one step of a small Llama")
    step.add_argument("--tokens", type=int, default=512, help="T")
    step.add_argument("--records", type=int, default=4, help="B")
    step.add_argument("--sketch_dim", type=int, nargs="+", default=[32], help="k of each row; exact norms come beside")
    step.add_argument("--rounds", type=int, default=5, help="how often each kind of step is timed")
    step.add_argument("--tied", action="store_true", help="share the weight of embedding and head")
    step.add_argument("--checkpointing", action="store_true", help="recompute activations, on both sides")
    step.add_argument(
        "--strategy",
        help="an alias (dprc_fsdp2, ...): start its ranks here and count what they send each other instead",
    )
    step.add_argument("--devices", type=int, default=None, help="with --strategy: how many processes; default 2")
    step.add_argument("--micro_batches", type=int, default=1, help="with --strategy: how many on each rank")
    step.add_argument(
        "--strategy_args", default="{}", metavar="JSON", help='its settings, as {"reshard_after_forward": false}'
    )
    step.add_argument("--timeout", type=float, default=600.0, help="with --strategy: seconds until all are stopped")
    step.add_argument("--format", choices=("table", "json"), default="table")
    step.set_defaults(run=_bench_step)

    noise = benches.add_parser("noise", help="memory and CPU seconds of the noise on one rank's shard of a gradient")
    noise.add_argument("--elements", type=int, nargs="+", default=[2**22, 2**24, 2**26], help="of the shard, float32")
    noise.add_argument("--rounds", type=int, default=3, help="how often each size is timed")
    noise.add_argument("--format", choices=("table", "json"), default="table")
    noise.set_defaults(run=_bench_noise)

    accounting = benches.add_parser("accounting", help="cost of knowing epsilon after each step of a run")
    accounting.add_argument("--noise_multiplier", type=float, required=True, help="sigma")
    accounting.add_argument("--sample_rate", type=float, required=True, help="q")
    accounting.add_argument("--steps", type=int, required=True, help="logical steps of the run")
    accounting.add_argument("--delta", type=float, default=1e-5)
    accounting.add_argument("--sketch_dim", type=int, default=None, help="k; exact norms without")
    accounting.add_argument("--rounds", type=int, default=5, help="how often it is timed")
    accounting.add_argument("--format", choices=("table", "json"), default="table")
    accounting.set_defaults(run=_bench_accounting)


def _bench_step(options: argparse.Namespace) -> int:
    _at_least_one(options, "tokens", "records", "rounds", "sketch_dim")
    from dprc_lightning.bench.step import StepShape, measure_step

    shape = StepShape(
        tokens=options.tokens, records=options.records, tied=options.tied, checkpointing=options.checkpointing
    )
    if options.strategy is not None:
        return _bench_engine(options, shape)
    found = measure_step(shape, [0, *options.sketch_dim], options.rounds, _progress)
    if options.format == "json":
        print(json.dumps(found))
        return 0
    print(f"{'step':<20} {'GFLOP':>9} {'ratio':>6} {'peak MiB':>9} {'ratio':>6} {'CPU s':>8} {'ratio':>6}")
    for row in found["rows"]:
        print(
            f"{row['step']:<20} {row['flops'] / 1e9:>9.2f} {row['flops_ratio']:>6.3f} "
            f"{row['peak_bytes'] / 2**20:>9.1f} {row['peak_ratio']:>6.3f} "
            f"{row['cpu_seconds_min']:>8.3f} {row['cpu_ratio']:>6.2f}"
        )
    print("peak: live tensors at one time (parameters, gradients, activations, temporaries; no optimizer)")
    print(_told({name: found[name] for name in ("shape", "rounds", "machine")}))
    return 0


def _bench_engine(options: argparse.Namespace, shape: Any) -> int:
    if options.devices is None:
        options.devices = 1 if options.strategy == "dprc_single" else 2
    _at_least_one(options, "devices", "micro_batches")
    if not options.timeout > 0:
        raise InvalidArgumentError("--timeout", options.timeout, "expected seconds > 0")
    if len(options.sketch_dim) > 1:
        raise InvalidArgumentError("--sketch_dim", options.sketch_dim, "expected one integer with --strategy")
    try:
        settings = json.loads(options.strategy_args)
    except json.JSONDecodeError:
        settings = None
    if not isinstance(settings, dict):
        raise InvalidArgumentError("--strategy_args", options.strategy_args, "expected a JSON object")
    from dprc_lightning.bench.engines import EngineBench, measure_engine

    bench = EngineBench(
        options.strategy, options.devices, settings, shape, options.sketch_dim[0], options.micro_batches, options.rounds
    )
    found = measure_engine(bench, options.timeout, _progress)
    if options.format == "json":
        print(json.dumps(found))
        return 0
    print(f"{'step':<12} {'phase':<18} {'collective':<15} {'calls':>6} {'MiB':>10}")
    for row in found["rows"]:
        for phase, kinds in row["phases"].items():
            for kind, sent in kinds.items():
                print(f"{row['step']:<12} {phase:<18} {kind:<15} {sent['calls']:>6} {sent['bytes'] / 2**20:>10.3f}")
    print(f"\n{'step':<12} {'gathers':>8} {'models':>7} {'reductions':>11} {'models':>7} {'CPU s':>8} {'ratio':>6}")
    for row in found["rows"]:
        print(
            f"{row['step']:<12} {row['gathers']:>8} {row['gathered_models']:>7.2f} {row['reductions']:>11} "
            f"{row['reduced_models']:>7.2f} {row['cpu_seconds_min']:>8.3f} {row['ratio']:>6.2f}"
        )
    print(
        "calls and bytes: one step of rank 0; control: what carries no floating-point numbers; models: bytes over those"
    )
    print("of all parameters; CPU s: all ranks together; ratio: of CPU seconds, on a GPU of wall-clock seconds")
    told = ("strategy", "devices", "options", "shape", "sketch_dim", "micro_batches", "rounds", "machine")
    print(_told({name: found[name] for name in told}))
    return 0


def _bench_noise(options: argparse.Namespace) -> int:
    _at_least_one(options, "rounds", "elements")
    from dprc_lightning.bench.noise import measure_noise

    found = measure_noise(options.elements, options.rounds, _progress)
    if options.format == "json":
        print(json.dumps(found))
        return 0
    print(f"{'elements':>12} {'gradient MiB':>13} {'extra MiB':>10} {'CPU s':>8} {'s per 10^9':>11}")
    for row in found["rows"]:
        print(
            f"{row['elements']:>12} {row['gradient_bytes'] / 2**20:>13.1f} {row['extra_bytes'] / 2**20:>10.1f} "
            f"{row['cpu_seconds_min']:>8.3f} {row['seconds_per_billion']:>11.1f}"
        )
    print("extra: the most that is live beyond parameter and gradient; s per 10^9: CPU seconds, extrapolated")
    print(_told({"elements of a chunk": found["chunk"], "rounds": found["rounds"], "machine": found["machine"]}))
    return 0


def _bench_accounting(options: argparse.Namespace) -> int:
    _at_least_one(options, "steps", "rounds")
    from dprc_lightning.accounting import StepEvent
    from dprc_lightning.bench.accounting import measure_accounting

    event = StepEvent(options.noise_multiplier, options.sample_rate, options.sketch_dim)
    show(measure_accounting(event, options.steps, options.delta, options.rounds), options.format)
    return 0


def _at_least_one(options: argparse.Namespace, *names: str) -> None:
    for name in names:
        value = getattr(options, name)
        if isinstance(value, list) and min(value) < 1:
            raise InvalidArgumentError(f"--{name}", value, "expected integers >= 1")
        if not isinstance(value, list) and value < 1:
            raise InvalidArgumentError(f"--{name}", value, "expected an integer >= 1")


def _progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _told(settings: dict[str, Any]) -> str:
    """Settings in one line, those of a group without braces."""
    parts = []
    for name, value in settings.items():
        inner = ", ".join(f"{key} {entry}" for key, entry in value.items()) if isinstance(value, dict) else value
        if inner != "":
            parts.append(f"{name}: {inner}")
    return "; ".join(parts)
