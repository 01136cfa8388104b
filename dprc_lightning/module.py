"""The LightningModule: manual optimization, five steps in order, one call each."""

import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from dprc_lightning.callbacks import PrivacyReport
from dprc_lightning.clipping import ClippingHandle, attach
from dprc_lightning.clipping.isolation import check_isolation
from dprc_lightning.clipping.two_pass import HALF_NORM_SLACK, matmul_precision
from dprc_lightning.config import PerformanceConfig, PrivacyConfig, ResolvedPrivacy
from dprc_lightning.datamodule import DPRCDataModule, LogicalBatch
from dprc_lightning.diagnostics import StepStatistics
from dprc_lightning.dropout import secret_dropout
from dprc_lightning.errors import (
    ConfigurationError,
    LedgerError,
    LossShapeError,
    StepOrderError,
    UnprotectedStrategyError,
)
from dprc_lightning.keys import Domain
from dprc_lightning.run import PrivateRun, open_secret, refuse_used_folder, resume_ledger, start_ledger
from dprc_lightning.strategies import PrivateStrategy
from dprc_lightning.timing import StepClock

CHECKPOINT_KEY = "dprc_lightning"
PRECISIONS = ("32-true", "64-true", "bf16-mixed", "bf16-true")


class DPRCModule(pl.LightningModule):
    """Write `per_sample_loss` and `configure_optimizers`; the private training step belongs to the library.

    Guarantee: one logical step is subsampled DP-SGD with randomized clipping (arXiv 2605.24879) as the accountant
    counts it. (1) The ledger has the step before anything of it is drawn, and its number selects batch, projection and
    dropout. (2, 3) All records of the logical batch share one projection P, and a record's norm depends on that record,
    its dropout masks, the parameters and P alone, if `per_sample_loss` keeps the records apart. (4) Each gradient is
    scaled by min(C / norm, 1) and the sum by the constant 1 / (q N), never by the realised batch size. (5) The strategy
    adds N(0, (sigma C / (q N))^2) once to each element before the optimizer sees it, also when no record was drawn.

    Args:
        privacy: The mechanism.
        performance: How it is computed.
    """

    def __init__(self, privacy: PrivacyConfig, performance: PerformanceConfig = PerformanceConfig()) -> None:  # noqa: B008
        super().__init__()
        self.automatic_optimization = False
        self.privacy = privacy
        self.performance = performance
        self.handle: ClippingHandle | None = None
        self.private_run: PrivateRun | None = None
        self.clock = StepClock()
        self._isolation_checked = False
        self.dropped_records = 0
        """Records of this run whose norm was not finite; private data."""
        self._resumed_from: dict[str, Any] | None = None

    def per_sample_loss(self, batch: Any) -> Tensor:
        """One loss per record, [B]. Each may depend on its own record and the parameters, on nothing else of the batch.

        Args:
            batch: What `DPRCDataModule.collate_fn` returned, on the model's device.

        Raises:
            ConfigurationError: Not written.
        """
        raise ConfigurationError([f"{type(self).__name__}.per_sample_loss: not written; return losses of shape [B]"])

    # The five steps -------------------------------------------------------------------------------------------------

    def training_step(self, batch: LogicalBatch, batch_idx: int) -> None:
        """One logical step. Not to be overridden.

        Args:
            batch: One logical batch.
            batch_idx: Unused: steps are counted by the ledger.
        """
        run, strategy = self._running()
        self._begin_step(batch)
        statistics = StepStatistics(private=self.handle is not None)
        with secret_dropout(run.secret.subkey(Domain.DROPOUT, batch.sequence, self.global_rank), self.device):
            for index, cpu_micro_batch in enumerate(batch.micro_batches):
                micro_batch = self.transfer_batch_to_device(cpu_micro_batch, self.device, 0)
                micro_batch = self.trainer.precision_plugin.convert_input(micro_batch)
                self._check_isolation(micro_batch, strategy)
                with strategy.micro_batch(last=index == len(batch.micro_batches) - 1):
                    losses = self._losses(micro_batch, batch.counts[index])
                    norms = self._norms(losses, strategy)
                    self._clipped_backward(losses, norms)
                self.dropped_records += self.handle.dropped if self.handle else 0
                statistics.add(losses, norms, self.handle.clip_factors if self.handle else None)
        self._noisy_update()
        self._log(statistics)

    def _begin_step(self, batch: LogicalBatch) -> None:
        """Step 1: the ledger first, then the step's projection, then the leave to make one noised update."""
        run, strategy = self._running()
        self.clock.start_step()
        sequence = run.begin_step()
        if batch.sequence != sequence:
            raise StepOrderError(
                f"the loader gave the batch of step {batch.sequence} but the ledger is at step {sequence}: "
                "the train loader must be DPRCDataModule's own"
            )
        if self.handle is not None:
            self.handle.begin_step(sequence)
        # Whatever a callback left behind is not clipped.
        self.optimizers().zero_grad()  # type: ignore[union-attr]
        strategy.noise_hook.arm(run.resolved.noise_std, self.protected_parameters())

    def _check_isolation(self, micro_batch: Any, strategy: PrivateStrategy) -> None:
        """In the first micro-batch with two records that differ, under the step's own projection and dropout masks."""
        handle = self.handle
        if handle is None or self._isolation_checked:
            return

        def norms_of(losses: Tensor) -> Tensor:
            with strategy.norm_pass():
                return handle.norms(losses)

        with self.clock.phase("check_isolation"), strategy.micro_batch(last=False):
            half = self._runs_in_half_precision()
            self._isolation_checked = check_isolation(
                self.per_sample_loss, norms_of, micro_batch, self.device, half_precision=half
            )

    def _losses(self, micro_batch: Any, records: int) -> Tensor:
        """Step 2: the forward. A record that had several losses would be clipped several times."""
        with self.clock.phase("forward"):
            losses = self.per_sample_loss(micro_batch)
        if losses.shape != (records,):
            raise LossShapeError(
                f"{type(self).__name__}.per_sample_loss returned shape {tuple(losses.shape)} for {records} records; "
                "one loss per record, shape [B], is needed: sum or average over a record's own tokens"
            )
        return losses

    def _norms(self, losses: Tensor, strategy: PrivateStrategy) -> Tensor | None:
        """Step 3: the first backward, for the norms."""
        if self.handle is None:
            return None
        with self.clock.phase("norm_pass"), strategy.norm_pass():
            return self.handle.norms(losses)

    def _clipped_backward(self, losses: Tensor, norms: Tensor | None) -> None:
        """Step 4: the second backward, of the clipped gradients, through the engine's own."""
        run, _ = self._running()
        # Every engine averages over ranks; E[B] is a constant of the whole run.
        scale = self.trainer.world_size / run.resolved.expected_batch_size
        with self.clock.phase("clipped_backward"):
            if self.handle is None:
                self.manual_backward(losses.sum() * scale)
                return
            self.handle.clipped_backward(
                losses,
                max_grad_norm=run.resolved.max_grad_norm,
                norms=norms,
                scale=scale,
                backward=self.manual_backward,
            )

    def _noisy_update(self) -> None:
        """Step 5: the optimizer step, before which the strategy's hook adds the noise; then the scheduler."""
        _, strategy = self._running()
        optimizer = self.optimizers()
        with self.clock.phase("noise_and_optimizer"):
            optimizer.step()  # type: ignore[union-attr]
            strategy.noise_hook.finish()
            optimizer.zero_grad()  # type: ignore[union-attr]
        schedulers = self.lr_schedulers() or []
        for scheduler in schedulers if isinstance(schedulers, list) else [schedulers]:
            scheduler.step()  # type: ignore[call-arg]
        self.clock.end_step()

    def _log(self, statistics: StepStatistics) -> None:
        """Diagnostics from private data, without noise: outside of the guarantee, and named so in the report."""
        if self.privacy.log_unprotected:
            # batch_size only weighs epoch means, of which there are none; the realised one is private.
            self.log_dict(statistics.means(), prog_bar=True, on_step=True, batch_size=1)

    # Set-up and end -------------------------------------------------------------------------------------------------

    def setup(self, stage: str) -> None:
        """Refuse to fit under a strategy that adds no noise. Call it from an override.

        Args:
            stage: Lightning's name of what begins.

        Raises:
            UnprotectedStrategyError: The strategy is none of ours.
        """
        if stage == "fit" and not isinstance(self.trainer.strategy, PrivateStrategy):
            raise UnprotectedStrategyError(
                f"trainer.strategy={type(self.trainer.strategy).__name__}: it adds no noise; "
                "use one of ours, such as --trainer.strategy dprc_single"
            )

    def prepare_privacy(self) -> None:
        """Called by the strategy before it wraps the model: check everything, instrument, open the ledger.

        Raises:
            ConfigurationError: All problems together.
        """
        num_records = self._check()
        self.clock = StepClock()
        self._isolation_checked = not self.privacy.check_isolation
        self.dropped_records = 0
        # A refused second fit must not rewrite the report of the first.
        self.private_run = None
        private = not self.privacy.baseline_without_privacy
        resuming = self.trainer.ckpt_path is not None
        folder = self._run_folder(resuming)
        if not resuming:
            refuse_used_folder(folder)
        secret = open_secret(folder, private=private)
        if private:
            self.handle = attach(
                self,
                estimator=self.privacy.estimator,
                sketch_dim=self.privacy.sketch_dim,
                projection=self.privacy.projection,
                unused=self.privacy.unused,
                on_nonfinite=self.privacy.on_nonfinite,
                norm_slack=self.privacy.norm_slack,
                check_isolation=self.privacy.check_isolation,
                key=secret.subkey(Domain.PROJECTION),
            )
        try:
            resolved = self.privacy.resolve(
                num_records,
                self.handle.sketch_dim if self.handle else None,
                default_norm_slack=HALF_NORM_SLACK if self._runs_in_half_precision() else 0.0,
            )
            ledger = None
            if private:
                head = (self._resumed_from or {}).get("ledger_head")
                if resuming and head is None:
                    raise ConfigurationError([
                        f"--ckpt_path {self.trainer.ckpt_path}: it is not a checkpoint of a private run; "
                        "resume from this run's own, or load other weights in the model's __init__"
                    ])
                ledger = resume_ledger(folder, resolved, head) if resuming else start_ledger(folder, resolved)
        except BaseException:
            self.release_privacy()
            raise
        self.private_run = PrivateRun(folder, secret, resolved, ledger)
        self._limit_steps(resolved)

    def protected_parameters(self) -> list[torch.nn.Parameter]:
        """The parameters that train; in a private run, those whose gradients are clipped."""
        if self.handle is not None:
            return self.handle.parameters
        return [p for p in self.parameters() if p.requires_grad]

    def _check(self) -> int:
        """The number of training records, once all settings agree."""
        problems = self.performance.problems()
        datamodule = getattr(self.trainer, "datamodule", None)
        num_records = 0
        if isinstance(datamodule, DPRCDataModule):
            num_records = len(datamodule.train_dataset())
            problems += self.privacy.problems(num_records)
        else:
            problems.append("trainer.fit: give it a DPRCDataModule, which builds the Poisson batches (datamodule=...)")
        steps = self.privacy.steps
        if steps is not None and self.trainer.max_steps not in (-1, steps):
            problems.append(
                f"trainer.max_steps={self.trainer.max_steps}: privacy.steps={steps} decides; leave max_steps out"
            )
        products = matmul_precision()
        if products != "highest" and not self.privacy.baseline_without_privacy:
            problems.append(
                f"torch.set_float32_matmul_precision({products!r}): what it takes off a norm is not accounted; "
                'set it to "highest"'
            )
        precision = self.trainer.precision
        if precision not in PRECISIONS and not self.privacy.baseline_without_privacy:
            problems.append(
                f"trainer.precision={precision}: float16 needs loss scaling, which would change gradients between the "
                f"passes; use one of {', '.join(PRECISIONS)}"
                if str(precision).startswith("16")
                else f"trainer.precision={precision}: not supported; use one of {', '.join(PRECISIONS)}"
            )
        if problems:
            raise ConfigurationError(problems)
        return num_records

    def _runs_in_half_precision(self) -> bool:
        """Whether the precision says so, or a trainable parameter."""
        return str(self.trainer.precision).startswith("bf16") or any(
            p.dtype is torch.bfloat16 for p in self.parameters() if p.requires_grad
        )

    def _run_folder(self, resuming: bool) -> Path:
        folder = Path(str(self.trainer.log_dir or self.trainer.default_root_dir))
        if resuming and not (folder / "ledger.jsonl").exists():
            # A logger opens a new version folder; the run's own is where its checkpoints lie.
            own = Path(str(self.trainer.ckpt_path)).resolve().parent.parent
            if (own / "ledger.jsonl").exists():
                return own
            if not self.privacy.baseline_without_privacy:
                raise LedgerError(
                    f"--ckpt_path {self.trainer.ckpt_path}: no ledger.jsonl in {folder} or {own}; put the run's ledger "
                    "back, its steps are spent"
                )
        return folder

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
        if self.private_run is not None:
            self.private_run.close()

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
            }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Read what `on_save_checkpoint` wrote. Call it from an override.

        Args:
            checkpoint: Lightning's.
        """
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

    def configure_callbacks(self) -> list[pl.Callback]:
        """The callback that measures and writes the report. Call it from an override.

        Returns:
            One callback.
        """
        # Lightning asks again before each of fit, validate and test.
        known = any(isinstance(callback, PrivacyReport) for callback in self.trainer.callbacks)  # type: ignore[attr-defined]
        return [] if known else [PrivacyReport()]

    def _running(self) -> tuple[PrivateRun, PrivateStrategy]:
        strategy = self.trainer.strategy
        if self.private_run is None or not isinstance(strategy, PrivateStrategy):
            raise StepOrderError("the private run was not prepared: train with trainer.fit under a dprc_* strategy")
        return self.private_run, strategy
