"""`attach`: per-record clipping for any `torch.nn.Module`, without Lightning."""

import secrets
from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from dprc_lightning.clipping.plan import PlanRow, plan_row
from dprc_lightning.clipping.two_pass import clipped_backward, matmul_precision, norm_pass
from dprc_lightning.errors import InvalidArgumentError, StepOrderError, UnclippedGradientError, UnsupportedModuleError
from dprc_lightning.keys import derive
from dprc_lightning.layers import (
    ATTRIBUTE,
    Instrumentation,
    LayerRule,
    Mode,
    ParameterTracker,
    PassState,
    find_rule,
)
from dprc_lightning.sketch import GaussianProjections, Projections, cheaper_side

Estimator = Literal["auto", "exact", "hutchinson", "hutchpp"]
Projection = Literal["gaussian", "rademacher"]


class ClippingHandle:
    """What `attach` returns. See there."""

    def __init__(self, model: nn.Module, state: PassState, sketch_dim: int | None) -> None:
        self._model = model
        self._state = state
        self._sketch_dim = sketch_dim
        self._swapped: list[nn.Module] = []
        self._hooks: list[Any] = []
        self._own_index = 0
        self._explicit_steps = False
        self._factors: Tensor | None = None
        self._versions: list[int] = []
        self._buffers: dict[str, tuple[Tensor, int]] = {}

    @property
    def sketch_dim(self) -> int | None:
        """The k that the accountant must be told; None if every norm is exact."""
        return self._sketch_dim

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters whose gradients are protected."""
        return [tracker.parameter for tracker in self._state.trackers.values()]

    @property
    def clip_factors(self) -> Tensor | None:
        """Factors [B] of the last `clipped_backward`, float32: private data, for diagnostics only."""
        return self._factors

    def begin_step(self, index: int | None = None) -> None:
        """Start a logical step: draw its one projection P. Call it once, before the step's first micro-batch.

        Guarantee: all records of a logical batch share one P, whichever micro-batch or rank they are in; a P by
        position in the batch would not be covered by the accounting.

        Args:
            index: The step's number in the stream of projections; it must grow. Ranks that share a key and an index
                share P. Default: one more than the last.
        """
        self._check_attached()
        self._explicit_steps = True
        self._advance(index)
        self._versions = _versions(self.parameters)
        self._buffers = {name: (buffer, buffer._version) for name, buffer in self._model.named_buffers()}

    def norms(self, losses: Tensor) -> Tensor:
        """Norms of the per-record gradients, over all trainable parameters together. Call it right after the forward.

        Without any `begin_step`, each call is its own logical step with a fresh P: right only without micro-batches.

        Args:
            losses: [B], one per record, each a function of its own record alone.

        Returns:
            [B], float32. No parameter's ``.grad`` is touched.
        """
        self._check_attached()
        self._check_model()
        if not self._explicit_steps:
            self._advance(None)
        return norm_pass(self._state, losses)

    def clipped_backward(
        self,
        losses: Tensor,
        *,
        max_grad_norm: float,
        norms: Tensor | None = None,
        weights: Tensor | None = None,
        scale: float = 1.0,
        backward: Callable[[Tensor], object] = torch.Tensor.backward,
    ) -> None:
        """``p.grad += scale * sum_i weights_i * min(max_grad_norm / norms_i, 1) * grad_i``.

        Args:
            losses: [B], those given to `norms`.
            max_grad_norm: C.
            norms: What `norms` returned for these losses; computed here if None.
            weights: [B] in [0, 1]; 0 for dummies.
            scale: A public constant, such as 1 / expected batch size. The noise takes the same factor.
            backward: Runs the backward of a scalar; an engine's own goes here.
        """
        self._check_attached()
        if norms is None:
            norms = self.norms(losses)
        self._factors = clipped_backward(
            self._state,
            losses,
            norms,
            max_grad_norm=max_grad_norm,
            weights=weights,
            scale=scale,
            backward=backward,
        )

    def plan(self) -> list[PlanRow]:
        """One row per trainable parameter: how its norm is had, and at what cost."""
        return [plan_row(tracker, self._sketch_dim or 0) for tracker in self._state.trackers.values()]

    def detach(self) -> None:
        """Make the model exactly what it was. Safe to call twice."""
        for hook in self._hooks:
            hook.remove()
        for module in self._swapped:
            carried: Instrumentation = module.__dict__.pop(ATTRIBUTE)
            module.__class__ = carried.original_class
        self._hooks, self._swapped = [], []

    def _check_attached(self) -> None:
        if not self._swapped:
            raise StepOrderError("the handle is detached; call attach(model) again")

    def _check_model(self) -> None:
        """What must not have happened between the step's beginning and this norm pass."""
        precision = matmul_precision()
        if precision != "highest":
            raise UnsupportedModuleError(
                f"torch.set_float32_matmul_precision({precision!r}): what it takes off a norm is not accounted; "
                'set it to "highest"'
            )
        known = {id(parameter) for parameter in self.parameters}
        for name, parameter in self._model.named_parameters():
            if parameter.requires_grad and id(parameter) not in known:
                raise UnsupportedModuleError(
                    f"parameter {name!r} became trainable after attach(): its gradient would not be clipped; "
                    "freeze it, or detach and attach again"
                )
        if not self._explicit_steps:
            return
        if self._versions != _versions(self.parameters):
            raise StepOrderError(
                "the parameters changed since begin_step(): call begin_step() for every logical step, "
                "a projection must not serve two"
            )
        for name, (buffer, version) in self._buffers.items():
            if buffer._version != version:
                raise UnsupportedModuleError(
                    f"buffer {name!r} was changed by the forward: what it learns of the records is released without "
                    "noise; use a layer without running statistics"
                )

    def _advance(self, index: int | None) -> None:
        index = self._own_index + 1 if index is None else index
        self._state.projections.begin_step(index)
        self._own_index = index

    def _instrument(self, module: nn.Module, rule: LayerRule, trackers: dict[str, ParameterTracker]) -> None:
        original = type(module)
        module.__class__ = rule.instrumented_class(module)
        module.__dict__[ATTRIBUTE] = Instrumentation(self._state, trackers, original)
        self._swapped.append(module)

    def _guard(self, tracker: ParameterTracker) -> None:
        """Refuse every gradient that did not come through `clipped_backward` of a norm pass that saw the parameter."""
        tracked = tracker

        def watch(gradient: Tensor) -> None:
            self._state.watch(tracked, gradient)

        def check(parameter: Tensor) -> None:
            if self._state.mode is Mode.CLIP and tracker.contributions > 0:
                return
            # Not left behind for an optimizer step after a caught exception.
            parameter.grad = None
            if self._state.mode is Mode.CLIP:
                raise UnclippedGradientError(
                    f"parameter {tracker.name!r} got a gradient but the norm pass did not see it: its module ran under "
                    "reentrant checkpointing (set use_reentrant=False), or the parameter is used outside of its "
                    "module's forward (call the module, or freeze the parameter)"
                )
            raise UnclippedGradientError(
                f"parameter {tracker.name!r} got a gradient that was not clipped: call handle.clipped_backward(losses, "
                "...) instead of backward(), or handle.detach() first"
            )

        self._hooks.append(tracker.parameter.register_hook(watch))
        self._hooks.append(tracker.parameter.register_post_accumulate_grad_hook(check))


