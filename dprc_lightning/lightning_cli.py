"""fit, validate, test and predict: LightningCLI with the privacy and performance settings at the top."""

import logging
import os
import re
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from jsonargparse import ArgumentError, Namespace
from lightning.pytorch.callbacks import ProgressBar
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.utilities.exceptions import MisconfigurationException, SIGTERMException
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from dprc_lightning import preflight
from dprc_lightning.accounting.ledger import LEDGER_NAME
from dprc_lightning.config import PerformanceConfig, PrivacyConfig
from dprc_lightning.datamodule import DPRCDataModule
from dprc_lightning.errors import ConfigurationError, DPRCError, InterruptedRun
from dprc_lightning.module import DPRCModule
from dprc_lightning.run import own_folder
from dprc_lightning.shorthand import parser_mode, spelled_out
from dprc_lightning.strategies import PrivateStrategy
from dprc_lightning.strategies.sharded_checkpoints import ShardedCheckpoints

# Lightning's advice for ordinary training, which is wrong here: the train loader yields whole logical batches, which
# the module moves piece by piece; and a run that goes on does so in its own folder.
_ADVICE = (
    ".*does not have many workers.*",
    ".*smaller than the logging interval.*",
    ".*You have overridden `transfer_batch_to_device`.*",
    ".*LeafSpec.* is deprecated.*",
    ".*Checkpoint directory .* exists and is not empty.*",
    ".*Experiment logs directory .* exists and is not empty.*",
    ".*The dirpath has changed from .*",
    # Of DeepSpeed's calls to torch, each time.
    ".*all_gather_into_tensor is deprecated.*",
    ".*reduce_scatter_tensor is deprecated.*",
    # It is not ignored: DeepSpeed runs the backward that it asks for.
    ".*backward. hook but it will be ignored.*",
    # `dprc export` makes one file of it.
    ".*When saving the DeepSpeed Stage 3 checkpoint.*",
)

# What Lightning tells that is of no use here, or that the run's own lines tell better.
_CHATTER = (
    "litlogger",
    "litmodels",
    "Seed set to",
    "GPU available: False",
    "TPU available",
    "`Trainer.fit` stopped: `max_steps",
    "Restoring states from",
    "Restored all states from",
    "Loaded model weights from",
    "All distributed processes registered",
    "`weights_only` was not set",
)

_FOLDER_LOGGERS = ("TensorBoardLogger", "CSVLogger")


