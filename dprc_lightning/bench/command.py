"""``dprc bench``: the arguments of the benchmarks, and what they print. Nothing slow is imported before one runs."""

import argparse
import dataclasses
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
    step.add_argument("--tokens", type=int, nargs="+", default=[512], help="T; several with --simulate")
    step.add_argument("--records", type=int, default=None, help="B; default 4, with --simulate 1")
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
    _add_simulation(step)
    step.add_argument("--format", choices=("table", "json"), default="table")
    step.set_defaults(run=_bench_step)

    noise = benches.add_parser("noise", help="memory and CPU seconds of the noise on one rank's shard of a gradient")
    noise.add_argument("--elements", type=int, nargs="+", default=[2**22, 2**24, 2**26], help="of the shard, float32")
    noise.add_argument("--rounds", type=int, default=3, help="how often each size is timed")
    noise.add_argument("--format", choices=("table", "json"), default="table")
    noise.set_defaults(run=_bench_noise)

    projection = benches.add_parser("projection", help="memory and CPU seconds of one layer's norm against k")
    projection.add_argument("--rows", type=int, default=128256, help="of P: the longer axis of the weight")
    projection.add_argument("--other", type=int, default=2048, help="the shorter one")
    projection.add_argument("--tokens", type=int, default=512, help="T")
    projection.add_argument("--records", type=int, default=1, help="B")
    projection.add_argument("--one_hot", action="store_true", help="an embedding, of random ids")
    projection.add_argument("--sketch_dim", type=int, nargs="+", default=[32, 128, 512, 1024, 2048, 4096], help="k")
    projection.add_argument("--projection", choices=("gaussian", "rademacher"), default="gaussian")
    projection.add_argument("--rounds", type=int, default=1, help="how often each row is timed")
    projection.add_argument("--format", choices=("table", "json"), default="table")
    projection.set_defaults(run=_bench_projection)

    accounting = benches.add_parser("accounting", help="cost of knowing epsilon after each step of a run")
    accounting.add_argument("--noise_multiplier", type=float, required=True, help="sigma")
    accounting.add_argument("--sample_rate", type=float, required=True, help="q")
    accounting.add_argument("--steps", type=int, required=True, help="logical steps of the run")
    accounting.add_argument("--delta", type=float, default=1e-5)
    accounting.add_argument("--sketch_dim", type=int, default=None, help="k; exact norms without")
    accounting.add_argument("--rounds", type=int, default=5, help="how often it is timed")
    accounting.add_argument("--format", choices=("table", "json"), default="table")
    accounting.set_defaults(run=_bench_accounting)


def _add_simulation(step: argparse.ArgumentParser) -> None:
    group = step.add_argument_group("--simulate", "peak memory and FLOPs of a model of any size, without its memory")
    group.add_argument("--simulate", action="store_true", help="run without numbers, on torch's meta device")
    group.add_argument("--compare", action="store_true", help="run the same on real tensors of the CPU as well")
    group.add_argument("--model", metavar="FOLDER", help="with config.json, a Hugging Face name, or smollm2")
    group.add_argument("--lora", type=int, metavar="RANK", help="train peft's LoRA on every linear layer but the head")
    group.add_argument("--dtype", choices=("float32", "bfloat16"), help="of all parameters; default float32")
    group.add_argument("--estimator", choices=("auto", "exact", "hutchinson", "hutchpp"), help="default hutchinson")
    group.add_argument("--projection", choices=("gaussian", "rademacher"), help="default gaussian")
    group.add_argument("--chunked_head", action="store_true", help="head and loss in blocks of tokens, on both sides")
    group.add_argument("--mlp_chunk", type=int, metavar="TOKENS", help="MLPs so many tokens at a time, on both sides")
    group.add_argument(
        "--offload_checkpoints", action="store_true", help="inputs of checkpoints to the host's memory, on both sides"
    )


_OF_SIMULATION = (
    "compare",
    "model",
    "lora",
    "dtype",
    "estimator",
    "projection",
    "chunked_head",
    "mlp_chunk",
    "offload_checkpoints",
)


