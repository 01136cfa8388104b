"""The LightningModule: manual optimization, five steps in order, one call each."""

import hashlib
import math
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor

from dprc_lightning import preflight
from dprc_lightning.callbacks import GracefulStop, PrivacyReport
from dprc_lightning.callbacks.run_facts import not_private_because
from dprc_lightning.callbacks.step_log import log_step
from dprc_lightning.clipping import ClippingHandle, attach
from dprc_lightning.clipping.isolation import check_isolation
from dprc_lightning.clipping.two_pass import HALF_NORM_SLACK
from dprc_lightning.config import PerformanceConfig, PrivacyConfig, ResolvedPrivacy
from dprc_lightning.datamodule import DPRCDataModule, LogicalBatch
from dprc_lightning.diagnostics import StepStatistics, count_tokens
from dprc_lightning.dropout import secret_dropout
from dprc_lightning.errors import ConfigurationError, LossShapeError, StepOrderError
from dprc_lightning.keys import Domain, RunSecret
from dprc_lightning.resume import Opening, Origin
from dprc_lightning.run import PrivateRun, passing_secret, run_folder
from dprc_lightning.strategies import PrivateStrategy
from dprc_lightning.timing import StepClock

CHECKPOINT_KEY = "dprc_lightning"


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
        self._dummy_batch: Any = None
        self._opening: Opening | None = None
        self.earlier_runs: list[str] = []
        """Run folders of earlier training of these very parameters: its epsilon counts on top, on the same data."""
        self.dropped_records = 0
        """Records of this run whose norm was not finite; private data."""
        self.updating = False
        """Whether an update is under way."""
        self.stop_signal: int | None = None
        """The signal that asked this process to stop after its step."""
        self.stop_agreed: int | None = None
        """The signal on which all ranks agreed: the step at hand is the last one."""
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
            batch: One logical batch: this rank's records of it.
            batch_idx: Unused: steps are counted by the ledger.
        """
        run, strategy = self._running()
        total = self._begin_step(batch)
        statistics = StepStatistics(private=self.handle is not None)
        with secret_dropout(run.secret.subkey(Domain.DROPOUT, batch.sequence, self.global_rank), self.device):
            for index in range(total):
                own = index < len(batch.micro_batches)
                collated = batch.micro_batches[index] if own else self._dummy()
                micro_batch = self._on_device(collated)
                self._check_isolation(micro_batch, strategy)
                with strategy.micro_batch(last=index == total - 1):
                    losses = self._losses(micro_batch, batch.counts[index] if own else 1)
                    norms = self._norms(losses, strategy)
                    self._clipped_backward(losses, norms, None if own else torch.zeros_like(losses))
                if own:
                    factors = self.handle.clip_factors if self.handle else None
                    statistics.add(losses, norms, factors, tokens=count_tokens(collated))
        self._noisy_update(batch.sequence)
        self._log(statistics)

    def _begin_step(self, batch: LogicalBatch) -> int:
        """Step 1: the ledger first, then what the ranks must agree on, then the step's projection and leave to update.

        Guarantee: on rank 0 the step is on disk before the collective in which it takes part, and no rank gets past
        that collective without it. After it all ranks are known to be at the same step, with the same batch.

        Returns:
            How many micro-batches each rank runs: the most that one of them needs. Ranks with fewer run dummies, so
            that all take part in every collective of the engine; with no record on any rank, none.

        Raises:
            StepOrderError: The ranks, or loader and ledger, are at different steps.
        """
        run, strategy = self._running()
        self.clock.start_step()
        sequence = run.begin_step()
        with self.clock.phase("reduce"):
            latest, earliest, total, stop = strategy.max_over_ranks(
                # Rank 0 tells the ledger's number, the others their loader's; the signal's number, if one came.
                [*_both_ways(sequence, batch.sequence), len(batch.micro_batches), self.stop_signal or 0]
            )
        if latest != -earliest:
            raise StepOrderError(
                f"the loader gave the batch of step {batch.sequence} but the ledger is at step {sequence}: "
                "the train loader must be DPRCDataModule's own, and every rank at the same step"
            )
        self.stop_agreed = stop or None
        if self.handle is not None:
            self.handle.begin_step(sequence)
        # Whatever a callback left behind is not clipped.
        self.optimizers().zero_grad()  # type: ignore[union-attr]
        protected = self.protected_parameters()
        strategy.check_step(protected)
        strategy.noise_hook.arm(
            run.resolved.noise_std,
            protected,
            sequence,
            around=lambda: self.clock.phase("noise"),
            check=self.handle.check_step if self.handle else lambda: None,
        )
        return total

    def _on_device(self, micro_batch: Any) -> Any:
        moved = self.transfer_batch_to_device(micro_batch, self.device, 0)
        return self.trainer.precision_plugin.convert_input(moved)

    def _dummy(self) -> Any:
        """A micro-batch without content, for a rank that has no more records of its own; weight 0."""
        if self._dummy_batch is None:
            datamodule: Any = self.trainer.datamodule  # type: ignore[attr-defined]
            self._dummy_batch = datamodule.dummy_batch()
        return self._dummy_batch

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

    def _clipped_backward(self, losses: Tensor, norms: Tensor | None, weights: Tensor | None) -> None:
        """Step 4: the second backward, of the clipped gradients, through the engine's own."""
        run, _ = self._running()
        # Every engine averages over ranks; E[B] is a constant of the whole run.
        scale = self.trainer.world_size / run.resolved.expected_batch_size
        with self.clock.phase("clipped_backward"):
            if self.handle is None:
                weighted = losses if weights is None else losses * weights
                self.manual_backward(weighted.sum() * scale)
                return
            self.handle.check_step()
            self.handle.clipped_backward(
                losses,
                max_grad_norm=run.resolved.max_grad_norm,
                norms=norms,
                weights=weights,
                scale=scale,
                backward=self.manual_backward,
            )

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """As Lightning's, and remember the gradients before its hooks can change them.

        Args:
            loss: A scalar.
            *args: As for ``Tensor.backward``.
            **kwargs: Likewise.
        """
        super().backward(loss, *args, **kwargs)
        if self.handle is not None:
            self.handle.remember_gradients()

    def _noisy_update(self, sequence: int) -> None:
        """Step 5: the optimizer step, before which the strategy's hook adds the noise; then the scheduler."""
        run, strategy = self._running()
        optimizer = self.optimizers()
        # From here to the end the parameters may be between two steps: no checkpoint is taken of them.
        self.updating = True
        with self.clock.phase("optimizer"):
            optimizer.step()  # type: ignore[union-attr]
            strategy.noise_hook.finish()
            optimizer.zero_grad()  # type: ignore[union-attr]
        schedulers = self.lr_schedulers() or []
        for scheduler in schedulers if isinstance(schedulers, list) else [schedulers]:
            scheduler.step()  # type: ignore[call-arg]
        run.step_applied()
        self.updating = False
        self.clock.end_step()

    def _log(self, statistics: StepStatistics) -> None:
        """Diagnostics from private data, without noise: outside of the guarantee, and named so in the report."""
        _, strategy = self._running()
        figures = log_step(self, statistics, strategy.sum_over_ranks)
        self.dropped_records += int(figures.get("clip/dropped", 0))

    # Set-up and end -------------------------------------------------------------------------------------------------

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
            own = (opening.secret if opening else passing_secret()) if trainer.is_global_zero else None
            secret = RunSecret.replicated(own, lambda key: strategy.from_rank_zero(lambda: key))
            if trainer.world_size > 1:
                datamodule.check_same_everywhere(secret, self.privacy, strategy.all_equal)
            if private:
                self._attach(secret)
            if not strategy.all_equal(self._mark_of_settings()):
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
        self.updating = False
        self.stop_signal = self.stop_agreed = None

    def _mark_of_settings(self) -> int:
        """A number that two ranks share only if they clip and account alike."""
        rows = self.handle.plan() if self.handle else []
        text = repr((self.privacy, [(row.parameter, row.shape, row.estimator, row.side) for row in rows]))
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 2

    def _attach(self, secret: RunSecret) -> None:
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
            }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Read what `on_save_checkpoint` wrote. Call it from an override.

        Args:
            checkpoint: Lightning's.

        Raises:
            ConfigurationError: It is of another model.
        """
        ours, theirs = set(self.state_dict()), set(checkpoint.get("state_dict", {}))
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


def _both_ways(sequence: int, of_loader: int) -> list[int]:
    """What the maximum over ranks is taken of, to learn the largest and the smallest number of all."""
    return [max(sequence, of_loader), max(-sequence, -of_loader)]