class SaveRunConfig(SaveConfigCallback):
    """Keeps ``config.yaml`` of the start; each resume in the same folder adds ``config-2.yaml`` and so on."""

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        """Nothing yet: a start may still be refused, and evaluation makes nothing that needs the settings.

        Args:
            trainer: The trainer.
            pl_module: The module.
            stage: Lightning's name of what begins.
        """

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Save, now that nothing is wrong and the run has its ledger.

        Args:
            trainer: The trainer.
            pl_module: The module.
        """
        folder = Path(str(trainer.log_dir))
        names = ["config.yaml", *(f"config-{n}.yaml" for n in range(2, 10_000))]
        self.config_filename = next(name for name in names if not (folder / name).exists())
        super().setup(trainer, pl_module, "fit")


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
        parser.add_argument(
            "--fork",
            type=bool,
            default=False,
            help="With --ckpt_path: go on in the folder that the settings name, with a new secret, not in its own.",
        )
        parser.add_argument(
            "--trust_checkpoint",
            type=bool,
            default=False,
            nargs="?",
            const=True,
            help="Load a folder of --ckpt_path that its run's secret did not sign. Its files can run code.",
        )
        parser.add_argument("--test_after_fit", type=bool, default=False, help="Test the trained weights after fit.")

    def _parse_ckpt_path(self) -> None:
        """Leave the settings as the user wrote them: Lightning would let those in the checkpoint override them."""

    def before_instantiate_classes(self) -> None:
        """Look at what Lightning would only find with a traceback, and say where the run goes on.

        Raises:
            ConfigurationError: A strategy or a checkpoint that is not there.
        """
        settings = self.config[self.subcommand]
        problems: list[str] = []
        strategy = settings.trainer.strategy
        if isinstance(strategy, str) and strategy != "auto" and strategy not in StrategyRegistry:
            problems.append(
                f"trainer.strategy={strategy}: no such strategy; use one of {', '.join(preflight.our_strategies())}"
            )
        # Said of the checkpoint at hand: a resume from the settings that the run keeps must not trust another one.
        self._trusts_checkpoint, settings.trust_checkpoint = bool(settings.trust_checkpoint), False
        problem = preflight.checkpoint_problem(settings.ckpt_path) if settings.ckpt_path else None
        if problem:
            problems.append(problem)
        if problems:
            raise ConfigurationError(problems)
        if self.subcommand != "fit":
            _log_nothing(settings.trainer)
        elif settings.ckpt_path and not settings.fork:
            _resume_in_place(settings.trainer, Path(settings.ckpt_path))

    def instantiate_classes(self) -> None:
        """Make model, data and trainer; what they refuse is the user's to mend and needs no traceback."""
        with _refusals_in_one_line():
            super().instantiate_classes()

    def instantiate_trainer(self, **kwargs: Any) -> pl.Trainer:
        """Make the trainer, with our progress bar unless the user has one or wants none.

        Args:
            **kwargs: As for Lightning's.

        Returns:
            The trainer.

        Raises:
            DPRCError: As a strategy of ours raised it.
            ConfigurationError: What Lightning refused, in one line.
        """
        settings = self.config_init[self.subcommand]["trainer"]
        given = settings.get("callbacks") or []
        callbacks = list(given) if isinstance(given, list) else [given]
        wanted = settings.get("enable_progress_bar") is not False and not settings.get("barebones")
        if wanted and not any(isinstance(callback, ProgressBar) for callback in callbacks):
            callbacks.append(_progress_bar())
        try:
            trainer = super().instantiate_trainer(callbacks=callbacks, **kwargs)
        except DPRCError:
            raise
        except (MisconfigurationException, ValueError) as error:
            raise ConfigurationError([_one_line(error, settings)]) from error
        if self._trusts_checkpoint:
            if not isinstance(trainer.strategy, ShardedCheckpoints):
                raise ConfigurationError([
                    f"--trust_checkpoint: {type(trainer.strategy).__name__} loads single files, of which no code is "
                    "run; leave it out"
                ])
            trainer.strategy.trust_checkpoint = True
        return trainer

    def before_validate(self) -> None:
        """Say whose figures they are not."""
        self._warn_of_untrained_weights()

    def before_test(self) -> None:
        """Say whose figures they are not."""
        self._warn_of_untrained_weights()

    def before_predict(self) -> None:
        """Say whose predictions they are not."""
        self._warn_of_untrained_weights()

    def _warn_of_untrained_weights(self) -> None:
        if not self.config[self.subcommand]["ckpt_path"]:
            said = "no --ckpt_path: these are the weights that the model begins with, not those of a run"
            print(f"dprc: warning: {said}", file=sys.stderr, flush=True)

    def before_fit(self) -> None:
        """Find everything that is wrong while there is one process and no folder."""
        preflight.check(self.trainer, self.model, self.datamodule, ckpt_path=self.config["fit"]["ckpt_path"])
        _keep_csv(self.trainer)

    def fit(self, model: DPRCModule, **kwargs: Any) -> None:
        """Train; a signal ends the command with the status that a shell expects.

        Args:
            model: The model.
            **kwargs: As for the trainer's.

        Raises:
            InterruptedRun: Ctrl-C, or a signal to end.
            SystemExit: Anything else that ends the process.
        """
        try:
            self.trainer.fit(model, **kwargs)
        except InterruptedRun:
            raise
        except SystemExit as error:
            if isinstance(error, SIGTERMException):
                raise InterruptedRun(signal.SIGTERM, self._interrupted()) from error
            # Lightning turns Ctrl-C into a plain exit.
            if isinstance(error.__context__, KeyboardInterrupt):
                raise InterruptedRun(signal.SIGINT, self._interrupted()) from error
            raise

    def after_fit(self) -> None:
        """Test the weights at hand, if asked to."""
        if self.config["fit"]["test_after_fit"]:
            self.trainer.test(self.model, datamodule=self.datamodule, verbose=False)

    def _interrupted(self) -> str:
        run = self.model.private_run
        if run is None:
            return "interrupted before the first step"
        saved = sorted(run.folder.glob("checkpoints/*.ckpt"), key=lambda file: file.stat().st_mtime)
        advice = f"resume with --ckpt_path {saved[-1]}" if saved else f"{run.folder} has no checkpoint to resume from"
        strategy = self.trainer.strategy
        if isinstance(strategy, PrivateStrategy) and not strategy.can_resume:
            advice = f"{strategy.strategy_name} resumes no run"
        return f"interrupted after step {run.applied} of {run.resolved.steps}; {advice}"


def find_own_classes() -> None:
    """Let settings name classes from the folder that one works in, as with `python -m`.

    First in the path, because some packages bring a top-level `examples` or `benchmarks`, which would hide them.
    """
    if sys.path[:1] not in ([os.getcwd()], [""]):
        sys.path.insert(0, os.getcwd())


def run(arguments: Sequence[str]) -> None:
    """Run one of LightningCLI's subcommands.

    Args:
        arguments: ``fit --config ...``, without the program's name.

    Raises:
        ConfigurationError: A setting that is not there, or not of its kind.
    """
    # Nothing here needs a hub; a run that uses one sets it to 0.
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    find_own_classes()
    for message in _ADVICE:
        warnings.filterwarnings("ignore", message)
    # dprc dispatches before Lightning parses; it warns of a difference between the two that cannot be there.
    warnings.filterwarnings("ignore", ".*args parameter is intended to run from within Python.*")
    for source in ("lightning.pytorch.utilities.rank_zero", "lightning.fabric.utilities.seed"):
        logging.getLogger(source).addFilter(_is_useful)
    # A page of usage would hide the one line that says what is wrong.
    quiet = {"exit_on_error": False, "parser_mode": parser_mode()}
    try:
        DPRCCLI(
            DPRCModule,
            DPRCDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            args=spelled_out(arguments),
            parser_kwargs={
                "prog": "dprc",
                "default_env": False,
                **quiet,
                **dict.fromkeys(DPRCCLI.subcommands(), quiet),
            },
            save_config_callback=SaveRunConfig,
            save_config_kwargs={"overwrite": True},
            trainer_defaults={
                # The privacy budget decides when training ends.
                "max_epochs": -1,
                "strategy": "dprc_single",
                "devices": 1,
                # The run prints a table of its own, with what is done to each parameter.
                "enable_model_summary": False,
                # A logical step takes seconds; Lightning's 50 are more than many runs have.
                "log_every_n_steps": 1,
            },
            seed_everything_default=0,
        )
    except ArgumentError as error:
        command = f"dprc {arguments[0]} --help"
        raise ConfigurationError([f"{_shorter(str(error))}; {command} lists all settings"]) from None


