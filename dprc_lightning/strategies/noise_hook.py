"""The hook that adds the noise: a step pre-hook of the optimizers."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from dprc_lightning.errors import StepOrderError, UnclippedGradientError
from dprc_lightning.noise import NoiseStream, add_gaussian_noise
from dprc_lightning.shards import local_part, version


class NoiseHook:
    """Adds Gaussian noise as a step pre-hook of the optimizers, once per logical step and element.

    At that point every engine's ``p.grad`` is the final reduced gradient, or this rank's own shard of it.

    Guarantee: between `arm` and `finish` (one logical step) each parameter of the hooked optimizers gets one draw of
    N(0, std^2) per element, with std = sigma * C / E[B] on a gradient that is the sum of clipped gradients over E[B];
    whether its gradient is there or not, because that could depend on the data. A step that was not armed, or with a
    gradient of a parameter that the clipping does not know, raises before it changes anything. An optimizer that calls
    another one's step inside its own does not get noise twice.

    Args:
        stream: Where noise comes from; fresh operating-system entropy, never stored.
        is_given: Whether the stream came from outside, where nobody knows who else has its key: a test's.
    """

    def __init__(self, stream: NoiseStream, *, is_given: bool = False) -> None:
        self._stream = stream
        self._is_given = is_given
        self._std: float | None = None
        self._rehearses = False
        self._noised: set[int] = set()
        self._optimizers: list[Optimizer] = []
        self._partitions: list[Tensor] | None = None
        self._protected: set[int] = set()
        self._around: Callable[[], AbstractContextManager[None]] = nullcontext
        self._check: Callable[[], None] = lambda: None
        self._noisy: list[tuple[Tensor, Tensor | None, int | None]] = []
        self._running: list[Optimizer] = []
        self._sums: dict[int, int] = {}

    @property
    def is_test(self) -> bool:
        """Whether the noise is a fixed stream for tests, and so no noise at all."""
        return self._is_given or self._stream.is_test

    def install(self, optimizers: list[Optimizer], partitions: list[Tensor] | None = None) -> None:
        """Hook optimizers. Those that are hooked already are left alone.

        Args:
            optimizers: As `configure_optimizers` returned them, unwrapped.
            partitions: What an engine (ZeRO) steps in place of the parameters: each a flat part of many of them. It may
                show the optimizer one at a time.
        """
        self._partitions = partitions
        for optimizer in optimizers:
            if not any(optimizer is known for known in self._optimizers):
                optimizer.register_step_pre_hook(self._before_step)
                optimizer.register_step_post_hook(self._after_step)
                self._optimizers.append(optimizer)

    def arm(
        self,
        std: float,
        protected: Iterable[Tensor],
        sequence: int,
        around: Callable[[], AbstractContextManager[None]] = nullcontext,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Allow one logical step.

        Args:
            std: Standard deviation of the noise on ``p.grad``.
            protected: The parameters whose gradients are clipped in this step.
            sequence: The ledger's number of the step; no real noise depends on it.
            around: Makes a context for the noise, such as a clock's.
            check: Called before the noise; raises if the gradients are no longer those that were clipped.

        Raises:
            StepOrderError: The last step was armed but never finished.
            UnclippedGradientError: A parameter trains but no optimizer steps it.
        """
        if self._std is not None:
            raise StepOrderError("the last logical step was not finished; a failed step cannot be continued: restart")
        self._protected = {id(parameter) for parameter in protected}
        # Which parameters an engine's partitions are made of cannot be seen in them: `check_step` looks at that.
        lost = self._protected - {id(p) for optimizer in self._optimizers for p in trainable_of(optimizer)}
        if lost and self._partitions is None:
            raise UnclippedGradientError(
                f"{len(lost)} trainable parameters are not in the optimizer: they were unfrozen or added (LoRA, say) "
                "after fit began; add them by optimizer.add_param_group, or freeze them"
            )
        self._stream.begin_step(sequence)
        self._std = std
        self._around, self._check = around, check
        self._noised.clear()
        self._sums, self._running = {}, []

    def remember_partitions(self, gradients: Sequence[Sequence[Tensor]]) -> None:
        """Of partitions no version tells who has written to them: what they hold is summed up, bit by bit.

        Args:
            gradients: Of each partition, in the order of `install`: its gradient, in any number of parts.
        """
        assert self._partitions is not None
        self._sums = {id(p): _bit_sum(parts) for p, parts in zip(self._partitions, gradients, strict=True)}

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        """Inside, an optimizer may step on gradients that are all zero: torch makes it so have a state."""
        self._rehearses = True
        try:
            yield
        finally:
            self._rehearses = False

    def finish(self) -> None:
        """End the logical step.

        Raises:
            StepOrderError: An optimizer's parameters did not get their noise.
        """
        std, self._std = self._std, None
        due = self._partitions or [p for o in self._optimizers for p in trainable_of(o)]
        missing = sum(id(p) not in self._noised for p in due)
        if std is None or missing:
            raise StepOrderError(
                f"{missing} parameters got no noise in this logical step: every optimizer must step exactly once in it"
            )

    def check_may_step(self, its_turn: bool) -> None:
        """For an engine that a step too many would leave without gradients, or waiting, before the hook is called.

        Args:
            its_turn: Whether the library is about to make the logical step's update.

        Raises:
            StepOrderError: It is not, or the update was made already.
        """
        self._armed()
        if not its_turn or self._noised:
            raise StepOrderError(
                "optimizer.step() within a logical step, by a hook: it makes exactly one update, at its end; leave the "
                "step to DPRCModule"
            )

    def _armed(self) -> float:
        if self._std is None:
            raise UnclippedGradientError(
                "optimizer.step() outside of the library's training_step: its gradients would carry no noise; "
                "leave the step to DPRCModule"
            )
        return self._std

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._rehearses and not any(
            p.grad is not None and local_part(p.grad).any() for group in optimizer.param_groups for p in group["params"]
        ):
            return
        std = self._armed()
        if any(optimizer is running for running in self._running):
            raise StepOrderError(_TWICE)
        self._running.append(optimizer)
        if len(self._running) > 1:
            # A part of the update that is running, whose gradients have their noise.
            return
        everything = [p for group in optimizer.param_groups for p in group["params"]]
        self._check()
        known = self._protected if self._partitions is None else {id(p) for p in self._partitions}
        foreign = sum(p.grad is not None and id(p) not in known for p in everything)
        if foreign:
            raise UnclippedGradientError(
                f"{foreign} parameters of the optimizer have gradients that were not clipped: they were unfrozen or "
                "added within the step; freeze and unfreeze parameters between steps, before training_step"
            )
        if any(id(p) in self._noised for p in everything):
            raise StepOrderError(_TWICE)
        if self._partitions is not None and (not everything or any(p.grad is None for p in everything)):
            # With noise on nothing now, the engine's own step would find it done and update without.
            raise UnclippedGradientError(
                "optimizer.step() before the engine has put the gradients into its partitions: a step of one's own "
                "(on_before_optimizer_step, say); leave the step to DPRCModule"
            )
        if self._partitions is not None and any(
            p.grad is not None and self._sums.get(id(p)) != _bit_sum([p.grad]) for p in everything
        ):
            raise UnclippedGradientError(
                "the engine's partitions of the gradient were changed after they were clipped (safe_set_full_grad, a "
                "hook of the optimizer that comes before the noise, a second step); change them nowhere"
            )
        # One that was frozen after its backward has a gradient, and the optimizer applies it.
        due = [p for p in everything if (p.requires_grad or p.grad is not None) and id(p) not in self._noised]
        self._noised.update(id(p) for p in due)
        with self._around():
            add_gaussian_noise(due, std, self._stream)
        self._noisy = [(p, p.grad, None if p.grad is None else version(p.grad)) for p in everything]

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Between noise and update nothing may be added; the update itself leaves the gradients alone."""
        if not any(optimizer is running for running in self._running):
            # A rehearsal.
            return
        self._running.pop()
        if self._running:
            return
        noisy, self._noisy = self._noisy, []
        if any(p.grad is not grad or (grad is not None and version(grad) != seen) for p, grad, seen in noisy):
            raise UnclippedGradientError(
                "gradients were changed between the noise and the update (on_before_optimizer_step, or the optimizer "
                "itself, in place): what was added to them has no noise; change neither"
            )


_TWICE = (
    "optimizer.step() a second time within a logical step: it makes exactly one update, at its end; leave the step to "
    "DPRCModule"
)


def _bit_sum(parts: Sequence[Tensor]) -> int:
    """Sum of all elements' bits as integers: of the same elements it is the same, however they are cut and joined."""
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    return sum(int(part.contiguous().view(whole[part.element_size()]).sum(dtype=torch.int64)) for part in parts)


def trainable_of(optimizer: Optimizer) -> Iterator[Tensor]:
    """The parameters of an optimizer that train now."""
    return (p for group in optimizer.param_groups for p in group["params"] if p.requires_grad)
