"""The YAML of `dprc fit`, read for its settings and for the shapes of its model: no data, no trainer, no folder."""

import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from jsonargparse import ArgumentError
from lightning.pytorch.cli import LightningCLI
from torch import nn

from dprc_lightning.config import PerformanceConfig, PrivacyConfig
from dprc_lightning.datamodule import DPRCDataModule
from dprc_lightning.errors import ConfigurationError
from dprc_lightning.lightning_cli import DPRCCLI, _shorter, find_own_classes
from dprc_lightning.module import DPRCModule
from dprc_lightning.plan.shapes import weightless


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
        quiet = {"exit_on_error": False}
        arguments = ["fit", *(part for file in files for part in ("--config", file)), *overrides]
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

    @property
    def name(self) -> str:
        """The model's class, and its source if it names one."""
        source = self._model.get("init_args", {}).get("source")
        kind = self._model.class_path.rsplit(".", 1)[-1]
        return kind if source is None else f"{kind} of {source}"

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

    def build(self, progress: Callable[[str], None]) -> nn.Module:
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
