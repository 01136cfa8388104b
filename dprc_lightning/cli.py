"""The ``dprc`` command: light commands that import no torch, and LightningCLI for fit, validate, test and predict."""

import argparse
import decimal
import json
import math
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

from dprc_lightning import __version__
from dprc_lightning.bench.command import add_benchmarks
from dprc_lightning.errors import DPRCError, InterruptedRun, InvalidArgumentError, RankZeroError
from dprc_lightning.show import show

_LIGHTNING = {
    "fit": "train privately",
    "validate": "evaluate on the validation set",
    "test": "evaluate on the test set",
    "predict": "predict for the test set",
}

_EPILOG = """\
training (dprc fit --help shows all settings):
  dprc fit --config configs/quickstart.yaml [--privacy.epsilon 2]
  dprc validate --config ... --ckpt_path RUN/checkpoints/....ckpt
"""


_PLANNED = (8, 16, 32, 64, 128, 256, 512)

_PLAN = """\
For each sketch_dim k, and for exact norms: the noise that the target epsilon needs (or epsilon, where the noise is
given), the FLOPs of the norms against those of the step, and their memory. No weights and no data are loaded.

Picked is the smallest k whose noise (or epsilon) is within --tolerance percent of the least that any row within
--max_flops and --max_memory has. Exact norms count as the largest k, and are picked wherever they cost no more.

With --config and performance.memory set in the file, the memory flags that dprc fit would pick are shown as well.

With --config, further settings of the file may follow as dprc fit takes them: --model.init_args.trainable_blocks 4.
"""

_PROJECTION = "distribution of the projection's entries: gaussian, or rademacher (random signs; not certified)"

