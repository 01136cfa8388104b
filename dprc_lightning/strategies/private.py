"""The protocol between a DPRCModule and the engine that runs it."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from dprc_lightning.errors import CheckpointError, ConfigurationError
from dprc_lightning.noise import NoiseStream
from dprc_lightning.strategies.noise_hook import NoiseHook, trainable_of

T = TypeVar("T")


def _settings_of(optimizer: Optimizer) -> bytes:
    """What two ranks share only if they update alike."""
    plain = (bool, int, float, str, tuple)
    groups = [
        (len(group["params"]), sorted((k, v) for k, v in group.items() if isinstance(v, plain)))
        for group in optimizer.param_groups
    ]
    return repr((type(optimizer).__name__, groups)).encode()


def check_schedulers(configs: Iterable[LRSchedulerConfig]) -> None:
    """Refuse a scheduler that the library cannot step. They are known once the optimizer is: still before any step.

    Args:
        configs: ``strategy.lr_scheduler_configs``.

    Raises:
        ConfigurationError: It waits for a metric.
    """
    found = [
        f"configure_optimizers: {type(config.scheduler).__name__}: it follows a metric, and schedulers step once per "
        "logical step, without one; use one that follows the steps, such as LambdaLR"
        for config in configs
        if config.reduce_on_plateau or isinstance(config.scheduler, ReduceLROnPlateau)
    ]
    if found:
        raise ConfigurationError(found)


@runtime_checkable
class PreparesPrivacy(Protocol):
    """What a strategy asks of a module: `DPRCModule` has it."""

    def prepare_privacy(self) -> None:
        """Instrument the model and resolve the mechanism; before any wrapping and before the optimizers exist."""

    def protected_parameters(self) -> list[torch.nn.Parameter]:
        """The parameters whose gradients are clipped."""

    def abandon_privacy(self) -> None:
        """Undo `prepare_privacy`: no step was begun."""


class PrivateStrategy:
    """Mixed into a Lightning strategy. A DPRCModule refuses to train under a strategy without it.

    A subclass says how its engine wants a micro-batch and a norm pass to be framed. The order of set-up is fixed here:
    instrument, then whatever the engine does (move, wrap, shard), optimizers, noise hook.
    """

    noise_hook: NoiseHook
    fewest_micro_batches = 0
    """How many micro-batches a step must have: where the engine needs a backward, one of dummies if need be."""
    strategy_name: str
    """As users name it in ``trainer.strategy``."""
    can_resume = True
    """Whether a fit can go on from a checkpoint."""
    in_lockstep = False
    """Whether a forward or a norm pass is a collective (it gathers weights): every rank must run as many."""

    def _init_privacy(self, given: NoiseStream | None, fresh: Callable[[], NoiseStream] = NoiseStream.fresh) -> None:
        """Make the hook.

        Args:
            given: A test's stream.
            fresh: Makes a run's own.
        """
        self.noise_hook = NoiseHook(fresh() if given is None else given, is_given=given is not None)

    def setting_problems(self, trainer: Any, module: Any) -> Iterable[str]:
        """What the engine cannot do with these settings, or must not.

        Looked at before any process is started, and again at set-up.

        Args:
            trainer: The trainer.
            module: What is to be fitted.

        Returns:
            One line each: the setting, its value, the remedy.
        """
        return ()

    def problems(self, trainer: Any, module: Any) -> list[str]:
        """`setting_problems` under the strategy's name.

        Args:
            trainer: The trainer.
            module: What is to be fitted.

        Returns:
            One line each.
        """
        name = getattr(self, "strategy_name", type(self).__name__)
        return [f"strategy {name}, {problem}" for problem in self.setting_problems(trainer, module)]

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        """As the engine's, but for weights that may hold an update without noise."""
        self.refuse_unnoised()
        super().save_checkpoint(*args, **kwargs)  # type: ignore[misc]

    def refuse_unnoised(self) -> None:
        """Before a checkpoint is written, also one after an exception.

        Raises:
            CheckpointError: An update failed at a moment when its noise may have been missing.
        """
        if getattr(getattr(self, "lightning_module", None), "update_failed", False):
            raise CheckpointError(
                "nothing saved: the last update failed, and the weights may hold one without noise; go on from the "
                "checkpoint before it"
            )

    def from_rank_zero(self, make: Callable[[], T]) -> T:
        """Call a function on rank 0 alone; every rank gets what it returned. A collective.

        Args:
            make: What to call.

        Returns:
            Its value.
        """
        return make()

    def on_rank_zero(self, make: Callable[[], T]) -> T | None:
        """Call a function on rank 0 alone, and keep its value there. A collective: if it raises, every rank does.

        Args:
            make: What to call.

        Returns:
            Its value on rank 0, None elsewhere.
        """
        return make()

    def max_over_ranks(self, values: Sequence[int]) -> list[int]:
        """The largest of each value over all ranks. A collective.

        Args:
            values: Integers, as many on every rank.

        Returns:
            As many.
        """
        return list(values)

    def any_rank(self, whether: bool) -> bool:
        """Whether something holds on any rank, where all must then do the same; else whether it does here.

        Args:
            whether: Whether it holds here.

        Returns:
            See above. A collective where the engine is `in_lockstep`.
        """
        return bool(self.max_over_ranks([whether])[0]) if self.in_lockstep else whether

    def all_equal(self, value: bytes) -> bool:
        """Whether all ranks have the same value. A collective.

        Args:
            value: Of any length; a hash of it is compared.

        Returns:
            Whether they have.
        """
        mark = int.from_bytes(hashlib.blake2b(value, digest_size=8).digest(), "big") >> 2
        largest, smallest = self.max_over_ranks([mark, -mark])
        return largest == -smallest

    def sum_over_ranks(self, values: Tensor) -> Tensor:
        """The sum over all ranks. A collective.

        Args:
            values: Of the same shape on every rank.

        Returns:
            The sum, on every rank.
        """
        return values

    def check_step(self, protected: Sequence[Tensor]) -> None:
        """Called as each step begins: can the engine reduce the gradients of these parameters?

        Args:
            protected: The parameters that train in this step.
        """

    @contextmanager
    def micro_batch(self, last: bool) -> Iterator[None]:
        """Around forward, norm pass and clipped backward of one micro-batch.

        Args:
            last: Whether it is the logical step's last one: the engine reduces gradients in it.
        """
        yield

    @contextmanager
    def norm_pass(self) -> Iterator[None]:
        """Around each backward for the norms, in which nothing may be reduced."""
        yield

    @contextmanager
    def _private_setup(self, trainer: Any) -> Iterator[None]:
        """Around an engine's own `setup`, in the order that must hold: instrument, engine, optimizers, noise hook."""
        if trainer.state.fn != TrainerFn.FITTING:
            yield
            return
        module: Any = trainer.lightning_module
        if not isinstance(module, PreparesPrivacy):
            raise ConfigurationError([
                f"strategy {type(self).__name__}: it trains a DPRCModule only, not a {type(module).__name__}"
            ])
        problems = self.problems(trainer, module)
        if problems:
            raise ConfigurationError(problems)
        module.prepare_privacy()
        try:
            yield
            check_schedulers(trainer.strategy.lr_scheduler_configs)
            self._install_noise(module, trainer.strategy.optimizers)
            if not self.all_equal(_settings_of(trainer.strategy.optimizers[0])):
                raise ConfigurationError([
                    "configure_optimizers: the ranks have different optimizers or settings of them, and their replicas "
                    "would drift apart; make them the same on every rank"
                ])
        except BaseException:
            module.abandon_privacy()
            raise

    def _release(self) -> None:
        module: Any = getattr(self, "lightning_module", None)
        if module is not None and hasattr(module, "release_privacy"):
            module.release_privacy()

    def _install_noise(self, module: Any, optimizers: list[Optimizer]) -> None:
        self._check_optimizer(module, optimizers)
        self.noise_hook.install(optimizers)

    def _check_optimizer(self, module: Any, optimizers: list[Optimizer]) -> None:
        """Optimizer, model and clipping must agree on what is trained."""
        if len(optimizers) != 1:
            raise ConfigurationError([
                f"configure_optimizers returned {len(optimizers)} optimizers: exactly one is supported; use its groups"
            ])
        if isinstance(optimizers[0], torch.optim.LBFGS):
            raise ConfigurationError([
                "configure_optimizers: LBFGS wants the loss several times in a step, and each look at it would need "
                "noise of its own; use an optimizer that steps once, such as SGD or AdamW"
            ])
        names = {id(p): name for name, p in module.named_parameters()}
        trained = {id(p) for p in module.protected_parameters()}
        stepped = {id(p) for p in trainable_of(optimizers[0])}
        problems = [
            f"configure_optimizers: parameter {names[i]!r} is trainable but not in the optimizer; add or freeze it"
            for i in sorted(trained - stepped, key=names.__getitem__)
        ] + [
            f"configure_optimizers: parameter {names.get(i, 'of no module')!r} is in the optimizer but its gradient is "
            "not clipped; it must be the module's own and trainable before fit begins"
            for i in stepped - trained
        ]
        if problems:
            raise ConfigurationError(problems)
