"""Fully sharded parameters by torch's first FSDP (`FullyShardedDataParallel`) through Lightning; parity and noise only.

Second-class: what the norm pass leaves in FSDP's state machine is taken back through names that torch does not promise
to keep, all in this file. New runs are better served by ``dprc_fsdp2``, which also resumes.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.strategies.fsdp import _move_torchmetrics_to_device
from lightning.pytorch import Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision.fsdp import FSDPPrecision
from lightning.pytorch.strategies import FSDPStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    OptimStateKeyType,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp._common_utils import TrainingState
from torch.distributed.fsdp._flat_param import (
    RESHARD_AFTER_FORWARD_HANDLE_STRATEGIES,
    FlatParamHandle,
    HandleTrainingState,
)
from torch.distributed.fsdp._runtime_utils import _post_forward_reshard
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from dprc_lightning.checkpoint import DurableCheckpointIO
from dprc_lightning.errors import ConfigurationError, UnsupportedModuleError
from dprc_lightning.noise import NoiseStream
from dprc_lightning.strategies.order import CallOrder, units_of
from dprc_lightning.strategies.ranks import ManyRanks, timeout_argument
from dprc_lightning.strategies.wrapping import layers_to_wrap, roots_to_wrap


class PrivateFSDPStrategy(ManyRanks, FSDPStrategy):
    """torch's first FSDP with the noise hook. Alias: ``dprc_fsdp``.

    Each unit (a decoder layer, or what is left at the root) is one flat parameter, of which a rank keeps a slice. A
    unit's whole weights are there only while it runs, and the norm of a record is that of its whole gradient, because
    one rank has all of the record's activations. The clipped gradients are reduced by FSDP's own reduce-scatter; each
    rank then adds noise to its own slices, from a stream of its own, so that each element of the whole gradient gets
    one draw.

    Limits:

    * Of several micro-batches all but the last keep their gradients whole: 4 bytes per element of every unit with a
      trainable parameter, on each rank, until the last one's backward. With one micro-batch it is one unit at a time.
    * Frozen parameters in a unit with a trainable one (LoRA) get gradients too, which are then thrown away.
    * Every unit must run, and reach the loss, in each forward of each rank: ``unused=zero`` is for parameters that some
      records do not use, not for units (`wrap`), for which the ranks would wait in vain.
    * A run cannot be resumed. Its checkpoints are one file with whole weights, for validation and export.

    Args:
        wrap: Class names of the layers that are units of their own. Default: what a Hugging Face model calls
            `_no_split_modules`.
        sharding_strategy: ``FULL_SHARD``; or ``SHARD_GRAD_OP``, which keeps whole weights from forward to backward.
        timeout: Seconds that a rank waits for the others, with nccl and gloo; torch's own by default.
        noise_stream: For tests only. A fixed stream makes the run NOT PRIVATE; each rank derives its own from it.
        **kwargs: As for Lightning's FSDPStrategy.

    Raises:
        ConfigurationError: A setting that cannot be used.
    """

    strategy_name = "dprc_fsdp"
    can_resume = False
    in_lockstep = True

    def __init__(
        self,
        wrap: Sequence[str] | None = None,
        sharding_strategy: str | ShardingStrategy = "FULL_SHARD",
        timeout: float | None = None,
        noise_stream: NoiseStream | None = None,
        **kwargs: Any,
    ) -> None:
        name = sharding_strategy.name if isinstance(sharding_strategy, ShardingStrategy) else sharding_strategy
        problems = [f"{key}={kwargs[key]}: {_REFUSED[key]}" for key in _REFUSED if kwargs.get(key)]
        if name not in ("FULL_SHARD", "SHARD_GRAD_OP"):
            instead = {"NO_SHARD": "train with dprc_ddp", "HYBRID_SHARD": "train with dprc_fsdp2 and its replicas"}
            problems.append(f"sharding_strategy={name}: {instead.get(name, 'use FULL_SHARD or SHARD_GRAD_OP')}")
        if not kwargs.get("use_orig_params", True):
            problems.append("use_orig_params=False: a flat parameter cannot be clipped as its parts are; leave it out")
        if kwargs.get("state_dict_type", "full") != "full":
            problems.append(f"state_dict_type={kwargs['state_dict_type']}: leave it out, or train with dprc_fsdp2")
        if problems:
            raise ConfigurationError([f"strategy dprc_fsdp, {problem}" for problem in problems])
        kwargs.setdefault("checkpoint_io", DurableCheckpointIO())
        kwargs |= timeout_argument(timeout)
        super().__init__(sharding_strategy=name, **kwargs)  # type: ignore[arg-type]
        self._wrap = wrap
        self._given_stream = noise_stream
        self._roots: list[FSDP] = []
        self._sharded: set[int] = set()
        self._in_norm_pass = False
        self._calls: Counter[FSDP] = Counter()
        self._calls_are_old = False
        self._order = CallOrder()
        self._unit_of: dict[str, str] = {}

    def setup(self, trainer: Trainer) -> None:
        """Instrument, shard, make optimizers, hook the noise.

        Args:
            trainer: The trainer.
        """
        module: Any = trainer.lightning_module
        fitting = self._is_fitting
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        # Lightning's own enters autocast for CUDA, wherever the model is.
        self._precision_plugin = _Precision(self.precision_plugin.precision, self.root_device)
        if fitting:
            given = self._given_stream
            self._init_privacy(None if given is None else given.for_shard(self.global_rank))
        with self._private_setup(trainer):
            # In place of Lightning's own setup, which wraps the LightningModule, whose forward is not what runs.
            self.model = self.precision_plugin.convert_module(module)
            if not _is_sharded(module):
                self._shard(module)
            self._roots = [child for child in module.children() if isinstance(child, FSDP)]
            self.barrier()
            if fitting:
                if module.handle is not None:
                    module.handle.follow_views([handle.flat_param for handle in _handles(self._roots)])
                    units = {path: child for path, child in module.named_modules() if isinstance(child, FSDP)}
                    self._order.follow(units)
                    self._unit_of = units_of(units, module.handle.named_parameters)
                self._sharded = {id(p) for p in module.parameters() if p.requires_grad}
                self.setup_optimizers(trainer)
            self.setup_precision_plugin()

    def teardown(self) -> None:
        """Give the model back, sharded as it is."""
        self._order.release()
        self._release()
        super().teardown()

    # What is refused ------------------------------------------------------------------------------------------------

    def setting_problems(self, trainer: Trainer, module: nn.Module) -> Iterator[str]:
        """See `PrivateStrategy`."""
        # Not world_size, which is not known before the ranks have started.
        if trainer.num_devices * trainer.num_nodes == 1:
            yield "trainer.devices=1: there is nothing to shard; train with dprc_single"
        if _is_sharded(module):
            yield f"{type(module).__name__} is sharded already, by an earlier fit, say; make a new one"
        half = [name for name, p in module.named_parameters() if p.requires_grad and p.dtype is not torch.float32]
        if half or str(trainer.precision).endswith("-true") and not str(trainer.precision).startswith("32"):
            setting = f"parameter {half[0]!r} is not float32" if half else f"trainer.precision={trainer.precision}"
            yield (
                f"{setting}: FSDP would sum gradients in that precision, which is not covered; keep trainable "
                "parameters in float32 and set trainer.precision=bf16-mixed"
            )

    # What is wrapped ------------------------------------------------------------------------------------------------

    def _shard(self, module: nn.Module) -> None:
        """The recipe. The order matters: each line says why.

        Args:
            module: The LightningModule, instrumented if it is to be fitted (what is instrumented later would see
                slices).
        """
        settings: dict[str, Any] = {
            **self.kwargs,
            "sharding_strategy": self.sharding_strategy,
            # Also for a CPU, where FSDP would look for an accelerator by itself.
            "device_id": self.root_device,
            # The optimizer steps the very parameters that the clipping knows.
            "use_orig_params": True,
        }
        for root in roots_to_wrap(module, self.strategy_name):
            units = {id(layer) for layer in layers_to_wrap(root, self._wrap, self.strategy_name)}
            _check_units(root, units)
            # Inner units first, which FSDP does by itself; a tied weight must lie in one of them.
            wrapped = FSDP(root, auto_wrap_policy=_these(units), **settings)
            wrappers = {id(unit.module): unit for unit in FSDP.fsdp_modules(wrapped)}
            for parent in (module, *wrapped.modules()):
                for name, child in parent._modules.items():
                    # FSDP itself leaves the second place of a module that is in two.
                    if not isinstance(parent, FSDP):
                        parent._modules[name] = wrappers.get(id(child), child)
            for unit in wrappers.values():
                if unit is not wrapped:
                    unit.register_forward_pre_hook(self._before_unit, with_kwargs=True)
        # What has no parameter to shard moves as it is.
        for child in module.children():
            if not isinstance(child, FSDP):
                child.to(self.root_device)
        _move_torchmetrics_to_device(module, self.root_device)

    # The step -------------------------------------------------------------------------------------------------------

    def check_step(self, protected: Sequence[Tensor]) -> None:
        """FSDP reduces what trained when it sharded the model.

        Args:
            protected: The parameters that train in this step.

        Raises:
            UnsupportedModuleError: They are others than at the beginning of fit; or a communication hook.
        """
        if any(unit._comm_hook is not None for unit in _units(self._roots)):
            raise UnsupportedModuleError("a communication hook changes what is summed over the ranks; register none")
        self.refuse_changed(protected, self._sharded)
        self._order.begin_step()

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """Gradients are reduced in the last micro-batch's clipped backward, for all of them.

        Args:
            last: Whether it is the last one.

        Yields:
            Nothing.

        Raises:
            UnsupportedModuleError: The model hides tensors from FSDP.
            RuntimeError: Any other, as it came.
            ValueError: Likewise.
        """
        self._calls_are_old = True
        with ExitStack() as stack:
            if not last:
                for root in self._roots:
                    stack.enter_context(root.no_sync())
            try:
                yield
            except (ValueError, RuntimeError) as error:
                # torch has no type for it: FSDP learns of a backward by hooks on the tensors that a unit returned.
                if "TrainingState" in str(error) or "not allocated" in str(error):
                    raise UnsupportedModuleError(
                        f"strategy {self.strategy_name}: a backward reached a unit whose output FSDP did not know; a "
                        "module that it shards must return a tensor, or a tuple, list, dict or Hugging Face output of "
                        "tensors"
                    ) from error
                raise
        if last:
            self.check_order(self._order, self._unit_of)

    @contextmanager
    def norm_pass(self) -> Iterator[None]:
        """FSDP expects one backward per forward: what this one leaves is taken back to what the forward left.

        No parameter gets a gradient here, so the hooks that give up a unit's whole weights and end the backward never
        run, or must not.

        Yields:
            Nothing.
        """
        kept = [_Kept(unit) for unit in _units(self._roots)]
        roots: list[Any] = list(self._roots)
        for root in roots:
            # As if the callback that ends the backward were queued already: it would take away the hooks that reduce
            # the gradients of the next one.
            root._post_backward_callback_queued = True
        self._in_norm_pass = True
        try:
            yield
        finally:
            self._in_norm_pass, self._calls_are_old = False, True
            for unit in kept:
                unit.restore()
            for root in roots:
                root._post_backward_callback_queued = False

    def _before_unit(self, unit: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Let the norm pass give up a unit's whole weights once it is through: else it would end with all of them.

        In an ordinary backward FSDP does so as the gradient of the unit's parameters arrives.
        """
        assert isinstance(unit, FSDP)
        if not torch.is_grad_enabled() or self._in_norm_pass:
            return
        if self._calls_are_old:
            self._calls.clear()
            self._calls_are_old = False
        self._calls[unit] += 1
        inputs = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor) and value.requires_grad]
        if inputs:
            register_multi_grad_hook(inputs, lambda _: self._after_unit(unit))

    def _after_unit(self, unit: FSDP) -> None:
        handle = unit._handle
        # One that ran twice is not through yet; and the other strategies keep the weights from forward to backward.
        if not self._in_norm_pass or handle is None or self._calls[unit] > 1:
            return
        if handle._sharding_strategy in RESHARD_AFTER_FORWARD_HANDLE_STRATEGIES:
            _post_forward_reshard(unit, handle)

    # Checkpoints ----------------------------------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Whole weights go into slices; but a fit is to be refused before its set-up makes a run folder."""
        return not self._is_fitting

    @property
    def _is_fitting(self) -> bool:
        assert self.lightning_module is not None
        return self.lightning_module.trainer.state.fn == TrainerFn.FITTING

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """One file with whole weights, to validate or test; whichever strategy wrote it.

        Args:
            checkpoint_path: The file.
            weights_only: None or True, which are the same here.

        Returns:
            The checkpoint.

        Raises:
            ConfigurationError: A fit is to be resumed.
        """
        if self._is_fitting:
            raise ConfigurationError([
                f"strategy dprc_fsdp, ckpt_path={checkpoint_path}: it cannot resume a run; train with dprc_fsdp2"
            ])
        return self.checkpoint_io.load_checkpoint(Path(self.broadcast(checkpoint_path)), weights_only=weights_only)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Give each rank its slices.

        Args:
            checkpoint: From `load_checkpoint`.
            strict: As for ``Module.load_state_dict``.
        """
        assert self.lightning_module is not None
        with self._whole(rank0_only=False):
            self.lightning_module.load_state_dict(checkpoint["state_dict"], strict=strict)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Whole weights, on rank 0. A collective.

        Returns:
            Them; on the other ranks nothing of what is sharded.
        """
        assert self.lightning_module is not None
        with self._whole():
            return self.lightning_module.state_dict()

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The same of the optimizer, as it would be without shards. A collective.

        Args:
            optimizer: As Lightning wraps it.

        Returns:
            Its state; on the other ranks an empty one.
        """
        module: Any = self.lightning_module
        inner: Any = optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        with self._whole():
            state = FSDP.optim_state_dict(module, inner)
            if self.global_rank:
                return state
            return FSDP.rekey_optim_state_dict(state, OptimStateKeyType.PARAM_ID, module)

    def _whole(self, rank0_only: bool = True) -> AbstractContextManager[Any]:
        # On a CPU there is nowhere to move to, and FSDP would free what it has not moved: a segmentation fault.
        settings = {"offload_to_cpu": self.root_device.type != "cpu", "rank0_only": rank0_only}
        assert self.lightning_module is not None
        return FSDP.state_dict_type(
            self.lightning_module,
            StateDictType.FULL_STATE_DICT,
            FullStateDictConfig(**settings),
            FullOptimStateDictConfig(**settings),
        )


class _Precision(FSDPPrecision):
    """Autocast where the model is."""

    def __init__(self, precision: Any, device: torch.device) -> None:
        super().__init__(precision)
        self._device = device

    def forward_context(self) -> AbstractContextManager:
        if self.precision == "bf16-mixed":
            return torch.autocast(self._device.type, dtype=torch.bfloat16)
        return super().forward_context()


class _Kept:
    """What the forward left of a unit's state, as torch 2.13 names it."""

    def __init__(self, unit: FSDP) -> None:
        self._unit = unit
        handle: Any = unit._handle
        if handle is not None:
            self._needs_unshard = getattr(handle, "_needs_pre_backward_unshard", False)
            # A unit without trainable parameters forgets its views as soon as a backward is through it.
            self._views = list(handle.flat_param._tensors or [])

    def restore(self) -> None:
        """Back to it, with the whole weights given up as after the forward."""
        unit: Any = self._unit
        handle: Any = unit._handle
        unit.training_state = TrainingState.IDLE
        if handle is None:
            return
        if getattr(handle, "_ran_pre_backward_hook", False) or handle._prefetched:
            # In that state it keeps the views that the graph holds, and shows the parameters their gradients.
            handle._training_state = HandleTrainingState.FORWARD
            with torch.enable_grad():
                _post_forward_reshard(unit, handle)
            handle._ran_pre_backward_hook = False
        handle._training_state = HandleTrainingState.IDLE
        handle._needs_pre_backward_unshard = self._needs_unshard
        if handle.flat_param._tensors is not None:
            handle.flat_param._tensors[:] = self._views


