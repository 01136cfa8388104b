"""fit, validate, test and predict: LightningCLI with the privacy and performance settings at the top."""

import logging
import os
import warnings
from collections.abc import Sequence
from typing import Any

from lightning.pytorch.cli import LightningArgumentParser, LightningCLI

from dprc_lightning.config import PerformanceConfig, PrivacyConfig
from dprc_lightning.datamodule import DPRCDataModule
from dprc_lightning.module import DPRCModule

# Lightning's advice for ordinary training, which is wrong here: the train loader yields whole logical batches, which
# the module moves piece by piece.
_ADVICE = (
    ".*does not have many workers.*",
    ".*smaller than the logging interval.*",
    ".*You have overridden `transfer_batch_to_device`.*",
    ".*LeafSpec.* is deprecated.*",
)


class DPRCCLI(LightningCLI):
    """LightningCLI for a DPRCModule and a DPRCDataModule."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Put ``--privacy.*`` and ``--performance.*`` at the top, and hand them to the model.

        Args:
            parser: Lightning's.
        """
        parser.add_class_arguments(PrivacyConfig, "privacy")
        parser.add_class_arguments(PerformanceConfig, "performance")
        parser.link_arguments("privacy", "model.init_args.privacy")
        parser.link_arguments("performance", "model.init_args.performance")
        parser.add_argument("--test_after_fit", type=bool, default=False, help="Test the trained weights after fit.")

    def after_fit(self) -> None:
        """Test the weights at hand, if asked to."""
        if self.config["fit"]["test_after_fit"]:
            self.trainer.test(self.model, datamodule=self.datamodule, verbose=False)


def run(arguments: Sequence[str]) -> None:
    """Run one of LightningCLI's subcommands.

    Args:
        arguments: ``fit --config ...``, without the program's name.
    """
    # Nothing here needs a hub; a run that uses one sets it to 0.
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    for message in _ADVICE:
        warnings.filterwarnings("ignore", message)
    # dprc dispatches before Lightning parses; it warns of a difference between the two that cannot be there.
    warnings.filterwarnings("ignore", ".*args parameter is intended to run from within Python.*")
    logging.getLogger("lightning.pytorch.utilities.rank_zero").addFilter(_not_an_advertisement)
    DPRCCLI(
        DPRCModule,
        DPRCDataModule,
        subclass_mode_model=True,
        subclass_mode_data=True,
        args=list(arguments),
        parser_kwargs={"prog": "dprc", "default_env": False},
        save_config_kwargs={"overwrite": True},
        # The privacy budget decides when training ends.
        trainer_defaults={"max_epochs": -1, "strategy": "dprc_single", "devices": 1},
        seed_everything_default=0,
    )


def _not_an_advertisement(record: Any) -> bool:
    return "litlogger" not in record.getMessage() and "litmodels" not in record.getMessage()
