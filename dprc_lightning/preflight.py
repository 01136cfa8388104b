"""Everything that can be wrong with a fit, found before any work and told together, in the words of the command line.

None of the checks gives privacy: a setting that slipped through would meet the guards of the step itself. They are here
because a refusal in the first second, with the remedy, is cheaper than one in the middle.
"""

import math
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
    StochasticWeightAveraging,
    Timer,
)
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch.utils.data import IterableDataset

from dprc_lightning.clipping.two_pass import matmul_precision
from dprc_lightning.config import PrivacyConfig
from dprc_lightning.datamodule import DPRCDataModule
from dprc_lightning.diagnostics import is_unprotected
from dprc_lightning.errors import ConfigurationError, DatasetError, UnprotectedStrategyError
from dprc_lightning.run import refuse_used_folder
from dprc_lightning.strategies import PrivateStrategy
from dprc_lightning.whole_checkpoint import REST

if TYPE_CHECKING:
    # The module calls this file; it must not need the module to be imported first.
    from dprc_lightning.lifecycle import RunLifecycle

PRECISIONS = ("32-true", "64-true", "bf16-mixed", "bf16-true")

_WHOLE_MODEL = ("dprc_single", "dprc_ddp")
"""Strategies in which each device has all of the model."""

# Metrics that say nothing of the private records: those of other data, and epsilon, which counts steps.
_NOT_PRIVATE = re.compile(r"(val|valid|validation|test|privacy)([/_.-]|$)")

_REFUSED_CALLBACKS: tuple[tuple[type[pl.Callback], str], ...] = (
    (
        LearningRateFinder,
        "it trains on private records outside of the budget; compare learning rates in private runs, or on public data",
    ),
    (
        BatchSizeFinder,
        "it changes the batch size, which the guarantee depends on; set performance.physical_batch_size to what fits "
        "in memory",
    ),
    (
        StochasticWeightAveraging,
        "it takes over the learning rate and the number of epochs, which privacy.steps decides; leave it out",
    ),
    (
        GradientAccumulationScheduler,
        "every logical batch is one optimizer step; performance.physical_batch_size cuts it into what fits in memory",
    ),
)


def check(
    trainer: pl.Trainer,
    module: "RunLifecycle",
    datamodule: Any,
    *,
    ckpt_path: str | Path | None = None,
    data_is_ready: bool = False,
) -> None:
    """Refuse a fit that cannot be what was meant.

    Args:
        trainer: The trainer, before `fit` or within it.
        module: What is to be fitted.
        datamodule: What `fit` was given, or None.
        ckpt_path: What to resume from.
        data_is_ready: As for `problems`.

    Raises:
        UnprotectedStrategyError: The strategy adds no noise, and nothing else is wrong.
        ConfigurationError: All problems together.
    """
    found = problems(trainer, module, datamodule, ckpt_path=ckpt_path, data_is_ready=data_is_ready)
    if found and found == list(_strategy(trainer)):
        raise UnprotectedStrategyError(found[0])
    if found:
        raise ConfigurationError(found)


def problems(
    trainer: pl.Trainer,
    module: "RunLifecycle",
    datamodule: Any,
    *,
    ckpt_path: str | Path | None = None,
    data_is_ready: bool = False,
) -> list[str]:
    """Everything that is wrong with a fit.

    Args:
        trainer: The trainer, before `fit` or within it.
        module: What is to be fitted.
        datamodule: What `fit` was given, or None.
        ckpt_path: What to resume from.
        data_is_ready: Whether `prepare_data` and `setup` have run. Before that, the number of records is looked at only
            if the data module has neither.

    Returns:
        One line per problem, each naming the setting, its value and the remedy.
    """
    found: list[str] = []
    units = _number_of_units(module.privacy, datamodule, data_is_ready, found)
    if units is None:
        # No number can contradict this one but by delta, whose bound is not known yet.
        privacy_problems = replace(module.privacy, allow_large_delta=True).problems(sys.maxsize)
    else:
        privacy_problems = module.privacy.problems(units)
    return [
        *module.performance.problems(),
        *_private_flags(module),
        *_memory(trainer, module),
        *privacy_problems,
        *found,
        *_strategy(trainer),
        *_engine(trainer, module),
        *_module(module),
        *_limits(trainer, module),
        *_settings(trainer, module.privacy),
        *_validation(trainer, module.privacy, units),
        *_callbacks(trainer, module.privacy),
        *_folder(trainer, ckpt_path),
    ]