def _units(roots: Sequence[FSDP]) -> list[FSDP]:
    return [unit for root in roots for unit in FSDP.fsdp_modules(root)]


def _handles(roots: Sequence[FSDP]) -> list[FlatParamHandle]:
    return [unit._handle for unit in _units(roots) if unit._handle is not None]


def _these(units: set[int]) -> CustomPolicy:
    return CustomPolicy(lambda child: id(child) in units)


def _is_sharded(module: nn.Module) -> bool:
    return any(isinstance(child, FSDP) for child in module.modules())


def _check_units(root: nn.Module, units: set[int]) -> None:
    """A flat parameter has one precision, and holds a weight that two modules share if both are in its unit."""
    problems: list[str] = []
    owner: dict[int, tuple[int, str]] = {}
    precision: dict[int, tuple[torch.dtype, str]] = {}

    def look(module: nn.Module, unit: int, path: str) -> None:
        unit = id(module) if id(module) in units else unit
        for local, parameter in module._parameters.items():
            if parameter is None:
                continue
            name = f"{path}{local}"
            other, first = owner.setdefault(id(parameter), (unit, name))
            if other != unit:
                problems.append(
                    f"parameters {first!r} and {name!r} are one, in two units; leave one of the two classes out of wrap"
                )
            dtype, first = precision.setdefault(unit, (parameter.dtype, name))
            if dtype is not parameter.dtype:
                problems.append(
                    f"parameters {first!r} and {name!r} have two precisions, {dtype} and {parameter.dtype}, in one "
                    "unit; load the model in float32, or train with dprc_fsdp2"
                )
        for local, child in module.named_children():
            look(child, unit, f"{path}{local}.")

    look(root, 0, "")
    if problems:
        raise ConfigurationError([f"strategy dprc_fsdp: {problem}" for problem in problems[:1]])


_REFUSED = {
    "mixed_precision": "gradients would be summed in a lower precision; set trainer.precision=bf16-mixed instead",
    "cpu_offload": "it does not go with several micro-batches; train with dprc_fsdp2 and its cpu_offload",
    "auto_wrap_policy": "wrap says which layers are units of their own; leave it out",
    "activation_checkpointing": "it would wrap layers that are instrumented; switch it on in the model",
    "activation_checkpointing_policy": "it would wrap layers that are instrumented; switch it on in the model",
    "device_mesh": "train with dprc_fsdp2 and its replicas",
    "process_group": "the slices of a group of its own would not be noised once; leave it out",
    "ignored_modules": "what FSDP ignores it does not reduce; leave it out, or freeze them",
    "ignored_parameters": "what FSDP ignores it does not reduce; leave it out, or freeze them",
    "ignored_states": "what FSDP ignores it does not reduce; leave it out, or freeze them",
    "param_init_fn": "the parameters are read before they are sharded; make them in the model's constructor",
}

StrategyRegistry.register(
    PrivateFSDPStrategy.strategy_name,
    PrivateFSDPStrategy,
    description="Fully sharded (the first FSDP), differentially private",
    override=True,
)
