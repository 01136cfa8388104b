"""The YAML of `dprc fit`, read for its settings and for the shapes of its model: no data, no trainer, no folder."""

import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from jsonargparse import ArgumentError
from lightning.pytorch.cli import LightningCLI
from torch import cuda

from dprc_lightning.config import PerformanceConfig, PrivacyConfig
from dprc_lightning.datamodule import DPRCDataModule
from dprc_lightning.errors import ConfigurationError
from dprc_lightning.lightning_cli import DPRCCLI, _shorter, find_own_classes
from dprc_lightning.module import DPRCModule
from dprc_lightning.plan.pick import Device, Pick, pick
from dprc_lightning.plan.shapes import weightless
from dprc_lightning.shorthand import parser_mode, spelled_out


class _SettingsCLI(DPRCCLI):
    """Parses what `dprc fit` parses, and makes nothing."""

    def before_instantiate_classes(self) -> None:
        """Strategy and checkpoint do not matter here."""

    def instantiate_classes(self) -> None:
        """Nothing yet: the settings are looked at first."""

    def instantiate_trainer(self, **_: Any) -> Any:
        """None: nothing is trained."""

    def _add_instantiators(self) -> None:
        """They keep hyperparameters for checkpoints."""

    def _set_seed(self) -> None:
        pass

    def _run_subcommand(self, subcommand: str) -> None:
        pass

    def _add_configure_optimizers_method_to_model(self, subcommand: str | None) -> None:
        pass

    def build(self) -> DPRCModule:
        """The model alone, as `dprc fit` would make it.

        Returns:
            The model.
        """
        self.config["fit"]["data"] = None
        self.config["fit"]["trainer"] = None
        super().instantiate_classes()
        return self.model


_PRECISIONS = {"32": "32-true", "bf16": "bf16-mixed", "64": "64-true"}
"""Short forms, as the trainer takes them."""


def _number(devices: Any) -> int:
    """How many devices; of one that cannot be known here, one."""
    if isinstance(devices, list):
        return len(devices)
    return int(devices) if str(devices).isdigit() and int(devices) > 0 else 1


class FileSettings:
    """What the files say.

    Args:
        files: In the order in which they override each other.
        overrides: Further settings as `dprc fit` takes them.

    Raises:
        ConfigurationError: A setting that is not there, or not of its kind.
    """

    def __init__(self, files: Sequence[str], overrides: Sequence[str]) -> None:
        os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
        find_own_classes()
        quiet = {"exit_on_error": False, "parser_mode": parser_mode()}
        arguments = ["fit", *(part for file in files for part in ("--config", file)), *spelled_out(overrides)]
        # As for `dprc fit`: a warning of a difference that cannot be there.
        warnings.filterwarnings("ignore", ".*args parameter is intended to run from within Python.*")
        try:
            self._cli = _SettingsCLI(
                DPRCModule,
                DPRCDataModule,
                subclass_mode_model=True,
                subclass_mode_data=True,
                args=arguments,
                parser_kwargs={
                    "prog": "dprc plan",
                    "default_env": False,
                    **quiet,
                    **dict.fromkeys(LightningCLI.subcommands(), quiet),
                },
                save_config_callback=None,
            )
        except ArgumentError as error:
            raise ConfigurationError([f"{_shorter(str(error))}; dprc fit --help lists all settings"]) from None
        settings = self._cli.config["fit"]
        self.privacy = PrivacyConfig(**settings.privacy.as_dict())
        self.performance = PerformanceConfig(**settings.performance.as_dict())
        self._model, self._data = settings.model, settings.get("data")
        self._trainer = settings.trainer

    @property
    def name(self) -> str:
        """The model's class, and its source if it names one."""
        source = self._model.get("init_args", {}).get("source")
        kind = self._model.class_path.rsplit(".", 1)[-1]
        return kind if source is None else f"{kind} of {source}"

    def device(self, memory: float | None) -> Device:
        """Where the file's training runs, and what of it it may use.

        Args:
            memory: GiB; None for performance.memory.

        Returns:
            The device; with ``accelerator: auto`` and GiB given, some GPU.

        Raises:
            ConfigurationError: Neither is given, or performance.memory cannot be used.
        """
        setting = self.performance.memory if memory is None else memory
        problems = self.performance.problems()
        if setting is None:
            problems.append("--memory: neither it nor performance.memory is set; give GiB")
        if problems:
            raise ConfigurationError(problems)
        assert setting is not None
        accelerator, devices = self._trainer.get("accelerator", "auto"), self._trainer.get("devices")
        gpu = accelerator in ("gpu", "cuda") or (accelerator == "auto" and (memory is not None or cuda.is_available()))
        if gpu and setting == "auto" and not cuda.is_available():
            raise ConfigurationError([
                f"performance.memory=auto: trainer.accelerator={accelerator}, and this machine has none to ask; give "
                "the GiB of the device with --memory"
            ])
        return Device.of(setting, torch.device("cuda", 0) if gpu else torch.device("cpu"), _number(devices))

    def pick(self, memory: float | None, progress: Callable[[str], None], module: DPRCModule | None = None) -> Pick:
        """What `dprc fit` would pick.

        Args:
            memory: GiB of the device; None for performance.memory.
            progress: Called with what is about to be done.
            module: The model, if it is built already.

        Returns:
            The choice.

        Raises:
            ConfigurationError: The model says nothing of its largest batch, or of what `device` refuses.
        """
        if self.privacy.baseline_without_privacy:
            raise ConfigurationError([
                "privacy.baseline_without_privacy=True: the flags belong to the layers of a private run; leave it out"
            ])
        device = self.device(memory)
        if module is None:
            progress(f"building {self.name} without its weights")
            module = self.build(progress)
        strategy = self._trainer.get("strategy", "dprc_single")
        settings: Any = {}
        if not isinstance(strategy, str):
            strategy, settings = strategy.class_path.rsplit(".", 1)[-1], strategy.get("init_args", {})
        buckets = strategy in ("dprc_ddp", "PrivateDDPStrategy") and not settings.get("gradient_as_bucket_view")
        precision = str(self._trainer.get("precision") or "32-true")
        return pick(module, device, precision=_PRECISIONS.get(precision, precision), buckets=buckets, progress=progress)

    @property
    def tokens(self) -> int | None:
        """The tokens that the model keeps of a record, if it has such a setting."""
        return self._model.get("init_args", {}).get("max_length")

    @property
    def num_records(self) -> int | None:
        """N, where the settings alone fix it: a data module may have to fetch its data before it knows."""
        from dprc_lightning.tasks.classification import TextClassificationData

        if self._data is None or self.privacy.group_column is not None:
            return None
        path = f"{TextClassificationData.__module__}.{TextClassificationData.__qualname__}"
        return self._data.init_args.sizes[0] if self._data.class_path == path else None

    def build(self, progress: Callable[[str], None]) -> DPRCModule:
        """Make the model.

        Args:
            progress: Told if its weights are needed after all.

        Returns:
            The model; without weights unless its own code needs them.
        """
        kept = self._cli.config.clone()
        try:
            with weightless():
                return self._cli.build()
        except Exception as error:
            # Code of the user's may do anything with its weights. It runs again as in a real run, and its errors show.
            behind: BaseException = error
            while behind.__cause__ is not None:
                behind = behind.__cause__
            said = " ".join(str(behind).split()) or type(behind).__name__
            progress(f"not possible without its weights ({said}): loading them")
        self._cli.config = kept
        return self._cli.build()
