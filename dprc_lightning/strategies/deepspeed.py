"""DeepSpeed's ZeRO stages 1 to 3 through Lightning: optimizer states, gradients, parameters in partitions."""

import argparse
import copy
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch import Trainer
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.plugins.precision.deepspeed import DeepSpeedPrecision
from lightning.pytorch.strategies import DeepSpeedStrategy, StrategyRegistry
from lightning.pytorch.strategies.deepspeed import remove_module_hooks
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer

from dprc_lightning.errors import ConfigurationError
from dprc_lightning.noise import NoiseStream
from dprc_lightning.strategies.order import CallOrder
from dprc_lightning.strategies.ranks import timeout_argument
from dprc_lightning.strategies.refusals import (
    deepspeed_problems,
    half_parameter_problems,
    refuse_engine,
    refuse_optimizer,
)
from dprc_lightning.strategies.sharded_checkpoints import ShardedCheckpoints
from dprc_lightning.whole_checkpoint import TAG, whole_weights


class PrivateDeepSpeedStrategy(ShardedCheckpoints, DeepSpeedStrategy):
    """DeepSpeed with the noise hook. Aliases: ``dprc_deepspeed_stage_1``, ``_2``, ``_3``.

    ZeRO reduces the clipped gradients into flat float32 partitions, one per rank and parameter group, and steps the
    optimizer on them; each rank adds noise to its own partition, from a stream of its own, just before. Padding at the
    end of a partition gets noise too, which changes nothing.

    Args:
        stage: 1, 2 or 3.
        config: DeepSpeed's own settings, a dict or a file; in place of all others.
        trust_checkpoint: Load a folder that this run's secret did not sign: its files can run code.
        timeout: Seconds that a rank waits for the others, with nccl and gloo; torch's own by default.
        noise_stream: For tests only. A fixed stream makes the run NOT PRIVATE; each rank derives its own from it.
        **kwargs: As for Lightning's DeepSpeedStrategy.

    Raises:
        ConfigurationError: A setting that changes what is summed or that bypasses the noise.
    """

    strategy_name = "dprc_deepspeed"

    def __init__(
        self,
        stage: int = 2,
        config: Any = None,
        trust_checkpoint: bool = False,
        timeout: float | None = None,
        noise_stream: NoiseStream | None = None,
        **kwargs: Any,
    ) -> None:
        if not torch.cuda.is_available():
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        kwargs |= timeout_argument(timeout)
        # Lightning writes into it.
        super().__init__(stage=stage, config=copy.deepcopy(config), **kwargs)
        self.trust_checkpoint = trust_checkpoint
        self._given_stream = noise_stream
        self.strategy_name = f"dprc_deepspeed_stage_{stage}"
        self._stage = stage
        self._trained: set[int] = set()
        self._flats: list[Tensor] = []
        self._order = CallOrder()
        self._boundary = False

    # Set-up ---------------------------------------------------------------------------------------------------------

    def setup_environment(self) -> None:
        """Lightning refuses a CPU here, DeepSpeed does not."""
        # Here, so that `python -m dprc_lightning.strategies.deepspeed_op` does not find itself imported.
        from dprc_lightning.strategies.deepspeed_op import check_can_start

        check_can_start(self.strategy_name, on_cpu=not isinstance(self.accelerator, CUDAAccelerator))
        if not isinstance(self.accelerator, CUDAAccelerator):
            # Also where there is a GPU that is not used.
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        if isinstance(self.accelerator, CUDAAccelerator):
            super().setup_environment()
        else:
            super(DeepSpeedStrategy, self).setup_environment()

    def setup_distributed(self) -> None:
        """Likewise."""
        if isinstance(self.accelerator, CUDAAccelerator):
            super().setup_distributed()
            return
        reset_seed()
        self.set_world_ranks()
        self._init_deepspeed_distributed()

    def setup(self, trainer: Trainer) -> None:
        """Instrument, wrap, make optimizers, hook the noise.

        Args:
            trainer: The trainer.
        """
        if self._is_fitting:
            given = self._given_stream
            self._init_privacy(None if given is None else given.for_shard(self.global_rank))
            self._precision_plugin = _Precision(self.precision_plugin.precision, self._remember_partitions)
        with self._private_setup(trainer):
            super().setup(trainer)
            module: Any = trainer.lightning_module
            if self._is_fitting and module.handle is not None:
                module.handle.follow_engine()
                # Stage 3 gathers weights as a module runs.
                gathered = {path: child for path, child in module.named_modules() if child._parameters}
                self._order.follow(gathered if self.zero_stage_3 else {})
            self._restore_engine()

    def setting_problems(self, trainer: Trainer, module: Any) -> Iterator[str]:
        """See `PrivateStrategy`."""
        assert isinstance(self.config, dict)
        yield from half_parameter_problems(module, trainer.precision)
        yield from deepspeed_problems(self.config, self._stage)
        chunk = module.performance.mlp_chunk
        if self._stage == 3 and chunk is not None:
            yield (
                f"performance.mlp_chunk={chunk}: ZeRO stage 3 gathers the weights of each layer when that layer is "
                "called, which the backward would do once for each piece of tokens, and ranks with longer records more "
                "often than others; train with dprc_fsdp2, or leave it out"
            )
        if self.exclude_frozen_parameters:
            yield "exclude_frozen_parameters=True: such a checkpoint resumes no run; leave it out"
        if self.load_full_weights:
            yield "load_full_weights=True: a checkpoint of all partitions is loaded as it is; leave it out"
        if getattr(module.privacy, "unused", "error") == "zero":
            yield (
                "privacy.unused=zero: ZeRO reduces gradients in the order in which they come, and a parameter that one "
                "rank reaches and another does not would mix them up; freeze what no loss reaches, or train with "
                "dprc_fsdp2 or dprc_ddp"
            )

    @property
    def _is_fitting(self) -> bool:
        assert self.lightning_module is not None
        return self.lightning_module.trainer.state.fn == TrainerFn.FITTING

    def _format_config(self) -> None:
        super()._format_config()
        assert isinstance(self.config, dict)
        # Under bf16-mixed the layers run in bfloat16 by autocast; DeepSpeed's own bf16 would sum gradients in it.
        if self._mixed:
            self.config.pop("bf16", None)
        # Its own optimizers for offloading step past the noise.
        self.config.setdefault("zero_force_ds_cpu_optimizer", False)

    def _auto_select_batch_size(self) -> int:
        # For throughput logs alone, and Lightning would make a train loader to learn it.
        return 1

    @property
    def _mixed(self) -> bool:
        return str(self.precision_plugin.precision) == "bf16-mixed"

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.root_device.type, torch.bfloat16) if self._mixed else nullcontext()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Under autocast where the precision is bf16-mixed."""
        with self._autocast():
            return super().training_step(*args, **kwargs)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Likewise."""
        with self._autocast():
            return super().validation_step(*args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Likewise."""
        with self._autocast():
            return super().test_step(*args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """Likewise."""
        with self._autocast():
            return super().predict_step(*args, **kwargs)

    def _initialize_deepspeed_inference(self, model: Any) -> None:
        """As Lightning's, which takes the device's index, and a CPU has none.

        Args:
            model: The LightningModule.
        """
        import deepspeed

        assert isinstance(self.config, dict)
        names = ("fp16", "bf16", *(("zero_allow_untested_optimizer", "zero_optimization") if self.zero_stage_3 else ()))
        config = {"train_micro_batch_size_per_gpu": 1} | {n: self.config[n] for n in names if n in self.config}
        remove_module_hooks(model)
        self.model = deepspeed.initialize(
            args=argparse.Namespace(device_rank=self._device_rank),
            config=config,
            model=model,
            optimizer=None,
            lr_scheduler=None,
            model_parameters=[],
            dist_init_required=False,
        )[0]

    def teardown(self) -> None:
        """Give the model back."""
        self._order.release()
        self._release()
        super().teardown()

    # Checkpoints ----------------------------------------------------------------------------------------------------

    def _engine_problem(self, path: Path) -> str | None:
        parts = path / TAG
        if not parts.is_dir():
            return "another engine wrote it; load it with the strategy that did"
        if not self._is_fitting:
            # Weights alone: of stage 3 they are put together from whatever partitions there are.
            return None
        if (parts / "mp_rank_00_model_states.pt").exists() == self.zero_stage_3:
            theirs = "stage 1 or 2" if self.zero_stage_3 else "stage 3"
            return f"ZeRO {theirs} wrote it, whose partitions are others; resume with that stage"
        written_by = len(list(parts.glob("*_optim_states.pt")))
        if written_by != self.world_size:
            return (
                f"{written_by} processes wrote it, and DeepSpeed goes on with as many alone, not with "
                f"{self.world_size}; set trainer.devices and trainer.num_nodes to what they were (a run under "
                "dprc_fsdp2 goes on with any number)"
            )
        return None

    def _save_engine(self, checkpoint: dict[str, Any], folder: Path) -> None:
        DeepSpeedStrategy.save_checkpoint(self, {}, folder)

    def _load_engine(self, path: Path) -> None:
        # DeepSpeed's own format, which is pickled: what this run did not write does not come here.
        if self.zero_stage_3 and not self._is_fitting:
            # Without an optimizer stage 3 cannot read its own partitions again.
            self._restore_zero_state({"state_dict": whole_weights(path) if self.global_rank == 0 else {}}, strict=True)
            return
        DeepSpeedStrategy.load_checkpoint(self, path)

    # The optimizer --------------------------------------------------------------------------------------------------

    def _setup_model_and_optimizer(self, model: Any, optimizer: Any, lr_scheduler: Any = None) -> Any:
        """Look at the user's own optimizer before ZeRO puts its partitions into it, and hook it after.

        Args:
            model: The LightningModule.
            optimizer: As `configure_optimizers` returned it.
            lr_scheduler: Likewise.

        Returns:
            DeepSpeed's engine and optimizer.

        Raises:
            ConfigurationError: An optimizer whose steps the noise would not meet.
        """
        import deepspeed

        refuse_optimizer(optimizer, self.strategy_name)
        self._check_optimizer(model, [optimizer])
        self._trained = {id(p) for p in model.parameters() if p.requires_grad}
        engine, wrapped, _, _ = deepspeed.initialize(
            args=argparse.Namespace(device_rank=self._device_rank),
            config=self.config,
            model=model,
            model_parameters=[p for p in model.parameters() if p.requires_grad],
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
            dist_init_required=False,
        )
        refuse_engine(engine, self.world_size, self.strategy_name)
        if wrapped.optimizer is not optimizer:
            # Adagrad, say: what it steps in its place never met the noise hook.
            raise ConfigurationError([
                f"strategy {self.strategy_name}, configure_optimizers: DeepSpeed makes a {type(optimizer).__name__} of "
                "its own, which would step past the noise; use another optimizer of torch's, or train with dprc_fsdp2"
            ])
        if not hasattr(wrapped, "fp32_partitioned_groups_flat") and not hasattr(
            wrapped, "single_partition_of_fp32_groups"
        ):
            raise ConfigurationError([
                f"strategy {self.strategy_name}: DeepSpeed made a {type(wrapped).__name__}, whose partitions are not "
                "known; leave zero_optimization on"
            ])
        flats = getattr(wrapped, "fp32_partitioned_groups_flat", None) or wrapped.single_partition_of_fp32_groups
        self._flats = list(flats)
        self.noise_hook.install([optimizer], partitions=self._flats)
        return engine, wrapped

    def _install_noise(self, module: Any, optimizers: list[Optimizer]) -> None:
        """Done already, on the optimizer inside of DeepSpeed's."""

    @property
    def _device_rank(self) -> int | None:
        return self.local_rank if self.root_device.type == "cpu" else self.root_device.index

    # The step -------------------------------------------------------------------------------------------------------

    in_lockstep = True
    fewest_micro_batches = 1
    """ZeRO's step wants a backward before it, also where no record was drawn."""

    def check_step(self, protected: Sequence[Tensor]) -> None:
        """ZeRO reduces what trained when it partitioned the model.

        Args:
            protected: The parameters that train in this step.

        Raises:
            UnsupportedModuleError: They are others than at the beginning of fit.
        """
        self.refuse_changed(protected, self._trained)
        self._order.begin_step()

    def _remember_partitions(self) -> None:
        """Right after the backward in which the engine filled its partitions, before anybody's hooks."""
        if not self._boundary:
            return
        engine: Any = self.model
        held = engine.optimizer.averaged_gradients
        partitions: list[list[Tensor]] = []
        for index, flat in enumerate(self._flats):
            # With offloading they lie where the optimizer steps them, else in parts that are joined there.
            parts: Any = flat.grad if held.get(index) is None else held[index]
            partitions.append(parts if isinstance(parts, list) else [parts])
        self.noise_hook.remember_partitions(partitions)

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """The engine copies what it has accumulated into its partitions in the last one's clipped backward.

        Args:
            last: Whether it is the last one.

        Yields:
            Nothing.
        """
        engine: Any = self.model
        if self.zero_stage_3:
            # Of the micro-batch before: with the flag still set ZeRO-3 takes this one's gradients for its own, and
            # the sum is wrong without a word.
            engine.optimizer.clear_backward_seen_flag()
        engine.set_gradient_accumulation_boundary(last)
        self._boundary = last
        yield
        if last:
            self.check_order(self._order)

    @contextmanager
    def norm_pass(self) -> Iterator[None]:
        """ZeRO-3 counts the backwards that its modules have yet to see: the norm pass must not be counted.

        Yields:
            Nothing.
        """
        if not self.zero_stage_3:
            yield
            return
        engine: Any = self.model
        names = ("applied_pre_backward_ref_cnt", "ds_grads_remaining")
        kept = [(m, n, getattr(m, n)) for m in engine.module.modules() for n in names if hasattr(m, n)]
        try:
            yield
        finally:
            for module, name, value in kept:
                setattr(module, name, value)


class _Precision(DeepSpeedPrecision):
    """As Lightning's, and calls something between a backward and its hooks."""

    def __init__(self, precision: Any, after_backward: Callable[[], None]) -> None:
        super().__init__(precision)
        self._after_backward = after_backward

    def backward(self, *args: Any, **kwargs: Any) -> None:
        super().backward(*args, **kwargs)
        self._after_backward()


for _stage in (1, 2, 3):
    StrategyRegistry.register(
        f"dprc_deepspeed_stage_{_stage}",
        PrivateDeepSpeedStrategy,
        description=f"DeepSpeed ZeRO stage {_stage}, differentially private",
        override=True,
        stage=_stage,
    )