def _bench_step(options: argparse.Namespace) -> int:
    if options.records is None:
        options.records = 1 if options.simulate else 4
    _at_least_one(options, "tokens", "records", "rounds", "sketch_dim")
    if options.simulate:
        return _bench_simulation(options)
    for name in _OF_SIMULATION:
        if getattr(options, name):
            raise InvalidArgumentError(f"--{name}", getattr(options, name), "goes with --simulate alone")
    if len(options.tokens) > 1:
        raise InvalidArgumentError("--tokens", options.tokens, "expected one integer without --simulate")
    from dprc_lightning.bench.step import StepShape, measure_step

    shape = StepShape(
        tokens=options.tokens[0], records=options.records, tied=options.tied, checkpointing=options.checkpointing
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


def _bench_simulation(options: argparse.Namespace) -> int:
    if options.strategy is not None:
        raise InvalidArgumentError("--strategy", options.strategy, "goes without --simulate")
    if len(options.sketch_dim) > 1:
        raise InvalidArgumentError("--sketch_dim", options.sketch_dim, "expected one integer with --simulate")
    if options.tied and options.model is not None:
        raise InvalidArgumentError("--tied", True, "is for the small Llama; with --model the config.json says it")
    from dprc_lightning.bench.simulate import SimulatedStep, compare, simulate
    from dprc_lightning.bench.step import StepShape

    given = {name: getattr(options, name) for name in _OF_SIMULATION if name != "compare"}
    given = {name: value for name, value in given.items() if value is not None and value is not False}
    step = SimulatedStep(
        records=options.records,
        checkpointing=options.checkpointing,
        sketch_dim=options.sketch_dim[0],
        shape=StepShape(tied=options.tied),
        **given,
    )
    run = compare if options.compare else simulate
    rows = [row for tokens in options.tokens for row in run(dataclasses.replace(step, tokens=tokens), _progress)]
    if options.format == "json":
        print(json.dumps({"step": dataclasses.asdict(step), "rows": rows}))
        return 0
    kinds = [*rows[0]["categories"]]
    head = " ".join(f"{kind:>11}" for kind in kinds)
    print(
        f"{'step':<32} {'T':>7} {'peak GiB':>9} {'ratio':>6} {head} {'host':>7} {'TFLOP':>9} {'ratio':>6} "
        f"{'attention':>10} {'ratio':>6}"
    )
    for row in rows:
        made_of = " ".join(f"{row['categories'][kind] / 2**30:>11.3f}" for kind in kinds)
        print(
            f"{row['step']:<32} {row['tokens']:>7} {row['peak_bytes'] / 2**30:>9.3f} {row['peak_bytes_ratio']:>6.3f} "
            f"{made_of} {row['host_bytes'] / 2**30:>7.3f} {row['flops'] / 1e12:>9.3f} {row['flops_ratio']:>6.3f} "
            f"{row['attention_flops'] / 1e12:>10.3f} {row['all_flops_ratio']:>6.3f}"
        )
    if options.compare:
        print(
            f"\n{'step':<32} {'T':>7} {'simulated':>14} {'real bytes':>14} {'difference':>11} {'host':>12} {'real':>12}"
        )
        for row in rows:
            print(
                f"{row['step']:<32} {row['tokens']:>7} {row['peak_bytes']:>14} {row['real_bytes']:>14} "
                f"{row['difference']:>11.4%} {row['host_bytes']:>12} {row['real_host_bytes']:>12}"
            )
    print("peak: live tensors at one time, no optimizer; then what it is made of, GiB; host: offloaded, beside it.")
    print("TFLOP: matrix products; attention: by formula, beside them; its ratio: of both together")
    settings = {name: value for name, value in dataclasses.asdict(step).items() if name not in {"tokens", "shape"}}
    print(_told({name: value for name, value in settings.items() if value not in {None, False}}))
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


def _bench_projection(options: argparse.Namespace) -> int:
    _at_least_one(options, "rows", "other", "tokens", "records", "sketch_dim", "rounds")
    from dprc_lightning.bench.projection import LayerShape, measure_projection

    shape = LayerShape(options.rows, options.other, options.tokens, options.records, options.one_hot)
    found = measure_projection(shape, options.sketch_dim, options.projection, options.rounds, _progress)
    if options.format == "json":
        print(json.dumps(found))
        return 0
    print(f"{'k':>6} {'P':>9} {'kept MiB':>9} {'peak MiB':>9} {'first s':>8} {'next s':>8}")
    for row in found["rows"]:
        print(
            f"{row['sketch_dim']:>6} {'kept' if row['kept'] else 'made anew':>9} {row['kept_bytes'] / 2**20:>9.1f} "
            f"{row['peak_bytes'] / 2**20:>9.1f} {row['first_seconds']:>8.3f} {row['next_seconds']:>8.3f}"
        )
    print("peak: the most that is live beyond the layer's factors; first, next: CPU seconds of the first micro-batch")
    print("of a step, which draws P, and of each later one")
    print(_told({name: found[name] for name in ("shape", "projection", "rounds", "machine")}))
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