def _private_flags(module: "RunLifecycle") -> Iterator[str]:
    """What only a private run's layers can do."""
    if module.privacy.baseline_without_privacy:
        for name in ("mlp_chunk", "offload_checkpoints", "memory"):
            value = getattr(module.performance, name)
            if value:
                yield (
                    f"performance.{name}={value}: it belongs to the layers of a private run, and "
                    "privacy.baseline_without_privacy=true leaves the model as it is; leave it out"
                )


def _memory(trainer: pl.Trainer, module: "RunLifecycle") -> Iterator[str]:
    """What of performance.memory can be known before a step is simulated."""
    from dprc_lightning.module import DPRCModule

    setting = module.performance.memory
    if setting is None or module.privacy.baseline_without_privacy:
        return
    strategy = trainer.strategy
    if isinstance(strategy, PrivateStrategy) and strategy.strategy_name not in _WHOLE_MODEL:
        yield (
            f"performance.memory={setting}: a step of one device with the whole model is simulated, and "
            f"trainer.strategy={strategy.strategy_name} shares it among ranks; set the flags that `dprc plan --config "
            "FILE --memory GIB` shows by hand, and leave it out"
        )
    if not is_overridden("largest_batch", module, DPRCModule):
        yield (
            f"performance.memory={setting}: {type(module).__name__}.largest_batch is not written; return a micro-batch "
            "of the largest shapes, or leave performance.memory out"
        )


def warnings(trainer: pl.Trainer, module: "RunLifecycle") -> list[str]:
    """What a fit may do but its user should know: what it gives away beyond epsilon, and what it leaves unused.

    Args:
        trainer: The trainer.
        module: What is to be fitted.

    Returns:
        One line per warning.
    """
    found = []
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        monitor = getattr(callback, "monitor", None)
        name = f"{type(callback).__name__}(monitor={monitor!r})"
        if isinstance(callback, Timer) and callback.time_remaining() is not None:
            found.append(
                "trainer.max_time: training ends by the clock; the noise is calibrated for all steps of privacy.steps, "
                "and those that are not made are noise for nothing"
            )
        if module.privacy.baseline_without_privacy or monitor is None:
            continue
        private = not _NOT_PRIVATE.match(monitor)
        if isinstance(callback, EarlyStopping) and private:
            found.append(
                f"{name}: when training stops depends on private data without noise, and epsilon does not cover it; "
                "let privacy.steps decide, or monitor a metric of public data"
            )
        elif isinstance(callback, EarlyStopping):
            found.append(
                f"{name}: the validation set is not protected, and when training stops depends on it; use public "
                "records there"
            )
        elif isinstance(callback, ModelCheckpoint) and private:
            found.append(
                f"{name}: which checkpoint is kept depends on private data without noise, and epsilon does not cover "
                "it; keep the last one (no monitor), or monitor a metric of public data"
            )
    return found


@rank_zero_only
def warn(trainer: pl.Trainer, module: "RunLifecycle") -> None:
    """Print the warnings, one line each.

    Args:
        trainer: The trainer.
        module: What is to be fitted.
    """
    for line in warnings(trainer, module):
        print(f"dprc: warning: {line}", file=sys.stderr, flush=True)


def checkpoint_problem(path: str | Path) -> str | None:
    """What is wrong with a checkpoint to load.

    Args:
        path: As given by ``--ckpt_path``. Lightning's special words and addresses with a scheme are left to it.

    Returns:
        One line with the checkpoints that are there, or None.
    """
    if str(path) in ("best", "last", "hpc") or str(path).startswith("registry") or "://" in str(path):
        return None
    place = Path(path)
    # A sharded checkpoint is a folder too.
    is_run = place.is_dir() and ((place / "checkpoints").is_dir() or bool(list(place.glob("*.ckpt"))))
    if place.is_dir() and not is_run and not (place / REST).exists():
        return f"--ckpt_path {path}: a folder without {REST}, so no checkpoint of this library; name another one"
    if place.exists() and not is_run:
        return None
    said = "a folder of checkpoints; name one of them" if is_run else "no such file"
    for folder in (place / "checkpoints", place) if is_run else (place.parent, place.parent / "checkpoints"):
        there = sorted(folder.glob("*.ckpt"), key=lambda file: file.stat().st_mtime, reverse=True)
        if there:
            return f"--ckpt_path {path}: {said}; {folder} has: {', '.join(file.name for file in there[:5])}"
    return f"--ckpt_path {path}: {said}; {place.parent} has no checkpoints"