def attach(
    model: nn.Module,
    estimator: Estimator = "auto",
    sketch_dim: int = 32,
    projection: Projection = "gaussian",
    seed: int | None = None,
    *,
    key: bytes | None = None,
    projections: Projections | None = None,
) -> ClippingHandle:
    """Instrument a model in place, so that the norms of its per-record gradients can be had and clipped.

    Every module with a trainable parameter changes its class (and back, by `ClippingHandle.detach`); names, parameters,
    state dict, hooks and `isinstance` stay. Freeze what is not to be trained BEFORE. Under a DPRCModule the library
    calls this itself.

    Estimators: ``hutchinson`` sketches every matrix (vectors are exact); ``exact`` computes every norm; ``auto``
    computes a matrix [n0, n1] exactly where that takes no more memory than its sketch, n0 * n1 <= k * (n0 + n1), and
    sketches the others: a rule of the weight's shape alone, because a rule that looked at the batch would let one
    record decide how another one's norm is had.

    Args:
        model: Any module whose trainable parameters all lie in supported layers.
        estimator: See above.
        sketch_dim: k, columns of P.
        projection: Distribution of P's entries.
        seed: For tests only: a projection that somebody can predict can be cheated. Default: the operating system.
        key: 32 secret bytes for the projections, shared by all ranks; instead of `seed`.
        projections: A source of P of one's own, instead of `seed` and `key`; for tests.

    Returns:
        The handle.

    Raises:
        InvalidArgumentError: A value out of range, or an estimator or projection that is not available.
        UnsupportedModuleError: The trainable parameters that cannot be handled, each with the remedy; also a model
            that is attached already or compiled.
    """
    _check_arguments(estimator, sketch_dim, projection)
    # By name: importing the class would import the whole compiler.
    if type(model).__name__ == "OptimizedModule":
        raise UnsupportedModuleError(
            "torch.compile(model): a compiled graph would bake one pass into both; attach the model before compiling"
        )
    owners, problems = _find_owners(model)
    if problems:
        raise UnsupportedModuleError("; ".join(problems))
    trackers = _make_trackers(model, owners, estimator, sketch_dim)
    if not trackers:
        raise UnsupportedModuleError("the model has no trainable parameter: set requires_grad=True on what to train")
    if projections is None:
        if key is None:
            key = secrets.token_bytes(32) if seed is None else derive(bytes(32), "attach seed", seed)
        projections = GaussianProjections(key, sketch_dim)
    sketched = any(tracker.estimator != "exact" for tracker in trackers.values())
    handle = ClippingHandle(model, PassState(trackers, projections), sketch_dim if sketched else None)
    by_id = {id(tracker.parameter): tracker for tracker in trackers.values()}
    for module, rule in owners.values():
        local = {
            name: by_id[id(parameter)]
            for name, parameter in module._parameters.items()
            if parameter is not None and id(parameter) in by_id
        }
        handle._instrument(module, rule, local)
    for tracker in trackers.values():
        handle._guard(tracker)
    return handle


