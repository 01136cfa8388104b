"""The LightningModule: manual optimization, five steps in order, one call each."""

from typing import Any

import torch
from torch import Tensor

from dprc_lightning.callbacks.step_log import log_step
from dprc_lightning.clipping.isolation import check_isolation
from dprc_lightning.config import PerformanceConfig, PrivacyConfig
from dprc_lightning.datamodule import LogicalBatch
from dprc_lightning.diagnostics import StepStatistics, count_tokens
from dprc_lightning.dropout import secret_dropout
from dprc_lightning.errors import ConfigurationError, LossShapeError, StepOrderError
from dprc_lightning.keys import Domain
from dprc_lightning.lifecycle import RunLifecycle
from dprc_lightning.shorthand import Performance
from dprc_lightning.strategies import PrivateStrategy


class DPRCModule(RunLifecycle):
    """Write `per_sample_loss` and `configure_optimizers`; the private training step belongs to the library.

    Guarantee: one logical step is subsampled DP-SGD with randomized clipping (arXiv 2605.24879) as the accountant
    counts it. (1) The ledger has the step before anything of it is drawn, and its number selects batch, projection and
    dropout. (2, 3) All records of the logical batch share one projection P, and a record's norm depends on that record,
    its dropout masks, the parameters and P alone, if `per_sample_loss` keeps the records apart. (4) Each gradient is
    scaled by min(C / norm, 1) and the sum by the constant 1 / (q N), never by the realised batch size. (5) The strategy
    adds N(0, (sigma C / (q N))^2) once to each element before the optimizer sees it, also when no record was drawn.

    Args:
        privacy: The mechanism.
        performance: How it is computed; ``auto`` is short for ``PerformanceConfig(memory="auto")``.
    """

    def __init__(
        self,
        privacy: PrivacyConfig,
        performance: Performance = PerformanceConfig(),  # noqa: B008
    ) -> None:
        super().__init__(privacy, performance)

    def per_sample_loss(self, batch: Any) -> Tensor:
        """One loss per record, [B]. Each may depend on its own record and the parameters, on nothing else of the batch.

        Args:
            batch: What `DPRCDataModule.collate_fn` returned, on the model's device.

        Raises:
            ConfigurationError: Not written.
        """
        raise ConfigurationError([f"{type(self).__name__}.per_sample_loss: not written; return losses of shape [B]"])

    def largest_batch(self, records: int) -> Any:
        """A micro-batch as large as any that training will bring: `performance.memory` simulates a step on it.

        Return what `DPRCDataModule.collate_fn` would, on any device; only its shapes and dtypes count. Take them from
        settings, such as the most tokens that are kept of a record, and not from the records: the choice of flags is
        told, and would tell of the longest one.

        Args:
            records: How many.

        Raises:
            ConfigurationError: Not written.
        """
        raise ConfigurationError([
            f"{type(self).__name__}.largest_batch: not written; return a micro-batch of the largest shapes, or leave "
            "performance.memory out"
        ])

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
        total = max(total, strategy.fewest_micro_batches)
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

    def _check_isolation(self, micro_batch: Any, strategy: PrivateStrategy) -> None:
        """In the first micro-batch with two records that differ, under the step's own projection and dropout masks."""
        handle = self.handle
        if handle is None or self._isolation_checked:
            return

        def norms_of(losses: Tensor) -> Tensor:
            return handle.norms(losses, strategy.norm_pass, strategy.any_rank)

        with self.clock.phase("check_isolation"), strategy.micro_batch(last=False):
            half = self._runs_in_half_precision()
            self._isolation_checked = check_isolation(
                self.per_sample_loss,
                norms_of,
                micro_batch,
                self.device,
                half_precision=half,
                any_rank=strategy.any_rank,
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
        with self.clock.phase("norm_pass"):
            return self.handle.norms(losses, strategy.norm_pass, strategy.any_rank)

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
            try:
                optimizer.step()  # type: ignore[union-attr]
                strategy.noise_hook.finish()
            except BaseException:
                self.update_failed = True
                raise
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


def _both_ways(sequence: int, of_loader: int) -> list[int]:
    """What the maximum over ranks is taken of, to learn the largest and the smallest number of all."""
    return [max(sequence, of_loader), max(-sequence, -of_loader)]
