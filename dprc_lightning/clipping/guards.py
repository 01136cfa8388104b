"""What must not happen to an attached model: checked before every norm pass, and whenever a gradient arrives."""

from typing import Any

from torch import Tensor, nn

from dprc_lightning.clipping.two_pass import matmul_precision
from dprc_lightning.errors import StepOrderError, UnclippedGradientError, UnsupportedModuleError
from dprc_lightning.layers import Mode, ParameterTracker, PassState, Shown
from dprc_lightning.layers.tracing import was_traced
from dprc_lightning.shards import version


class ModelGuard:
    """Raises where a gradient would be released that was not clipped, or something else that is made of records.

    Args:
        model: The attached model.
        state: Its pass state.
    """

    def __init__(self, model: nn.Module, state: PassState) -> None:
        self._model = model
        self._state = state
        self._versions: dict[str, int] = {}
        self._watches: dict[str, int] = {}
        self._of_engine: dict[str, int] = {}
        self._frozen: dict[str, Tensor] | None = None
        self._kept = self._kept_state()
        self._clipped: dict[str, tuple[Tensor | None, int]] = {}
        self._arrivals: list[str | None] = []

    def follow_shards(self) -> None:
        """An engine has put shards in the place of the parameters. What it gathers from them is no state of its own."""
        self._frozen = {name: p for name, p in self._model.named_parameters() if not p.requires_grad}
        self._watches = {}

    def follow_engine(self) -> None:
        """An engine has hung its reduction on the parameters, after our own hooks."""
        for name, tracker in self._state.trackers.items():
            self._of_engine[name] = _gradient_hooks(tracker.parameter) - 1

    def begin_step(self) -> None:
        """Remember parameters and buffers as they are."""
        self._clipped = {}
        self._arrivals = []
        self._versions = self._parameter_versions()
        self._kept = self._kept_state()

    def check(self, *, within_step: bool) -> None:
        """What must not have happened between the step's beginning and this norm pass.

        Args:
            within_step: Whether steps are begun by the caller; else every norm pass is a step of its own.

        Raises:
            UnsupportedModuleError: Low precision, a traced forward, an unknown trainable parameter, a changed buffer.
            UnclippedGradientError: A gradient hook that comes after ours.
            StepOrderError: The parameters changed.
        """
        precision = matmul_precision()
        if precision != "highest":
            raise UnsupportedModuleError(
                f"torch.set_float32_matmul_precision({precision!r}): what it takes off a norm is not accounted; "
                'set it to "highest"'
            )
        if was_traced():
            raise UnsupportedModuleError(
                "torch.compile of an attached model: it would bake one of the two passes into its graph; train without "
                "compilation"
            )
        known = {id(p) for t in self._state.trackers.values() for p in (t.parameter, t.stand_in)}
        for name, parameter in self._model.named_parameters():
            # A module that did not run shows its whole weight all the same, and no stand-in was met.
            gathered = self._state.shown is not Shown.ITSELF and _plain(name) in self._state.trackers
            if parameter.requires_grad and id(parameter) not in known and not gathered:
                raise UnsupportedModuleError(
                    f"parameter {name!r} became trainable after attach() or begin_step(): its gradient would not be "
                    "clipped; freeze it, or call begin_step() between the change and the forward"
                )
        self.check_hooks()
        if within_step and self._versions != self._parameter_versions():
            raise StepOrderError(
                "the parameters changed since begin_step(): call begin_step() for every logical step, "
                "a projection must not serve two"
            )
        self.check_kept()
        if not within_step:
            self._kept = self._kept_state()

    def check_kept(self) -> None:
        """What is released beside the trained parameters must be what it was when the step began.

        Raises:
            UnsupportedModuleError: A buffer or a frozen parameter has changed.
        """
        now = self._kept_state()
        for name, (tensor, writes) in self._kept.items():
            if name in now and (now[name][0] is not tensor or now[name][1] != writes):
                raise UnsupportedModuleError(
                    f"buffer or frozen parameter {name!r} was changed within the step: what it learns of the records "
                    "is released without noise; use a layer without running statistics, and change it between steps"
                )

    @property
    def remembers(self) -> bool:
        """Whether the gradients of the last backward are known."""
        return bool(self._clipped)

    def forget_gradients(self) -> None:
        """A clipped backward begins."""
        self._clipped = {}
        self._arrivals.append(None)

    @property
    def arrivals(self) -> list[str | None]:
        """Names of the parameters in the order in which gradients came in this step; None where a backward begins."""
        return self._arrivals

    def remember_gradients(self) -> None:
        """A clipped backward, and what its engine does with the gradients, is over."""
        self._clipped = self._gradients()

    def check_gradients(self) -> None:
        """Since then nobody may have changed them.

        Raises:
            UnclippedGradientError: Somebody has.
        """
        now = self._gradients()
        for name, (gradient, writes) in self._clipped.items():
            if name in now and not (self._is_same(now[name][0], gradient) and now[name][1] == writes):
                raise UnclippedGradientError(
                    f"the gradient of parameter {name!r} was changed after it was clipped (on_after_backward, or a "
                    "hook of the optimizer that comes before the noise); change it nowhere"
                )

    def _is_same(self, now: Tensor | None, before: Tensor | None) -> bool:
        if now is before:
            return True
        if self._state.shown is not Shown.VIEWS or now is None or before is None:
            return False
        # The same part of the flat gradient under a new name, which each forward may give it.
        return now.data_ptr() == before.data_ptr() and now.shape == before.shape

    def _gradients(self) -> dict[str, tuple[Tensor | None, int]]:
        found = {}
        for name, tracker in self._state.trackers.items():
            gradient = tracker.parameter.grad
            found[name] = (gradient, -1 if gradient is None else version(gradient))
        return found

    def _kept_state(self) -> dict[str, tuple[Tensor, int]]:
        """What is released beside the trained parameters."""
        frozen = self._frozen
        if frozen is None:
            frozen = {name: p for name, p in self._model.named_parameters() if not p.requires_grad}
        return {name: (tensor, version(tensor)) for name, tensor in (*self._model.named_buffers(), *frozen.items())}

    def _parameter_versions(self) -> dict[str, int]:
        trackers = self._state.trackers
        return {name: version(t.parameter) for name, t in trackers.items() if t.parameter.requires_grad}

    def check_hooks(self) -> None:
        """No hook may change a gradient after ours looked at it, or step on it before the noise is in.

        Raises:
            UnclippedGradientError: There is one.
        """
        for name, watch in self._watches.items():
            tracker = self._state.trackers[name]
            # An engine that shards calls the hooks of the shard itself, with the sum over all ranks.
            of_shard = _has_hooks(tracker.parameter) if tracker.stand_in is not None else False
            parameter = tracker.parameter if tracker.stand_in is None else tracker.stand_in
            hooks = parameter._backward_hooks or {}
            others = _gradient_hooks(parameter) > 1 + self._of_engine.get(name, 0)
            if of_shard or others or next(reversed(hooks), None) != watch:
                raise UnclippedGradientError(
                    f"parameter {name!r} has a gradient hook (register_hook, register_post_accumulate_grad_hook: an "
                    "optimizer in the backward, say) that could change or use its gradient before the noise is in it; "
                    "remove it"
                )

    def watch(self, tracker: ParameterTracker, stand_in: Tensor | None = None) -> list[Any]:
        """Refuse every gradient that did not come through `clipped_backward` of a norm pass that saw the parameter.

        Args:
            tracker: The parameter.
            stand_in: Where its gradients arrive, if not at itself.

        Returns:
            Handles of the hooks.
        """

        def before(gradient: Tensor) -> None:
            self._state.watch(tracker, gradient)

        def after(parameter: Tensor) -> None:
            try:
                self._refuse_unseen(tracker)
            except UnclippedGradientError:
                # Not left behind for an optimizer step after a caught exception.
                parameter.grad = None
                raise
            self._arrivals.append(tracker.name)

        arriving = tracker.parameter if stand_in is None else stand_in
        watching = arriving.register_hook(before)
        self._watches[tracker.name] = watching.id
        return [watching, arriving.register_post_accumulate_grad_hook(after)]

    def watch_view(self, tracker: ParameterTracker, view: Tensor) -> None:
        """The same for gradients that pass through a view of a flat parameter, whose own hooks are its engine's.

        Args:
            tracker: The parameter.
            view: What its module has found in its place; the hook goes with it.
        """

        def before(gradient: Tensor | None) -> None:
            self._refuse_unseen(tracker)
            if gradient is None:
                # Another use of the weight, through another view, has the sum of both.
                return
            self._arrivals.append(tracker.name)
            tracker.passed(gradient)

        view.register_hook(before)

    def watch_slice(self, tracker: ParameterTracker) -> Any:
        """Refuse every gradient of this rank's slice of a parameter: modules never see it.

        Args:
            tracker: The parameter.

        Returns:
            Handle of the hook.
        """

        def before(gradient: Tensor) -> None:
            raise UnclippedGradientError(
                f"parameter {tracker.name!r} got a gradient past its module's forward (a penalty on the weights): its "
                "norm was not taken; call the module, or freeze it"
            )

        return tracker.parameter.register_hook(before)

    def _refuse_unseen(self, tracker: ParameterTracker) -> None:
        if self._state.mode is Mode.CLIP and tracker.contributions > 0:
            return
        if self._state.mode is Mode.CLIP:
            raise UnclippedGradientError(
                f"parameter {tracker.name!r} got a gradient but the norm pass did not see it: its module ran under "
                "reentrant checkpointing (set use_reentrant=False), or the parameter is used outside of its module's "
                "forward (call the module, or freeze the parameter)"
            )
        raise UnclippedGradientError(
            f"parameter {tracker.name!r} got a gradient that was not clipped: call handle.clipped_backward(losses, "
            "...) instead of backward(), or handle.detach() first"
        )


def _plain(name: str) -> str:
    """A parameter's name without the wrappers that an engine (FSDP1) has put around modules since."""
    return name.replace("_fsdp_wrapped_module.", "")


def _has_hooks(parameter: Tensor) -> bool:
    return bool(parameter._backward_hooks) or _gradient_hooks(parameter) > 0


def _gradient_hooks(parameter: Tensor) -> int:
    return len(getattr(parameter, "_post_accumulate_grad_hooks", None) or {})