def our_strategies() -> list[str]:
    """The aliases of the strategies that add noise."""
    return [name for name in StrategyRegistry.available_strategies() if name.startswith("dprc_")]


def _strategy(trainer: pl.Trainer) -> Iterator[str]:
    if not isinstance(trainer.strategy, PrivateStrategy):
        yield (
            f"trainer.strategy={type(trainer.strategy).__name__}: it adds no noise; "
            f"use one of ours, such as --trainer.strategy {'dprc_ddp' if trainer.world_size > 1 else 'dprc_single'}"
        )


def _engine(trainer: pl.Trainer, module: "RunLifecycle") -> Iterator[str]:
    if isinstance(trainer.strategy, PrivateStrategy):
        yield from trainer.strategy.problems(trainer, module)


def _module(module: "RunLifecycle") -> Iterator[str]:
    name = type(module).__name__
    if module.automatic_optimization:
        yield f"{name}.automatic_optimization=True: the library steps the optimizer itself; leave it False"
    if not is_overridden("configure_optimizers", module, pl.LightningModule):
        yield f"{name}.configure_optimizers: not written; return one optimizer, or give --optimizer"


def _number_of_units(privacy: PrivacyConfig, datamodule: Any, data_is_ready: bool, found: list[str]) -> int | None:
    """N, if it can be had already; what is wrong with the data goes to `found`."""
    if not isinstance(datamodule, DPRCDataModule):
        found.append("trainer.fit: give it a DPRCDataModule, which builds the Poisson batches (datamodule=...)")
        return None
    name = type(datamodule).__name__
    loader = getattr(datamodule.train_dataloader, "__func__", None)
    if loader is not DPRCDataModule.train_dataloader:
        found.append(
            f"{name}.train_dataloader: a loader of one's own shuffles or streams, and the guarantee needs Poisson "
            "batches; remove it and return the records from train_dataset"
        )
    prepares = any(is_overridden(hook, datamodule, pl.LightningDataModule) for hook in ("prepare_data", "setup"))
    if prepares and not data_is_ready:
        return None
    try:
        records: Any = datamodule.training_set
        indexed = hasattr(records, "__len__") and hasattr(records, "__getitem__")
        if isinstance(records, IterableDataset) or not indexed:
            found.append(
                f"{name}.train_dataset: a {type(records).__name__} cannot be sampled record by record; return a "
                "map-style data set (__len__ and __getitem__)"
            )
            return None
        return datamodule.num_units(privacy)
    except ConfigurationError as error:
        found += error.problems
    except DatasetError as error:
        found.append(str(error))
    return None


def _limits(trainer: Any, module: "RunLifecycle") -> Iterator[str]:
    """Who decides when training ends: the budget alone."""
    privacy = module.privacy
    name = "privacy.epochs" if privacy.steps is None and privacy.epochs is not None else "privacy.steps"
    decides = f"{name}={getattr(privacy, name.removeprefix('privacy.'))} decides"
    if trainer.fast_dev_run:
        # It sets the other limits by itself.
        yield (
            f"trainer.fast_dev_run={trainer.fast_dev_run}: it would spend steps of the budget and keep no checkpoint; "
            "set privacy.steps=1 for a trial"
        )
        return
    # After a fit these are the library's own, set from the budget; and what Lightning puts in while fit starts is not
    # the user's.
    fitted = module.private_run is not None
    unset = (None, -1) if trainer.state.fn is None else (None, -1, 1000)
    if not fitted and trainer.max_steps not in (-1, privacy.steps):
        yield f"trainer.max_steps={trainer.max_steps}: {decides}; leave max_steps out"
    if not fitted and trainer.max_epochs not in unset:
        yield f"trainer.max_epochs={trainer.max_epochs}: {decides}; leave max_epochs out, or set privacy.epochs instead"
    if trainer.min_steps is not None and privacy.steps is not None and trainer.min_steps > privacy.steps:
        yield f"trainer.min_steps={trainer.min_steps}: {decides}; leave min_steps out"
    if trainer.min_epochs is not None and privacy.epochs is not None and trainer.min_epochs > math.ceil(privacy.epochs):
        yield f"trainer.min_epochs={trainer.min_epochs}: {decides}; leave min_epochs out"
    if trainer.overfit_batches:
        # It sets limit_train_batches by itself.
        yield (
            f"trainer.overfit_batches={trainer.overfit_batches}: the batches of private steps are random and never "
            "repeat; leave it out"
        )
    elif isinstance(trainer.limit_train_batches, int) or trainer.limit_train_batches != 1.0:
        yield f"trainer.limit_train_batches={trainer.limit_train_batches}: {decides}; leave limit_train_batches out"