def _shorter(text: str) -> str:
    """What jsonargparse says of a setting, without its list of all the types that it is not of."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    kept = [
        line for line in lines if not line.startswith(("- ", "Subtypes", "Given value type", "Given value: NestedArg"))
    ]
    said = re.sub(r'^Parser key "([^"]+)": ', r"\1: ", " ".join(kept).rstrip("."))
    return said.replace("Does not validate against any of the Union subtypes Errors:", "not a value that it takes.")


def _is_useful(record: logging.LogRecord) -> bool:
    return not any(part in record.getMessage() for part in _CHATTER)


@contextmanager
def _refusals_in_one_line() -> Iterator[None]:
    """A bug in a user's class keeps its traceback; but what a class refuses comes wrapped into a page about types."""
    refusals = (DPRCError, MisconfigurationException, ModuleNotFoundError)
    try:
        yield
    except (*refusals, ValueError) as error:
        behind: BaseException | None = error
        while behind is not None and not isinstance(behind, refusals):
            behind = behind.__cause__ or behind.__context__
        if behind is None:
            # Of a strategy, which may be a name too, jsonargparse keeps the text alone.
            ours = [line.strip().removeprefix("- ") for line in str(error).splitlines()]
            told = [line for line in ours if line.startswith("strategy dprc_")]
            if told:
                raise ConfigurationError(told) from None
            raise
        if isinstance(behind, DPRCError):
            raise behind from None
        raise ConfigurationError([_one_line(behind)]) from error


def _one_line(error: BaseException, trainer: Namespace | None = None) -> str:
    text = " ".join(str(error).split())
    accelerator = trainer.get("accelerator") if trainer else None
    if "No supported gpu backend" in text or "can not run on your system" in text:
        return f"trainer.accelerator={accelerator}: there is none on this machine; set trainer.accelerator=cpu"
    return text


def _progress_bar() -> ProgressBar:
    from dprc_lightning.callbacks.progress import StepProgressBar

    return StepProgressBar()


# Where a command writes -----------------------------------------------------------------------------------------------


def _folder_logger(trainer: Namespace) -> Namespace | None:
    """The settings of the logger that decides where the run lives; those of Lightning's default are written out."""
    if trainer.logger is None or trainer.logger is True:
        # As the trainer would choose it.
        return Namespace(
            class_path="lightning.pytorch.loggers.TensorBoardLogger",
            init_args=Namespace(save_dir=trainer.default_root_dir or ".", name="lightning_logs", version=None),
        )
    first = trainer.logger[0] if isinstance(trainer.logger, list) and trainer.logger else trainer.logger
    if isinstance(first, Namespace) and first.class_path.rsplit(".", 1)[-1] in _FOLDER_LOGGERS:
        return first
    return None


def _log_nothing(trainer: Namespace) -> None:
    """Evaluation would leave a new ``version_N`` with nothing in it: its figures go to the screen and the report."""
    logger = _folder_logger(trainer)
    if logger is not None and not isinstance(trainer.logger, list) and logger.init_args.get("version") is None:
        trainer.logger = False


def _resume_in_place(trainer: Namespace, checkpoint: Path) -> None:
    """Let the run go on in its own folder, whatever the settings name: they may be those of its first start."""
    run = own_folder(checkpoint)
    if not checkpoint.exists() or not (run / LEDGER_NAME).exists():
        return
    if trainer.logger is False or trainer.logger == []:
        trainer.default_root_dir = str(run)
        return
    logger = _folder_logger(trainer)
    if logger is None:
        return
    logger.init_args.save_dir = str(run.parent.parent)
    logger.init_args.name = run.parent.name
    logger.init_args.version = run.name
    if not isinstance(trainer.logger, list):
        trainer.logger = logger


@rank_zero_only
def _keep_csv(trainer: pl.Trainer) -> None:
    """CSVLogger deletes the ``metrics.csv`` that it finds; on resume it is the run's own."""
    for logger in trainer.loggers:
        if isinstance(logger, CSVLogger):
            metrics = Path(logger.log_dir) / "metrics.csv"
            if metrics.exists():
                n = next(n for n in range(1, 10_000) if not metrics.with_name(f"metrics-{n}.csv").exists())
                metrics.rename(metrics.with_name(f"metrics-{n}.csv"))
