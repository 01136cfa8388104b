"""Data-parallel replicas: torch's DistributedDataParallel through Lightning."""

import inspect
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from dprc_lightning.checkpoint import DurableCheckpointIO
from dprc_lightning.errors import ConfigurationError, UnsupportedModuleError
from dprc_lightning.keys import KEY_BYTES
from dprc_lightning.noise import NoiseStream
from dprc_lightning.strategies.ranks import ManyRanks, timeout_argument
from dprc_lightning.strategies.refusals import half_parameter_problems


class PrivateDDPStrategy(ManyRanks, DDPStrategy):
    """Lightning's DDP strategy with the noise hook. Alias: ``dprc_ddp``.

    The clipped gradients of all ranks are summed by DDP's own all-reduce; then every rank adds the same noise, from a
    stream whose key rank 0 drew and all share, so that the replicas stay equal. The noise of the sum is added once: the
    ranks do not add one draw each.

    Args:
        timeout: Seconds that a rank waits for the others, with nccl and gloo; torch's own by default.
        noise_stream: For tests only, the same on every rank. A fixed stream makes the run NOT PRIVATE.
        **kwargs: As for Lightning's strategy and DistributedDataParallel.

    Raises:
        ConfigurationError: A setting that changes what is summed.
    """

    strategy_name = "dprc_ddp"

    def __init__(self, timeout: float | None = None, noise_stream: NoiseStream | None = None, **kwargs: Any) -> None:
        refused = [name for name in _REFUSED if kwargs.get(name)]
        if refused:
            raise ConfigurationError([
                f"strategy dprc_ddp, {name}={kwargs[name]}: {_REFUSED[name]}" for name in refused
            ])
        # Buffers must not change (the clipping sees to it), so there is nothing to send before each step.
        newer = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
        kwargs.setdefault("forward_sync_buffers" if newer else "broadcast_buffers", False)
        kwargs.setdefault("checkpoint_io", DurableCheckpointIO())
        kwargs |= timeout_argument(timeout)
        super().__init__(**kwargs)
        self._given_stream = noise_stream
        self._reduced: set[int] = set()

    def setup(self, trainer: Trainer) -> None:
        """Instrument, move, wrap, make optimizers, hook the noise.

        Args:
            trainer: The trainer.
        """
        if trainer.state.fn == TrainerFn.FITTING:
            self._init_privacy(self._given_stream, self._shared_stream)
        with self._private_setup(trainer):
            module: Any = trainer.lightning_module
            # DDP waits for every parameter's gradient, unless it looks at each graph which ones will come.
            if trainer.state.fn == TrainerFn.FITTING and module.privacy.unused == "zero":
                self._ddp_kwargs.setdefault("find_unused_parameters", True)
            super().setup(trainer)
            self._reduced = {id(p) for p in module.parameters() if p.requires_grad}

    def setting_problems(self, trainer: Trainer, module: torch.nn.Module) -> Iterator[str]:
        """See `PrivateStrategy`."""
        yield from half_parameter_problems(module, trainer.precision)
        # What DDP is told to leave alone it would not reduce: each replica would keep its own part of the sum.
        ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", [])
        trained = [name for name, p in module.named_parameters() if p.requires_grad and name in ignored]
        if trained:
            yield (
                f"parameter {trained[0]!r} trains and is in _ddp_params_and_buffers_to_ignore; take it out there, or "
                "freeze it"
            )

    def teardown(self) -> None:
        """Give the model back as it was."""
        self._release()
        super().teardown()

    def check_step(self, protected: Sequence[Tensor]) -> None:
        """DDP reduces what trained when it wrapped the model: by what was unfrozen since, replicas would drift apart.

        Args:
            protected: The parameters that train in this step.

        Raises:
            UnsupportedModuleError: They are others than at the beginning of fit.
        """
        model = self.model
        if isinstance(model, DistributedDataParallel) and model._comm_hooks:
            raise UnsupportedModuleError("a communication hook changes what is summed over the ranks; register none")
        self.refuse_changed(protected, self._reduced)

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """Gradients are reduced in the last micro-batch's clipped backward, for all of them.

        Args:
            last: Whether it is the last one.

        Yields:
            Nothing.
        """
        model = self.model
        assert isinstance(model, DistributedDataParallel), "a private step runs within fit"
        if last:
            yield
        else:
            with model.no_sync():
                yield

    def _shared_stream(self) -> NoiseStream:
        """Fresh in every start, the same on all ranks, stored nowhere."""
        return NoiseStream(self.from_rank_zero(lambda: os.urandom(KEY_BYTES)))


_REFUSED = {
    "mixed_precision": "gradients would be summed in a lower precision; set trainer.precision instead",
    "process_group": "the ranks of a group of its own would not share the noise; leave it out",
    "ddp_comm_hook": "a communication hook changes what is summed; leave it out",
    "ddp_comm_state": "a communication hook changes what is summed; leave it out",
    "ddp_comm_wrapper": "a communication hook changes what is summed; leave it out",
    "model_averaging_period": "averaging models is another algorithm than the accounted one; leave it out",
    "static_graph": "micro-batches of dummies have another graph; leave it out",
}

StrategyRegistry.register(
    PrivateDDPStrategy.strategy_name,
    PrivateDDPStrategy,
    description="Data-parallel replicas, differentially private",
    override=True,
)