def _settings(trainer: Any, privacy: PrivacyConfig) -> Iterator[str]:
    if trainer.gradient_clip_val:
        yield (
            f"trainer.gradient_clip_val={trainer.gradient_clip_val}: privacy.max_grad_norm clips each record's "
            "gradient; leave gradient_clip_val out"
        )
    if trainer.accumulate_grad_batches != 1:
        yield (
            f"trainer.accumulate_grad_batches={trainer.accumulate_grad_batches}: every logical batch is one optimizer "
            "step, cut by performance.physical_batch_size into what fits in memory; leave accumulate_grad_batches out"
        )
    if trainer.reload_dataloaders_every_n_epochs:
        yield (
            f"trainer.reload_dataloaders_every_n_epochs={trainer.reload_dataloaders_every_n_epochs}: the training set "
            "and its size are fixed for the whole run; leave it out"
        )
    if privacy.baseline_without_privacy:
        return
    products = matmul_precision()
    if products != "highest":
        yield (
            f"torch.set_float32_matmul_precision({products!r}): what it takes off a norm is not accounted; "
            'set it to "highest"'
        )
    precision = trainer.precision
    if str(precision).startswith("16"):
        yield (
            f"trainer.precision={precision}: float16 needs loss scaling, which would change gradients between the "
            f"passes; use one of {', '.join(PRECISIONS)}"
        )
    elif precision not in PRECISIONS:
        yield f"trainer.precision={precision}: not supported; use one of {', '.join(PRECISIONS)}"


def _validation(trainer: Any, privacy: PrivacyConfig, units: int | None) -> Iterator[str]:
    """Lightning would raise this one when the loaders are made: after the ledger."""
    rate = privacy.sample_rate
    if rate is None and units and privacy.expected_batch_size is not None:
        rate = privacy.expected_batch_size / units
    interval = getattr(trainer, "val_check_interval", None)
    if rate is None or not 0 < rate <= 1 or not isinstance(interval, int):
        return
    by_epoch = trainer.check_val_every_n_epoch is not None and trainer.limit_val_batches > 0
    steps = math.ceil(1 / rate)
    if by_epoch and interval > steps:
        yield (
            f"trainer.val_check_interval={interval}: an epoch has {steps} steps (1 / sample_rate); set "
            "trainer.check_val_every_n_epoch=null to count steps across epochs"
        )


def _callbacks(trainer: Any, privacy: PrivacyConfig) -> Iterator[str]:
    for callback in trainer.callbacks:
        for kind, reason in _REFUSED_CALLBACKS:
            if isinstance(callback, kind):
                yield f"trainer.callbacks: {type(callback).__name__}: {reason}"
        monitor = getattr(callback, "monitor", None)
        if monitor and is_unprotected(monitor) and not privacy.log_unprotected:
            yield (
                f"trainer.callbacks: {type(callback).__name__}(monitor={monitor!r}): privacy.log_unprotected=false "
                "leaves this metric out; monitor a metric of public data"
            )


def _folder(trainer: Any, ckpt_path: str | Path | None) -> Iterator[str]:
    """Where the run will live; later the process that writes there looks again."""
    if ckpt_path is not None:
        problem = checkpoint_problem(ckpt_path)
        if problem:
            yield problem
        return
    # While fit starts the trainer does not tell yet what it resumes from, and a requeued job finds that by itself.
    may_resume = trainer.state.fn is not None or SLURMEnvironment.detect()
    if trainer.is_global_zero and not trainer.fast_dev_run and not may_resume:
        try:
            refuse_used_folder(Path(str(trainer.log_dir or trainer.default_root_dir)))
        except ConfigurationError as error:
            yield from error.problems
