"""How the private run of a module begins, is remembered in checkpoints, and ends: all but its steps."""

import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch

from dprc_lightning import preflight
from dprc_lightning.activation_checkpointing import ActivationCheckpointing
from dprc_lightning.callbacks import GracefulStop, PrivacyReport
from dprc_lightning.callbacks.run_facts import not_private_because
from dprc_lightning.checkpoint import CHECKPOINT_KEY
from dprc_lightning.clipping import ClippingHandle, attach
from dprc_lightning.clipping.two_pass import HALF_NORM_SLACK
from dprc_lightning.config import PrivacyConfig, ResolvedPrivacy
from dprc_lightning.datamodule import DPRCDataModule, LogicalBatch
from dprc_lightning.errors import ConfigurationError, InvalidArgumentError, StepOrderError
from dprc_lightning.keys import Domain, RunSecret
from dprc_lightning.resume import Opening, Origin
from dprc_lightning.run import PrivateRun, passing_secret, run_folder
from dprc_lightning.shorthand import Performance, performance_of
from dprc_lightning.strategies import PrivateStrategy
from dprc_lightning.timing import StepClock

if TYPE_CHECKING:
    from dprc_lightning.plan.pick import Pick


class RunLifecycle(pl.LightningModule):
    """What a DPRCModule does outside of its steps. A strategy calls it, in the order that `PrivateStrategy` fixes.

    Args:
        privacy: The mechanism.
        performance: How it is computed.
    """

    def __init__(self, privacy: PrivacyConfig, performance: Performance) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.privacy = privacy
        self.performance = performance_of(performance)
        self.memory_pick: Pick | None = None
        """What `performance.memory` added in this run."""
        self._checkpointing: ActivationCheckpointing | None = None
        self.handle: ClippingHandle | None = None
        self.private_run: PrivateRun | None = None
        self.clock = StepClock()
        self._isolation_checked = False
        self._dummy_batch: Any = None
        self._opening: Opening | None = None
        self.earlier_runs: list[str] = []
        """Run folders of earlier training of these very parameters: its epsilon counts on top, on the same data."""
        self.dropped_records = 0
        """Records of this run whose norm was not finite; private data."""
        self.updating = False
        self.update_failed = False
        """Whether an update is under way."""
        self.stop_signal: int | None = None
        """The signal that asked this process to stop after its step."""
        self.stop_agreed: int | None = None
        """The signal on which all ranks agreed: the step at hand is the last one."""
        self._resumed_from: dict[str, Any] | None = None

    def configure_callbacks(self) -> list[pl.Callback]:
        """The library's own callbacks; and the first look at the settings. Call it from an override.

        Lightning asks before it checks the trainer's settings in its own words, and before each of fit, validate, test.

        Returns:
            Those that the trainer does not have yet.
        """
        if self.trainer.state.fn == "fit":
            preflight.check(self.trainer, self, getattr(self.trainer, "datamodule", None))
            preflight.warn(self.trainer, self)
        known = [type(callback) for callback in self.trainer.callbacks]  # type: ignore[attr-defined]
        return [kind() for kind in (PrivacyReport, GracefulStop) if kind not in known]

    def prepare_privacy(self) -> None:
        """Called by the strategy before it wraps the model: check everything, instrument, open the ledger.

        Raises:
            ConfigurationError: All problems together.
        """
        trainer, strategy = self.trainer, self.trainer.strategy
        assert isinstance(strategy, PrivateStrategy)
        datamodule: DPRCDataModule = getattr(trainer, "datamodule", None)  # type: ignore[assignment]
        if isinstance(datamodule, DPRCDataModule):
            datamodule.forget_training_set()
        preflight.check(trainer, self, datamodule, data_is_ready=True)
        if not any(isinstance(callback, PrivacyReport) for callback in trainer.callbacks):  # type: ignore[attr-defined]
            raise ConfigurationError([
                f"{type(self).__name__}.configure_callbacks: it leaves out the library's own; return "
                "[*super().configure_callbacks(), ...]"
            ])
        num_records = datamodule.num_units(self.privacy)
        self._reset()
        if trainer.world_size > 1:
            self._dummy()
        private = not self.privacy.baseline_without_privacy
        if not trainer.ckpt_path:
            if self._resumed_from is not None:
                # Loaded for validation, say: these weights are not the initial ones.
                self.earlier_runs.append(self._resumed_from.get("folder", "a run whose checkpoint was loaded"))
            self._resumed_from = None
        remembered = self._resumed_from or {}
        log_dir = Path(str(trainer.log_dir or trainer.default_root_dir))
        origin = Origin.of(str(trainer.ckpt_path), remembered) if private and trainer.ckpt_path else None
        folder = run_folder(log_dir, Path(str(trainer.ckpt_path)) if trainer.ckpt_path else None)
        opening = strategy.on_rank_zero(lambda: Opening(folder, origin)) if private else None
        try:
            own = None
            if opening is not None:
                own = opening.secret
            elif not private and (trainer.is_global_zero or trainer.world_size == 1):
                own = passing_secret()
            secret = RunSecret.replicated(own, lambda key: strategy.from_rank_zero(lambda: key))
            if trainer.world_size > 1:
                datamodule.check_same_everywhere(secret, self.privacy, strategy.all_equal)
            if private:
                self._fit_memory(strategy)
                self._attach(secret)
            if not strategy.all_equal(self._settings()):
                raise ConfigurationError([
                    "the ranks have different privacy settings or models: one projection and one accounting must hold "
                    "for all of them; start every rank with the same configuration"
                ])
            slack = HALF_NORM_SLACK if self._runs_in_half_precision() else 0.0

            def start() -> tuple[ResolvedPrivacy, int, int]:
                k = self.handle.sketch_dim if self.handle else None
                if opening is None:
                    applied = int(remembered.get("applied_steps", 0))
                    return self.privacy.resolve(num_records, k, default_norm_slack=slack), applied, applied
                ledger, resolved = opening.settle(
                    self.privacy, num_records=num_records, sketch_dim=k, default_norm_slack=slack
                )
                return resolved, ledger.steps, ledger.next_sequence

            resolved, spent, next_sequence = strategy.from_rank_zero(start)
        except BaseException:
            self.release_privacy()
            if opening is not None:
                opening.abandon()
            raise
        self._opening = opening
        self.private_run = PrivateRun(
            folder,
            secret,
            resolved,
            opening.ledger if opening else None,
            spent=spent,
            next_sequence=next_sequence,
            applied=origin.applied if origin else spent,
            reserve=self.performance.reserve_steps,
        )
        because = not_private_because(trainer, self.private_run)
        ledger = self.private_run.ledger
        if ledger is not None and because is not None and ledger.meta.get("not_private_because") is None:
            # Whoever resumes this run with secret noise must not get a report that forgets this part of it.
            ledger.amend({"not_private_because": because})
        self._limit_steps(resolved)

    def _reset(self) -> None:
        """What belongs to one run. A refused second fit must not rewrite the report of the first."""
        if self.private_run is not None and self.private_run.applied:
            self.earlier_runs.append(str(self.private_run.folder))
        self.private_run = None
        self.clock = StepClock(self.trainer.strategy.root_device)
        self._opening = None
        self._isolation_checked = not self.privacy.check_isolation
        self._dummy_batch = None
        self.dropped_records = 0
        self.updating = self.update_failed = False
        self.stop_signal = self.stop_agreed = None

    def _settings(self) -> bytes:
        """What two ranks share only if they clip and account alike."""
        rows = self.handle.plan() if self.handle else []
        return repr((self.privacy, [(row.parameter, row.shape, row.estimator, row.side) for row in rows])).encode()

    def _attach(self, secret: RunSecret) -> None:
        try:
            self.handle = self._attached(secret)
        except InvalidArgumentError as error:
            if hasattr(self.performance, error.name):
                # In the words of the command line.
                raise ConfigurationError([f"performance.{error}"]) from None
            raise

    def _attached(self, secret: RunSecret) -> ClippingHandle:
        added = self.memory_pick.flags if self.memory_pick else {}
        if "checkpointing" in added:
            self._checkpointing = ActivationCheckpointing(self)
        settings = self.attach_settings() | {name: value for name, value in added.items() if name != "checkpointing"}
        return attach(self, **settings, key=secret.subkey(Domain.PROJECTION))

    def attach_settings(self) -> dict[str, Any]:
        """What `dprc_lightning.clipping.attach` is told of the user's settings."""
        return {
            "estimator": self.privacy.estimator,
            "sketch_dim": self.privacy.sketch_dim,
            "projection": self.privacy.projection,
            "unused": self.privacy.unused,
            "on_nonfinite": self.privacy.on_nonfinite,
            "norm_slack": self.privacy.norm_slack,
            "check_isolation": self.privacy.check_isolation,
            "projection_memory": self.performance.projection_memory,
            "mlp_chunk": self.performance.mlp_chunk,
            "lean_norms": self.performance.lean_norms,
            "offload_checkpoints": self.performance.offload_checkpoints,
        }

    def _fit_memory(self, strategy: PrivateStrategy) -> None:
        """Pick what `performance.memory` asks for: on rank 0, within the smallest device of all, and send it.

        Every rank would find the same, but one of another version of a library, or with another device, must not.

        Args:
            strategy: The trainer's.

        Raises:
            ConfigurationError: Nothing fits.
        """
        setting = self.performance.memory
        self.memory_pick = None
        if setting is None:
            return
        # A command's tools: a run that does not ask for them does not load them.
        from dprc_lightning.plan.pick import Device, pick

        engine: Any = strategy
        device = Device.of(setting, engine.root_device, self.trainer.num_devices)
        (least,) = strategy.max_over_ranks([-device.limit_bytes])
        buckets = strategy.strategy_name == "dprc_ddp" and not engine._ddp_kwargs.get("gradient_as_bucket_view")
        precision = str(self.trainer.precision)

        def choose() -> "Pick":
            def tell(line: str) -> None:
                print(f"performance.memory={setting}: {line}", file=sys.stderr, flush=True)

            within = replace(device, limit_bytes=-least)
            found = pick(self, within, precision=precision, buckets=buckets, progress=tell)
            if not found.fits:
                raise ConfigurationError([found.problem()])
            return found

        self.memory_pick = strategy.from_rank_zero(choose)

    def _dummy(self) -> Any:
        """A micro-batch without content, for a rank that has no more records of its own; weight 0."""
        if self._dummy_batch is None:
            datamodule: Any = self.trainer.datamodule  # type: ignore[attr-defined]
            self._dummy_batch = datamodule.dummy_batch()
        return self._dummy_batch

    def protected_parameters(self) -> list[torch.nn.Parameter]:
        """The parameters that train; in a private run, those whose gradients are clipped."""
        if self.handle is not None:
            return self.handle.parameters
        return [p for p in self.parameters() if p.requires_grad]

    def _runs_in_half_precision(self) -> bool:
        """Whether the precision says so, or a trainable parameter."""
        return str(self.trainer.precision).startswith("bf16") or any(
            p.dtype is torch.bfloat16 for p in self.parameters() if p.requires_grad
        )

    def _limit_steps(self, resolved: ResolvedPrivacy) -> None:
        """The budget decides when training ends: the steps left, on top of those that a checkpoint brings."""
        run, _ = self._running()
        already = int((self._resumed_from or {}).get("global_step", 0))
        loop = self.trainer.fit_loop
        loop.epoch_loop.max_steps = already + run.steps_left
        # For the progress bar: the steps come to an end first.
        loop.max_epochs = math.ceil(max(already + run.steps_left, 1) / resolved.steps_per_epoch)
        if already:
            # Lightning counts the epoch that a checkpoint ended in once more: the limit must not end the run early.
            loop.max_epochs += loop.epoch_progress.current.completed + 2

    def release_privacy(self) -> None:
        """Called by the strategy at the end: the model is an ordinary one again, and the ledger is closed."""
        if self.handle is not None:
            self.handle.detach()
            self.handle = None
        if self._checkpointing is not None:
            self._checkpointing.remove()
            self._checkpointing = None
        if self.private_run is not None:
            self.private_run.close()

    def abandon_privacy(self) -> None:
        """Called by the strategy if set-up fails after `prepare_privacy`: the folder stays free for another start."""
        self.release_privacy()
        self.private_run = None
        if self._opening is not None:
            self._opening.abandon()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Remember where the ledger was; no secret goes in. Call it from an override.

        Args:
            checkpoint: Lightning's.
        """
        if self.private_run is not None:
            ledger = self.private_run.ledger
            checkpoint[CHECKPOINT_KEY] = {
                "mechanism": self.private_run.resolved.to_dict(),
                "ledger_head": ledger.head if ledger else None,
                "global_step": self.global_step,
                "applied_steps": self.private_run.applied,
                "folder": str(self.private_run.folder.resolve()),
                "state_keys": sorted(self.state_dict()),
            }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Read what `on_save_checkpoint` wrote. Call it from an override.

        Args:
            checkpoint: Lightning's.

        Raises:
            ConfigurationError: It is of another model.
        """
        remembered = checkpoint.get(CHECKPOINT_KEY) or {}
        # An engine that shards keeps the weights elsewhere.
        theirs = set(checkpoint.get("state_dict", remembered.get("state_keys", {})))
        ours = set(self.state_dict())
        if self.strict_loading and ours != theirs:
            odd = min(ours ^ theirs)
            raise ConfigurationError([
                f"--ckpt_path {self.trainer.ckpt_path}: it is of another model ({odd!r} is only in "
                f"{'the model' if odd in ours else 'the checkpoint'}); give the settings that the run began with"
            ])
        self._resumed_from = checkpoint.get(CHECKPOINT_KEY)

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """A logical batch stays where it is; each micro-batch moves when its turn comes.

        Args:
            batch: A logical batch or any other.
            device: Where to.
            dataloader_idx: As Lightning has it.

        Returns:
            The batch.
        """
        if isinstance(batch, LogicalBatch):
            return batch
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def _running(self) -> tuple[PrivateRun, PrivateStrategy]:
        strategy = self.trainer.strategy
        if self.private_run is None or not isinstance(strategy, PrivateStrategy):
            raise StepOrderError("the private run was not prepared: train with trainer.fit under a dprc_* strategy")
        return self.private_run, strategy