def _versions(parameters: list[nn.Parameter]) -> list[int]:
    return [parameter._version for parameter in parameters]


def _check_arguments(estimator: str, sketch_dim: int, projection: str) -> None:
    if estimator not in get_args(Estimator):
        raise InvalidArgumentError("estimator", estimator, f"expected one of {', '.join(get_args(Estimator))}")
    if estimator == "hutchpp":
        raise InvalidArgumentError("estimator", estimator, "not available in this version; use hutchinson")
    if projection not in get_args(Projection):
        raise InvalidArgumentError("projection", projection, f"expected one of {', '.join(get_args(Projection))}")
    if projection == "rademacher":
        raise InvalidArgumentError("projection", projection, "its accounting is not certified; use gaussian")
    if isinstance(sketch_dim, bool) or not isinstance(sketch_dim, int) or sketch_dim < 1:
        raise InvalidArgumentError("sketch_dim", sketch_dim, "expected an integer >= 1")


def _find_owners(model: nn.Module) -> tuple[dict[str, tuple[nn.Module, LayerRule]], list[str]]:
    """Modules that own a trainable parameter directly, with their rules; and what cannot be handled."""
    owners: dict[str, tuple[nn.Module, LayerRule]] = {}
    problems: list[str] = []
    for name, module in model.named_modules():
        norm = isinstance(module, nn.modules.batchnorm._NormBase)
        if norm and (isinstance(module, nn.modules.batchnorm._BatchNorm) or module.track_running_stats):
            # Frozen too: it mixes the records of a batch, or releases running statistics without noise.
            problems.append(
                f"module {name!r} ({type(module).__name__}): it normalises over the records of a batch, or keeps "
                "running statistics of them; replace it by a GroupNorm, LayerNorm or RMSNorm"
            )
            continue
        trainable = [n for n, p in module._parameters.items() if p is not None and p.requires_grad]
        if not trainable:
            continue
        label = name or type(model).__name__
        if ATTRIBUTE in module.__dict__:
            raise UnsupportedModuleError(f"module {label!r} is attached already; call detach() on the first handle")
        rule = find_rule(module)
        where = f"module {label!r} ({type(module).__name__})"
        freeze = "freeze it (requires_grad=False), or replace the module by a supported one"
        if rule is None:
            problems += [
                f"{where}, parameter {n!r}: no rule for per-record norms of this module; {freeze}" for n in trainable
            ]
            continue
        reason = rule.refuse(module)
        if reason is not None:
            problems.append(f"{where}, parameter {trainable[0]!r}: {reason}")
        problems += [
            f"{where}, parameter {n!r}: not a parameter of the layer's own forward; {freeze}"
            for n in trainable
            if n not in rule.kinds
        ]
        owners[name] = (module, rule)
    return owners, problems


def _make_trackers(
    model: nn.Module, owners: dict[str, tuple[nn.Module, LayerRule]], estimator: str, sketch_dim: int
) -> dict[str, ParameterTracker]:
    trackers: dict[str, ParameterTracker] = {}
    names = {id(p): n for n, p in model.named_parameters()}
    for module_name, (module, rule) in owners.items():
        for local, parameter in module._parameters.items():
            if parameter is None or not parameter.requires_grad:
                continue
            name = names[id(parameter)]
            if name in trackers and trackers[name].kind != rule.kinds[local]:
                raise UnsupportedModuleError(
                    f"parameter {name!r} is shared by layers of different kinds ({trackers[name].modules[0]!r} and "
                    f"{module_name!r}); give each its own, or freeze it"
                )
            if parameter.dtype not in (torch.float32, torch.float64):
                raise UnsupportedModuleError(
                    f"parameter {name!r} is {parameter.dtype}: rounding the sum of clipped gradients to half "
                    "precision is not accounted; keep trainable parameters in float32"
                )
            if parameter.grad is not None:
                raise UnclippedGradientError(
                    f"parameter {name!r} has a gradient from before attach(); call model.zero_grad() first"
                )
            if name not in trackers:
                trackers[name] = _make_tracker(name, parameter, rule.kinds[local], estimator, sketch_dim)
            tracker = trackers[name]
            tracker.modules.append(module_name or type(module).__name__)
            if local in rule.sides:
                tracker.side = rule.sides[local]  # type: ignore[assignment]
    return trackers


def _make_tracker(name: str, parameter: nn.Parameter, kind: str, estimator: str, sketch_dim: int) -> ParameterTracker:
    if kind == "vector":
        return ParameterTracker(name, parameter, "vector", "exact", 0)
    n0, n1 = parameter.shape
    exact = estimator == "exact" or (estimator == "auto" and n0 * n1 <= sketch_dim * (n0 + n1))
    return ParameterTracker(name, parameter, "matrix", "exact" if exact else "hutchinson", cheaper_side(n0, n1))