_BOUND = (
    "which proof computes epsilon; training is the same. best: the smaller result of the two. convex: usually tighter, "
    "proved from noise multipliers of 0.289 on. envelope: the paper's, for any noise. (rademacher has its own law)"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script.

    Args:
        argv: Arguments after the program's name; those of the process if None.

    Returns:
        Exit status: 0, 2 after an error that is the user's to mend, told in one line, or 128 + the number of the signal
        that ended the command.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments and arguments[0] in _LIGHTNING:
            from dprc_lightning.lightning_cli import run

            run(arguments)
            return 0
        return _light(arguments)
    except DPRCError as error:
        # Another rank has told the reason.
        if not isinstance(error, RankZeroError):
            print(f"dprc: error: {error}", file=sys.stderr)
        return 2
    except InterruptedRun as interrupt:
        # Every rank is interrupted; one of them tells.
        if os.environ.get("LOCAL_RANK", "0") == "0":
            print(f"dprc: {interrupt}", file=sys.stderr)
        return 128 + interrupt.signal
    except KeyboardInterrupt:
        print("dprc: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # The reader (head, say) has gone.
        return 0


def _light(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="dprc",
        description="Differentially private fine-tuning at long context: DP-SGD with randomized clipping.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"dprc {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command")
    for name, what in _LIGHTNING.items():
        # For the help and the list of what there is: main leaves their arguments to Lightning.
        commands.add_parser(name, help=what, add_help=False)

    calibrate = commands.add_parser("calibrate", help="the noise multiplier that meets a privacy target")
    calibrate.add_argument("--epsilon", type=float, required=True, help="target")
    _mechanism(calibrate)
    calibrate.set_defaults(run=_calibrate)

    epsilon = commands.add_parser(
        "epsilon", help="the epsilon of a noise multiplier: lower bound, estimate, upper bound"
    )
    epsilon.add_argument("--noise_multiplier", type=float, required=True, help="sigma")
    _mechanism(epsilon)
    epsilon.set_defaults(run=_epsilon)

    plan = commands.add_parser(
        "plan",
        help="a table of sketch_dim against noise, memory and FLOPs for a model, and which one to take",
        description=_PLAN,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _plan_arguments(plan)
    plan.set_defaults(run=_plan)

    report = commands.add_parser("report", help="the report of a run")
    report.add_argument("run_dir", help="run folder")
    report.add_argument("--compare", nargs="+", default=[], metavar="RUN_DIR", help="other runs to put beside it")
    report.add_argument("--format", choices=("md", "html", "json"), default="md")
    report.set_defaults(run=_report)

    export = commands.add_parser("export", help="a run's model as a plain Hugging Face folder with a model card")
    export.add_argument("run_dir", help="run folder")
    export.add_argument("out", help="the new folder")
    export.add_argument("--checkpoint", metavar="FILE", help="which of the run's checkpoints; needed if it has several")
    export.add_argument("--adapter_only", action="store_true", help="the adapter of a peft model, nothing beside it")
    export.add_argument("--merge", action="store_true", help="merge the adapter of a peft model into the whole model")
    export.add_argument(
        "--trust_checkpoint",
        action="store_true",
        help="read a folder of shards that the run's secret did not sign; its files can run code",
    )
    export.set_defaults(run=_export)

    bench = commands.add_parser("bench", help="cost of a private step, as ratios to a non-private one")
    add_benchmarks(bench.add_subparsers(dest="what", metavar="what", required=True))

    options, overrides = parser.parse_known_args(arguments)
    if options.command is None:
        parser.print_help()
        return 2
    # Only a plan from a file takes all the settings that the file may have.
    if overrides and not getattr(options, "config", None):
        parser.error(f"unrecognized arguments: {' '.join(overrides)}")
    options.overrides = overrides
    return options.run(options)


def _plan_arguments(plan: argparse.ArgumentParser) -> None:
    plan.add_argument("--config", action="append", metavar="FILE", help="settings of dprc fit; may be repeated")
    plan.add_argument("--model", help="without --config: a folder with config.json, or a Hugging Face name")
    plan.add_argument("--lora", type=int, metavar="RANK", help="with --model: train peft's LoRA on every linear layer")
    plan.add_argument("--tokens", type=int, help="T of a record; default: the model's max_length")
    plan.add_argument("--records", type=int, help="B, records of a micro-batch; default: physical_batch_size, or 1")
    plan.add_argument("--num_records", type=int, help="N, where the settings do not fix it")
    plan.add_argument("--sketch_dim", type=int, nargs="+", default=list(_PLANNED), metavar="K", help="k of each row")
    plan.add_argument("--epsilon", type=float, help="target, to which the noise of each row is calibrated")
    plan.add_argument("--noise_multiplier", type=float, help="instead: sigma, whose epsilon each row tells")
    plan.add_argument("--delta", type=float, help="at most 1 / number of training records")
    plan.add_argument("--sample_rate", type=float, help="q: probability of a record to be in a batch")
    plan.add_argument("--steps", type=int, help="logical steps")
    plan.add_argument("--estimator", choices=("auto", "hutchinson", "hutchpp"), help="of the rows with a k")
    plan.add_argument("--projection", help=_PROJECTION)
    plan.add_argument("--bound", choices=("best", "convex", "envelope"), help=_BOUND)
    plan.add_argument(
        "--tolerance",
        type=float,
        default=2.0,
        metavar="PERCENT",
        help="how much more noise than the least of all rows is fine (default: 2)",
    )
    plan.add_argument(
        "--max_flops",
        type=float,
        default=20.0,
        metavar="PERCENT",
        help="most that the norms may add to the step's (default: 20)",
    )
    plan.add_argument(
        "--max_memory", type=float, default=2.0, metavar="GIB", help="most that P and the norms may take (default: 2)"
    )
    plan.add_argument(
        "--memory",
        type=float,
        metavar="GIB",
        help="that may be used, nine tenths of a card, say: which memory flags it takes to fit, by simulation, in "
        "place of k; with --config, or with --model and --tokens. The exit status is 1 if nothing fits",
    )
    plan.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="bfloat16",
        help="of the parameters, with --memory (default: bfloat16)",
    )
    plan.add_argument("--format", choices=("table", "json"), default="table")


def _mechanism(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--delta", type=float, required=True, help="choose it well below 1 / number of records")
    parser.add_argument("--num_records", type=int, help="N: refuse a delta above 1 / N")
    parser.add_argument("--sample_rate", type=float, required=True, help="q: probability of a record to be in a batch")
    parser.add_argument("--steps", type=int, required=True, help="logical steps")
    parser.add_argument(
        "--sketch_dim", type=int, default=None, help="k, columns of the projection; exact norms without"
    )
    parser.add_argument("--projection", default="gaussian", help=f"{_PROJECTION} (default: gaussian)")
    parser.add_argument(
        "--bound", choices=("best", "convex", "envelope"), default="best", help=f"{_BOUND} (default: best)"
    )
    parser.add_argument("--format", choices=("table", "json"), default="table", help="(default: table)")


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    records = options.num_records
    if records is not None and (records < 1 or not options.delta <= 1 / records):
        raise InvalidArgumentError(
            "--delta",
            options.delta,
            f"above 1 / num_records (--num_records {records}): it would allow to publish a record",
        )
    names = ("delta", "sample_rate", "steps", "sketch_dim", "projection", "bound")
    return {name: getattr(options, name) for name in names}


def _calibrate(options: argparse.Namespace) -> int:
    from dprc_lightning.accounting import calibrate_noise_multiplier, epsilon

    settings = _settings(options)
    sigma = calibrate_noise_multiplier(epsilon=options.epsilon, **settings)
    bounds = epsilon(noise_multiplier=sigma, **settings)
    found = {"noise_multiplier": sigma if options.format == "json" else _rounded_up(sigma), "epsilon": options.epsilon}
    if options.sketch_dim is not None:
        exact = calibrate_noise_multiplier(
            epsilon=options.epsilon, **settings | {"sketch_dim": None, "projection": "gaussian"}
        )
        # What a larger sketch_dim could buy back, at most.
        found["over_exact_norms"] = f"+{100 * (sigma / exact - 1):.1f} %"
    found |= {
        "epsilon_bounds": {"lower": bounds.lower, "estimate": bounds.estimate, "upper": bounds.upper},
        "certified": bounds.certified,
    }
    show(found, options.format, settings)
    return 0


def _epsilon(options: argparse.Namespace) -> int:
    from dprc_lightning.accounting import StepEvent, epsilon

    settings = _settings(options)
    bounds = epsilon(noise_multiplier=options.noise_multiplier, **settings)
    found: dict[str, Any] = {
        "epsilon": {"lower": bounds.lower, "estimate": bounds.estimate, "upper": bounds.upper},
        "certified": bounds.certified,
    }
    if math.isinf(bounds.upper):
        from dprc_lightning.accounting.infinite import why_infinite

        mechanism = (settings["sample_rate"], settings["sketch_dim"], settings["projection"], settings["bound"])
        event = StepEvent(options.noise_multiplier, *mechanism)
        found["reason"] = why_infinite([(event, options.steps)], options.delta)
    show(found, options.format, {"noise_multiplier": options.noise_multiplier, **settings})
    return 0


def _plan(options: argparse.Namespace) -> int:
    from dprc_lightning.plan.command import run

    return run(options, options.overrides)


def _report(options: argparse.Namespace) -> int:
    from dprc_lightning.report import read_report, to_html, to_markdown

    report = read_report(options.run_dir)
    others = [read_report(folder) for folder in options.compare]
    if options.format == "json":
        print(json.dumps({"report": report, "compare": others} if others else report, indent=2, sort_keys=True))
    else:
        print(to_markdown(report, others) if options.format == "md" else to_html(report, others))
    return 0


def _export(options: argparse.Namespace) -> int:
    from dprc_lightning.export import export

    export(
        options.run_dir,
        options.out,
        checkpoint=options.checkpoint,
        adapter_only=options.adapter_only,
        merge=options.merge,
        trust_checkpoint=options.trust_checkpoint,
    )
    print(f"{options.out}: exported; its README.md carries the privacy statement")
    return 0


def _rounded_up(sigma: float) -> str:
    """Six digits, never less noise than was found."""
    return format(decimal.Context(prec=6, rounding=decimal.ROUND_CEILING).create_decimal_from_float(sigma), "f")


if __name__ == "__main__":
    sys.exit(main())
