"""What is to be planned for: from the YAML of `dprc fit`, or from flags alone."""

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from dprc_lightning.accounting import StepEvent
from dprc_lightning.config import PerformanceConfig, PrivacyConfig
from dprc_lightning.errors import ConfigurationError, InvalidArgumentError
from dprc_lightning.plan.costs import Batch
from dprc_lightning.plan.shapes import hugging_face_model
from dprc_lightning.plan.table import Mechanism

if TYPE_CHECKING:
    # A simulator, which most plans do not need.
    from dprc_lightning.plan.pick import Pick

# Of two settings that exclude each other, a flag replaces the one that the file has.
_INSTEAD_OF = {
    "epsilon": "noise_multiplier",
    "noise_multiplier": "epsilon",
    "sample_rate": "expected_batch_size",
    "steps": "epochs",
}
_FLAGS = ("epsilon", "noise_multiplier", "delta", "sample_rate", "steps", "estimator", "projection", "bound")


@dataclass(frozen=True)
class Subject:
    """What is planned for.

    Attributes:
        name: The model, for people.
        model: Without weights, if it can be built so.
        batch: One micro-batch.
        mechanism: All of it but k.
        num_records: N; None if nothing needs it.
        projection_memory: GiB of P that are kept for a step; None for all.
        pick: Picks what `performance.memory` asks for, told what to call with its progress; None if it is not set.
    """

    name: str
    model: nn.Module
    batch: Batch
    mechanism: Mechanism
    num_records: int | None
    projection_memory: float | None = PerformanceConfig.projection_memory
    pick: Callable[[Callable[[str], None]], "Pick"] | None = None


def read_subject(
    options: argparse.Namespace, overrides: Sequence[str], progress: Callable[[str], None] = lambda _: None
) -> Subject:
    """Read and check all settings, then build the model.

    Args:
        options: The flags of `dprc plan`; None where not given.
        overrides: Further settings of the file, ``--privacy.steps 25``.
        progress: Called with what is about to be done.

    Returns:
        The subject.

    Raises:
        ConfigurationError: Settings that are missing, or contradict each other.
        InvalidArgumentError: A flag's value that cannot be used.
    """
    if (options.model is None) == (not options.config):
        raise ConfigurationError(["--config or --model: give one of them, the settings of `dprc fit` or a model"])
    for name in ("tokens", "records", "num_records"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise InvalidArgumentError(f"--{name}", value, "expected an integer >= 1")
    given = {name: getattr(options, name) for name in _FLAGS if getattr(options, name) is not None}
    return _from_file(options, overrides, given, progress) if options.config else _from_flags(options, given, progress)


def _from_flags(options: argparse.Namespace, given: Mapping[str, Any], progress: Callable[[str], None]) -> Subject:
    missing = [f"--{name}" for name in ("tokens", "delta", "sample_rate", "steps") if getattr(options, name) is None]
    if missing:
        raise ConfigurationError([f"{', '.join(missing)}: needed with --model"])
    privacy = PrivacyConfig(**given)
    mechanism = _mechanism(privacy, options.num_records, set(_FLAGS))
    progress(f"reading the shapes of {options.model}")
    name = Path(options.model).name if Path(options.model).is_dir() else options.model
    if options.lora is not None:
        name += f", LoRA of rank {options.lora}"
    return Subject(
        name,
        hugging_face_model(options.model, options.lora),
        Batch(options.records or 1, options.tokens),
        mechanism,
        options.num_records,
    )


def _from_file(
    options: argparse.Namespace, overrides: Sequence[str], given: Mapping[str, Any], progress: Callable[[str], None]
) -> Subject:
    if options.lora is not None:
        raise InvalidArgumentError("--lora", options.lora, "for --model alone; a model of --config brings its own")
    progress("reading " + ", ".join(options.config))
    # Lightning: slow to import.
    from dprc_lightning.plan.file import FileSettings

    settings = FileSettings(options.config, overrides)
    replaced: dict[str, Any] = {_INSTEAD_OF[name]: None for name in given if name in _INSTEAD_OF}
    privacy = replace(settings.privacy, **{**replaced, **given})
    number = options.num_records or settings.num_records
    if number is None and privacy.sample_rate is None:
        raise ConfigurationError([
            f"--num_records: needed, because privacy.expected_batch_size={privacy.expected_batch_size} is a share of "
            "the number of training records (groups, with privacy.group_column)"
        ])
    mechanism = _mechanism(privacy, number, set(given))
    tokens = options.tokens or settings.tokens
    if tokens is None:
        raise ConfigurationError(["--tokens: needed, for the model has no max_length; the tokens of a record"])
    records = options.records or settings.performance.physical_batch_size or 1
    wanted = settings.performance.memory is not None
    if wanted:
        # What it refuses is told before the table takes its time.
        settings.device(None)
    progress(f"building {settings.name} without its weights")
    model = settings.build(progress)
    return Subject(
        settings.name,
        model,
        Batch(records, tokens),
        mechanism,
        number,
        settings.performance.projection_memory,
        (lambda progress: settings.pick(None, progress, model)) if wanted else None,
    )


def _mechanism(privacy: PrivacyConfig, num_records: int | None, flags: set[str]) -> Mechanism:
    """Check the settings as a run would, in the words in which they were given.

    Args:
        privacy: The settings.
        num_records: N, if it is known.
        flags: Those that are spelled ``--delta``, not ``privacy.delta``.

    Returns:
        The mechanism.

    Raises:
        ConfigurationError: Everything that is wrong.
        InvalidArgumentError: What the accounting refuses whatever k is.
    """
    # Without N, delta is not compared to 1 / N.
    problems = privacy.problems(num_records or 1)
    if problems:
        raise ConfigurationError([re.sub(r"privacy\.(\w+)", lambda m: _spelled(m[1], flags), p) for p in problems])
    if privacy.baseline_without_privacy:
        raise ConfigurationError(["privacy.baseline_without_privacy=True: there is no noise to plan; leave it out"])
    # With noise of any size: the rows calibrate their own.
    settled = replace(privacy, epsilon=None, noise_multiplier=1.0, projection="gaussian")
    resolved = settled.resolve(num_records or 1, None)
    try:
        # What holds for every k, before the rows take their time. k is any.
        StepEvent(privacy.noise_multiplier or 1.0, resolved.sample_rate, 32, privacy.projection, privacy.bound)
    except InvalidArgumentError as error:
        raise InvalidArgumentError(_spelled(error.name, flags), error.value, error.remedy) from None
    return Mechanism(
        delta=privacy.delta,
        sample_rate=resolved.sample_rate,
        steps=resolved.budget,
        epsilon=privacy.epsilon,
        noise_multiplier=privacy.noise_multiplier,
        estimator="auto" if privacy.estimator == "exact" else privacy.estimator,
        projection=privacy.projection,
        bound=privacy.bound,
    )


def _spelled(name: str, flags: set[str]) -> str:
    return f"--{name}" if name in flags else f"privacy.{name}"
