"""Fully sharded parameters, gradients and optimizer states: torch's FSDP2 (`fully_shard`) through Lightning."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ModelParallelStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultReduceScatter,
    ProcessGroupAllocReduceScatter,
    SymmMemReduceScatter,
)

from dprc_lightning.checkpoint import DurableCheckpointIO
from dprc_lightning.errors import ConfigurationError, UnclippedGradientError, UnsupportedModuleError
from dprc_lightning.keys import KEY_BYTES
from dprc_lightning.noise import NoiseStream
from dprc_lightning.strategies.order import CallOrder, units_of
from dprc_lightning.strategies.ranks import timeout_argument
from dprc_lightning.strategies.refusals import half_parameter_problems
from dprc_lightning.strategies.sharded_checkpoints import ShardedCheckpoints
from dprc_lightning.strategies.wrapping import check_ties, layers_to_wrap, roots_to_wrap, wrap_problems

_REDUCE_SCATTERS = (DefaultReduceScatter, ProcessGroupAllocReduceScatter, SymmMemReduceScatter)
"""torch's own, which differ in where their memory comes from."""


class PrivateFSDP2Strategy(ShardedCheckpoints, ModelParallelStrategy):
    """torch's FSDP2 with the noise hook. Alias: ``dprc_fsdp2``.

    Each rank keeps a shard of every parameter. A layer's whole weights are there only while it runs, and the norm of a
    record is that of its whole gradient, because one rank has all of the record's activations. The clipped gradients
    are reduced by FSDP's own reduce-scatter; each rank then adds noise to its own shard, from a stream of its own, so
    that each element of the whole gradient gets one draw.

    Args:
        wrap: Class names of the layers that are sharded one by one. Default: what a Hugging Face model calls
            `_no_split_modules`.
        replicas: HSDP: how many copies of the sharded model there are. Ranks that hold the same shard share a noise
            stream, so that the copies stay equal.
        reshard_after_forward: Whether a layer's whole weights are given up between forward and backward. Default:
            torch's own: yes, but for the root.
        cpu_offload: Keep parameters, gradients and optimizer states in the memory of the host.
        save_distributed_checkpoint: One file for each rank in a folder, instead of one file made by rank 0.
        trust_checkpoint: Load a folder that this run's secret did not sign: its files can run code.
        timeout: Seconds that a rank waits for the others, with nccl and gloo; torch's own by default.
        noise_stream: For tests only. A fixed stream makes the run NOT PRIVATE; each shard derives its own from it.
        **kwargs: As for Lightning's ModelParallelStrategy.

    Raises:
        ConfigurationError: A setting that cannot be used.
    """

    strategy_name = "dprc_fsdp2"
    in_lockstep = True

    def __init__(
        self,
        wrap: Sequence[str] | None = None,
        replicas: int = 1,
        reshard_after_forward: bool | None = None,
        cpu_offload: bool = False,
        save_distributed_checkpoint: bool = False,
        trust_checkpoint: bool = False,
        timeout: float | None = None,
        noise_stream: NoiseStream | None = None,
        **kwargs: Any,
    ) -> None:
        if kwargs.get("tensor_parallel_size", 1) not in (1, "auto"):
            raise ConfigurationError([
                f"strategy dprc_fsdp2, tensor_parallel_size={kwargs['tensor_parallel_size']}: a rank with a part of a "
                "layer cannot take a record's norm alone; leave it out"
            ])
        if kwargs.get("data_parallel_size", "auto") != "auto":
            raise ConfigurationError([
                f"strategy dprc_fsdp2, data_parallel_size={kwargs['data_parallel_size']}: all processes share the "
                "records; leave it out"
            ])
        kwargs["tensor_parallel_size"] = 1
        kwargs |= timeout_argument(timeout)
        super().__init__(save_distributed_checkpoint=save_distributed_checkpoint, **kwargs)
        self.checkpoint_io = DurableCheckpointIO()
        self.trust_checkpoint = trust_checkpoint
        self._wrap, self._replicas = wrap, replicas
        self._reshard_after_forward, self._cpu_offload = reshard_after_forward, cpu_offload
        self._given_stream = noise_stream
        self._roots: list[FSDPModule] = []
        self._sharded: set[int] = set()
        self._order = CallOrder()
        self._unit_of: dict[str, str] = {}

    def setup_environment(self) -> None:
        """One dimension for data parallelism, whatever the number of nodes."""
        if self._data_parallel_size == "auto":
            self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()

    def setup(self, trainer: Trainer) -> None:
        """Instrument, shard, make optimizers, hook the noise.

        Args:
            trainer: The trainer.
        """
        module: Any = trainer.lightning_module
        fitting = trainer.state.fn == TrainerFn.FITTING
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        if fitting:
            self._init_privacy(self._shard_stream(), self._own_stream)
        with self._private_setup(trainer):
            # In place of Lightning's own setup, which wants the model sharded before anything can be instrumented.
            self.model = self.precision_plugin.convert_module(module)
            self._shard(module)
            self.barrier()
            if fitting:
                self.setup_optimizers(trainer)
            self.setup_precision_plugin()
            self._restore_engine()

    def setting_problems(self, trainer: Trainer, module: nn.Module) -> Iterator[str]:
        """See `PrivateStrategy`."""
        yield from half_parameter_problems(module, trainer.precision)
        processes = self.num_nodes * self.num_processes
        if self._replicas < 1 or processes % self._replicas:
            yield f"replicas={self._replicas}: {processes} processes are no multiple of it; set a divisor of them"
        yield from wrap_problems(module, self._wrap)
        if any(isinstance(child, FSDPModule) for child in module.modules()):
            yield (
                f"{type(module).__name__}: its model is sharded already (by configure_model, or an earlier fit), and "
                "could not be instrumented; leave fully_shard to the strategy (its setting wrap says what is a layer), "
                "and make a new module for each fit"
            )

    def teardown(self) -> None:
        """Give the model back, sharded as it is."""
        self._order.release()
        self._release()
        super().teardown()

    # Checkpoints ----------------------------------------------------------------------------------------------------

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """One file that rank 0 writes, or a folder that all write.

        Args:
            checkpoint: Lightning's.
            filepath: Where.
            storage_options: Must be None.
        """
        self.refuse_unnoised()
        if self._save_distributed_checkpoint:
            super().save_checkpoint(checkpoint, filepath, storage_options)
        else:
            ModelParallelStrategy.save_checkpoint(self, checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read all but weights and optimizer states; a file or a folder, written by any number of ranks.

        Args:
            checkpoint_path: File or folder.
            weights_only: None or True, which are the same here.

        Returns:
            The rest of the checkpoint.
        """
        path = Path(self.broadcast(checkpoint_path))
        if path.is_dir():
            return super().load_checkpoint(path, weights_only)
        self.on_rank_zero(lambda: DurableCheckpointIO().check(path))
        self._waiting = path
        content: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        return {key: value for key, value in content.items() if key not in {"state_dict", "optimizer_states"}}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """See Lightning's. torch makes an optimizer step on zeros where it has no state yet.

        Args:
            optimizer: The optimizer.

        Returns:
            Its state.
        """
        with self._loading():
            return super().optimizer_state(optimizer)

    def _check_folder(self, path: Path) -> None:
        # A file holds no code.
        if path.is_dir():
            super()._check_folder(path)

    def _engine_problem(self, path: Path) -> str | None:
        return None if list(path.glob("*.distcp")) else "another engine wrote it; load it with the strategy that did"

    def _save_engine(self, checkpoint: dict[str, Any], folder: Path) -> None:
        # A copy: what is written is taken out of it.
        ModelParallelStrategy.save_checkpoint(self, dict(checkpoint), folder)

    def _load_engine(self, path: Path) -> None:
        optimizers = self.optimizers
        stateless = [] if path.is_dir() else self._without_state(path)
        # Lightning fails on an optimizer that keeps no state (plain SGD): its settings are all there is to load.
        self.optimizers = [] if stateless else optimizers
        try:
            ModelParallelStrategy.load_checkpoint(self, path, weights_only=True)
        finally:
            self.optimizers = optimizers
        for optimizer, saved in zip(optimizers, stateless, strict=False):
            for group, settings in zip(optimizer.param_groups, saved["param_groups"], strict=True):
                group.update({key: value for key, value in settings.items() if key != "params"})

    @staticmethod
    def _without_state(path: Path) -> list[dict[str, Any]]:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        return [saved for saved in content.get("optimizer_states", []) if not saved["state"]]

    # What is wrapped ------------------------------------------------------------------------------------------------

    def _shard(self, module: nn.Module) -> None:
        """The recipe. The order matters: each line says why.

        Args:
            module: The LightningModule, instrumented (it must be before: what is instrumented later would see shards).
        """
        mesh = self._mesh()
        settings: dict[str, Any] = {
            "mesh": mesh,
            "offload_policy": CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
            if self._cpu_offload
            else OffloadPolicy(),
        }
        if self._reshard_after_forward is not None:
            settings["reshard_after_forward"] = self._reshard_after_forward
        roots = roots_to_wrap(module, self.strategy_name)
        # A model that is validated after its training is sharded already.
        for root in (root for root in roots if not isinstance(root, FSDPModule)):
            # Layers before their root: a module shards what no inner one has taken.
            layers = layers_to_wrap(root, self._wrap, self.strategy_name)
            check_ties(root, layers, self.strategy_name)
            for layer in layers:
                fully_shard(layer, **settings)
            # Embedding, head and final norm together: a tied weight must lie in one group.
            fully_shard(root, **settings)
        self._roots = [unit for unit in roots if isinstance(unit, FSDPModule)]
        if getattr(module.privacy, "unused", "error") == "zero":
            # Of two ranks one may reach a parameter and the other not: both must take part in its reduction.
            for unit in self._roots:
                unit.set_reduce_scatter_unused_params(True)
        # What has no parameter to shard (metrics, buffers) moves as it is.
        if not self._cpu_offload:
            module.to(self.root_device)
        if getattr(module, "handle", None) is not None:
            module.handle.follow_shards()  # type: ignore[union-attr, operator]
            units: dict[str, Any] = {
                path: child for path, child in module.named_modules() if isinstance(child, FSDPModule)
            }
            self._order.follow(units)
            self._unit_of = units_of(units, module.handle.named_parameters)  # type: ignore[union-attr, arg-type]
        self._sharded = {id(p) for p in module.parameters() if p.requires_grad}

    def _mesh(self) -> DeviceMesh:
        if self._replicas == 1:
            return self.device_mesh["data_parallel"]
        shape = (self._replicas, self.world_size // self._replicas)
        return init_device_mesh(self.root_device.type, shape, mesh_dim_names=("replicate", "shard"))

    # Noise ----------------------------------------------------------------------------------------------------------

    @property
    def _shard_index(self) -> int:
        """Which shard this rank holds; ranks with the same one are copies of each other."""
        return self.global_rank % (self.world_size // self._replicas)

    def _shard_stream(self) -> NoiseStream | None:
        given = self._given_stream
        return given if given is None else given.for_shard(self._shard_index)

    def _own_stream(self) -> NoiseStream:
        """Fresh in every start, one for each shard, stored nowhere."""
        if self._replicas == 1:
            return NoiseStream.fresh()
        shards = self.world_size // self._replicas
        keys = self.from_rank_zero(lambda: [os.urandom(KEY_BYTES) for _ in range(shards)])
        return NoiseStream(keys[self._shard_index])

    # The step -------------------------------------------------------------------------------------------------------

    def check_step(self, protected: Sequence[Tensor]) -> None:
        """FSDP reduces what trained when it sharded the model.

        Args:
            protected: The parameters that train in this step.

        Raises:
            UnsupportedModuleError: They are others than at the beginning of fit.
        """
        self.refuse_changed(protected, self._sharded)
        self._order.begin_step()

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """Gradients are reduced in the last micro-batch's clipped backward, for all of them.

        Args:
            last: Whether it is the last one.

        Yields:
            Nothing.
        """
        self._reduce(last)
        yield
        if last:
            self.check_order(self._order, self._unit_of)
            self._check_reduced()
            self._check_reduction()

    def _check_reduction(self) -> None:
        """What was reduced must be the mean over the ranks, and nothing else may have been done to it."""
        for root in self._roots:
            for unit in (child for child in nn.Module.modules(root) if isinstance(child, FSDPModule)):  # type: ignore[arg-type]
                # torch has setters for these and no way to ask.
                for group in unit._get_fsdp_state()._fsdp_param_groups:
                    changed = {
                        "set_all_reduce_hook": group._all_reduce_hook is not None,
                        "set_gradient_divide_factor": group.gradient_divide_factor is not None,
                        "set_force_sum_reduction_for_comms": group.force_sum_reduction_for_comms,
                        "set_custom_reduce_scatter": not isinstance(group._reduce_scatter_comm, _REDUCE_SCATTERS),
                    }
                    for setter in (name for name, whether in changed.items() if whether):
                        raise UnclippedGradientError(
                            f"{setter}() was called on the model: it changes the sum of the clipped gradients; leave it"
                        )

    def _check_reduced(self) -> None:
        """FSDP learns of a backward by hooks on what a forward returned; without a tensor in it, it reduces nothing."""
        module: Any = self.lightning_module
        if module.privacy.unused == "error" and any(p.grad is None for p in module.protected_parameters()):
            raise UnsupportedModuleError(
                f"strategy {self.strategy_name}: gradients were not reduced; a module that it shards must be called, "
                "and return a tensor, or a tuple, list, dict or Hugging Face output of tensors, in which it finds them"
            )

    @contextmanager
    def norm_pass(self) -> Iterator[None]:
        """No reduction: what the earlier micro-batches left would be sent twice.

        Units that keep their whole weights from forward to backward keep them for the clipped backward too, which gives
        them up: no more is alive at one time, and they are not gathered again.

        Yields:
            Nothing.
        """
        before = self._reducing
        self._reduce(False)
        self._give_up_kept(False)
        try:
            yield
        finally:
            self._give_up_kept(True)
            self._reduce(before)

    def _give_up_kept(self, whether: bool) -> None:
        # By default the root alone is kept.
        if self._reshard_after_forward is not True:
            for root in self._roots:
                root.set_reshard_after_backward(whether, recurse=self._reshard_after_forward is False)

    def _reduce(self, whether: bool) -> None:
        self._reducing = whether
        for root in self._roots:
            root.set_requires_gradient_sync(whether)


StrategyRegistry.register(
    PrivateFSDP2Strategy.strategy_name,
    PrivateFSDP2Strategy,
    description="Fully sharded (FSDP2), differentially private",
    override=True,
)
