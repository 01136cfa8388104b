"""What `attach` returns: the steps, passes and guards of one instrumented model."""

from collections.abc import Callable, MutableMapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from dprc_lightning.clipping.guards import ModelGuard
from dprc_lightning.clipping.instrument import Owners, find_owners, frozen_norms, make_trackers
from dprc_lightning.clipping.plan import PlanRow, plan_row
from dprc_lightning.clipping.two_pass import (
    HALF_NORM_SLACK,
    AnyRank,
    Around,
    OnNonfinite,
    Unused,
    accumulate_in_float32,
    check_losses,
    clipped_backward,
    idle_isolation_pass,
    isolation_pass,
    norm_pass,
)
from dprc_lightning.errors import (
    InvalidArgumentError,
    LossShapeError,
    StepOrderError,
    UnsupportedModuleError,
)
from dprc_lightning.layers import (
    ATTRIBUTE,
    Instrumentation,
    LayerRule,
    ParameterTracker,
    PassState,
    Shown,
    restore_class,
)
from dprc_lightning.layers.chunked_mlp import ChunkedMLPRule, refuse_whole_factors
from dprc_lightning.layers.embedding import EmbeddingRule, batch_size_of
from dprc_lightning.offload import CheckpointOffload
from dprc_lightning.sketch import PROJECTIONS, KeyedProjections, Projections, not_kept

ISOLATION_CHECKS = 3
"""Micro-batches with at least two records that are looked at in any case: a batch may be in order by chance."""


@dataclass(frozen=True)
class Settings:
    """As `attach` was told."""

    estimator: str
    sketch_dim: int
    projection: str
    unused: Unused
    on_nonfinite: OnNonfinite
    norm_slack: float | None
    check_isolation: bool
    projection_memory: float | None
    mlp_chunk: int | None
    lean_norms: bool
    offload_checkpoints: bool


class ClippingHandle:
    """What `attach` returns. See there."""

    def __init__(self, model: nn.Module, projections: Projections, settings: Settings) -> None:
        self._model = model
        self._settings = settings
        self._state = PassState({}, projections)
        self._swapped: list[nn.Module] = []
        self._hooks: list[Any] = []
        self._watching: list[Any] = []
        self._own_index = 0
        self._explicit_steps = False
        self._factors: Tensor | None = None
        self._dropped = 0
        self._isolation_left = ISOLATION_CHECKS
        self._isolated: set[int] = set()
        self._guard = ModelGuard(model, self._state)
        self._taken: MutableMapping[Tensor, Tensor] = WeakTensorKeyDictionary()
        self._streamed: frozenset[str] = frozenset()
        owners = find_owners(model)
        trackers = make_trackers(model, owners, settings.estimator, settings.sketch_dim, {})
        rule = None if settings.mlp_chunk is None else ChunkedMLPRule(settings.mlp_chunk)
        self._mlps = {} if rule is None else rule.find(model)
        if settings.mlp_chunk is not None:
            refuse_whole_factors(settings.mlp_chunk, self._mlps.values(), trackers.values())
        self._offload = CheckpointOffload(model) if settings.offload_checkpoints else None
        # Nothing is refused from here on: the model is not left half instrumented.
        self._add(owners, trackers)
        for name, module in self._mlps.items():
            assert rule is not None
            self._instrument(module, name, rule, {})
        self._state.lean_norms = settings.lean_norms
        for name, module, norm_rule in frozen_norms(model) if settings.lean_norms else ():
            self._instrument(module, name, norm_rule, {})
        sketched = any(tracker.estimator != "exact" for tracker in self._state.trackers.values())
        self._sketch_dim = settings.sketch_dim if sketched else None

    @property
    def sketch_dim(self) -> int | None:
        """The k that the accountant must be told; None if every norm is exact."""
        return self._sketch_dim

    @property
    def projection(self) -> str:
        """The distribution of P's entries, which the accountant must be told as well."""
        return self._settings.projection

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters whose gradients are protected: those that train now."""
        return [t.parameter for t in self._state.trackers.values() if t.parameter.requires_grad]

    @property
    def clip_factors(self) -> Tensor | None:
        """Factors [B] of the last `clipped_backward`, float32: private data, for diagnostics only."""
        return self._factors

    @property
    def dropped(self) -> int:
        """How many records the last `clipped_backward` left out because their norm is not finite: private data."""
        return self._dropped

    @property
    def norm_slack(self) -> float:
        """By how much the clipping threshold is lowered, as a share of it; known after the first norm pass."""
        if self._settings.norm_slack is not None:
            return self._settings.norm_slack
        return HALF_NORM_SLACK if self._state.half_precision else 0.0

    def begin_step(self, index: int | None = None) -> None:
        """Start a logical step: draw its one projection P. Call it once, before the step's first forward.

        Guarantee: all records of a logical batch share one P, whichever micro-batch or rank they are in; a P by
        position in the batch would not be covered by the accounting. Parameters may be frozen and unfrozen between
        steps, by a plan that does not look at the data: those that train in this step are clipped together.

        Args:
            index: The step's number in the stream of projections; it must grow. Ranks that share a key and an index
                share P. Default: one more than the last.
        """
        self._check_attached()
        if self._offload is not None:
            self._offload.check()
        self._explicit_steps = True
        self._advance(index)
        self._refresh()
        self._guard.begin_step()
        self._taken.clear()

    def follow_shards(self) -> None:
        """Called once an engine (FSDP) has put shards in the place of the parameters, before the optimizer is made.

        `parameters` are then this rank's shards. The norms are still those of the whole gradient: a module that runs
        has the whole weight, and each rank sees its own records' whole gradients.
        """
        self._stop_watching()
        for module in self._swapped:
            for local, tracker in module.__dict__[ATTRIBUTE].trackers.items():
                shard = module._parameters[local]
                assert shard is not None
                tracker.parameter = shard
        self._state.shown = Shown.WHOLE
        self._state.on_stand_in = lambda tracker, whole: self._watching.extend(self._guard.watch(tracker, whole))
        self._guard.follow_shards()

    def follow_views(self, flat_parameters: Sequence[Tensor]) -> None:
        """Called once an engine (FSDP1) has put the parameters into flat ones, before the optimizer is made.

        The parameters are then this rank's slices of a shard. A module that runs sees a view of the flat parameter,
        another one in each forward: each is watched, and nothing may come to a slice by itself.

        Args:
            flat_parameters: All of them, also those with frozen parameters alone.
        """
        self._stop_watching()
        self._watching += [self._guard.watch_slice(tracker) for tracker in self._state.trackers.values()]
        self._state.shown = Shown.VIEWS
        self._state.on_stand_in = self._guard.watch_view
        self._state.flat_parameters = list(flat_parameters)
        self._guard.follow_shards()

    def _stop_watching(self) -> None:
        for hook in self._watching:
            hook.remove()
        self._watching.clear()

    def follow_engine(self) -> None:
        """Called once an engine (ZeRO) has hung its reduction on the parameters: these hooks are no strangers."""
        self._guard.follow_engine()

    def norms(self, losses: Tensor, around: Around = nullcontext, any_rank: AnyRank = bool) -> Tensor:
        """Norms of the per-record gradients, over all trainable parameters together. Call it right after the forward.

        Without any `begin_step`, each call is its own logical step with a fresh P: right only without micro-batches.

        Args:
            losses: [B], one per record, each a function of its own record alone.
            around: Makes an engine's context for each backward that runs here.
            any_rank: Whether something holds on any rank, for an engine whose backwards are collectives: all ranks then
                run as many, also of those that look whether records are kept apart.

        Returns:
            [B], float32. No parameter's ``.grad`` is touched.
        """
        self._check_attached()
        self._guard.check(within_step=self._explicit_steps)
        if not self._explicit_steps:
            self._advance(None)
        self._check_isolation(losses, around, any_rank, before=True)
        norms = norm_pass(self._state, losses, self._settings.unused, around)
        self._check_isolation(losses, around, any_rank, before=False)
        self._taken[losses] = norms
        return norms

    def _check_isolation(self, losses: Tensor, around: Around, any_rank: AnyRank, *, before: bool) -> None:
        """The first micro-batches, and the first one of each size that another dimension of a layer happens to have."""
        if not self._settings.check_isolation or losses.ndim != 1 or (before and self._isolation_left == 0):
            return
        odd = self._state.coincidence and len(losses) not in self._isolated
        due = len(losses) >= 2 and (before or odd)
        if not any_rank(due):
            return
        if due:
            isolation_pass(self._state, losses, around)
            self._isolated.add(len(losses))
        else:
            idle_isolation_pass(self._state, losses, around)
        self._isolation_left = max(self._isolation_left - 1, 0)

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

        The gradient of a bfloat16 parameter is float32, until the noise is in it (`add_gaussian_noise`).

        Args:
            losses: [B], those given to `norms`.
            max_grad_norm: C.
            norms: What `norms` returned for these very losses (or larger ones); taken here if None.
            weights: [B] in [0, 1]; 0 for dummies.
            scale: A public constant, such as 1 / expected batch size. The noise takes the same factor.
            backward: Runs the backward of a scalar, ``losses.sum()``; an engine's own goes here. The layers apply the
                factors.
        """
        self._check_attached()
        check_losses(losses)
        self._guard.check_hooks()
        norms = self._norms_of(losses, norms)
        self._taken.pop(losses, None)
        for parameter in self.parameters:
            accumulate_in_float32(parameter)
        self._dropped = 0
        self._guard.forget_gradients()
        self._factors = clipped_backward(
            self._state,
            losses,
            norms,
            max_grad_norm=max_grad_norm,
            weights=weights,
            scale=scale,
            backward=backward,
            on_nonfinite=self._settings.on_nonfinite,
            norm_slack=self._settings.norm_slack,
        )
        if not self._guard.remembers:
            self._guard.remember_gradients()
        left_out = ~torch.isfinite(norms)
        self._dropped = int((left_out if weights is None else left_out & (weights > 0)).sum())

    def _norms_of(self, losses: Tensor, given: Tensor | None) -> Tensor:
        """The norms of these losses: a clip factor bounds nothing if it was made for others."""
        taken = self._taken.get(losses)
        if given is None:
            return self.norms(losses) if taken is None else taken
        if taken is None:
            raise StepOrderError(
                "clipped_backward(losses, norms=...): norms(losses) was not called with these very losses, or they "
                "were clipped already; call it once for each forward, and clip the same tensor once"
            )
        if given.shape != taken.shape:
            raise LossShapeError(f"norms of shape {tuple(given.shape)} for losses of shape {tuple(losses.shape)}")
        if given is not taken:
            smaller = ~(given >= taken * (1.0 - 1e-6)) if given.dtype is torch.float32 else torch.ones_like(taken)
            if bool(smaller.where(taken.isfinite(), given.isfinite()).any()):
                raise InvalidArgumentError("norms", "<private>", "expected float32, none smaller than norms() returned")
        return given

    @property
    def named_parameters(self) -> dict[str, nn.Parameter]:
        """All that were attached, by their names: themselves, or this rank's shards of them."""
        return {name: tracker.parameter for name, tracker in self._state.trackers.items()}

    @property
    def chunked_mlps(self) -> dict[str, nn.Module]:
        """The modules that run some tokens at a time (mlp_chunk), by their names."""
        return dict(self._mlps)

    @property
    def arrivals(self) -> list[str | None]:
        """Names of the parameters in the order in which clipped gradients came in this step; None: a backward began."""
        return self._guard.arrivals

    def remember_gradients(self) -> None:
        """The backward is over, and whatever its engine does with the gradients; hooks of others may follow.

        `clipped_backward` does it at its end; an engine whose own backward calls such hooks does it before them.
        """
        self._guard.remember_gradients()

    def check_step(self) -> None:
        """Before the next backward or the noise: gradients, buffers, frozen parameters are as the clipping left them.

        In a loop of one's own it is for the caller to use; a DPRCModule calls it. An UnclippedGradientError or an
        UnsupportedModuleError names what has changed.
        """
        self._guard.check_gradients()
        self._guard.check_kept()

    def check_kept(self) -> None:
        """Buffers and frozen parameters are what they were when the step began; else an UnsupportedModuleError."""
        self._guard.check_kept()

    def plan(self) -> list[PlanRow]:
        """One row per trainable parameter: how its norm is had, and at what cost."""
        k, projection = self._sketch_dim or 0, self._settings.projection
        return [plan_row(tracker, k, projection, self._streamed) for tracker in self._state.trackers.values()]

    def detach(self) -> None:
        """Make the model exactly what it was. Safe to call twice."""
        for hook in (*self._hooks, *self._watching):
            hook.remove()
        if self._offload is not None:
            self._offload.remove()
        for module in self._swapped:
            carried: Instrumentation = module.__dict__.pop(ATTRIBUTE)
            restore_class(module, carried.original_class)
        for tracker in self._state.trackers.values():
            if tracker.parameter.dtype is torch.bfloat16 and tracker.parameter.grad is None:
                tracker.parameter.grad_dtype = tracker.parameter.dtype
        self._hooks, self._watching, self._swapped = [], [], []

    def _check_attached(self) -> None:
        if not self._swapped:
            raise StepOrderError("the handle is detached; call attach(model) again")

    def _advance(self, index: int | None) -> None:
        index = self._own_index + 1 if index is None else index
        self._state.projections.begin_step(index)
        self._state.step += 1
        self._own_index = index

    def _refresh(self) -> None:
        """Instrument what became trainable since the last step."""
        if self._state.shown is not Shown.ITSELF:
            # An engine's whole copies are no new parameters; it reduces what trained when it sharded the model.
            return
        known = {id(tracker.parameter): name for name, tracker in self._state.trackers.items()}
        fresh = [n for n, p in self._model.named_parameters() if p.requires_grad and id(p) not in known]
        if not fresh:
            return
        if self._state.shown is Shown.VIEWS:
            raise UnsupportedModuleError(
                f"parameter {fresh[0]!r} was unfrozen after it was sharded into a flat parameter; unfreeze it before "
                "training begins"
            )
        owners = find_owners(self._model, known)
        settings = self._settings
        trackers = make_trackers(
            self._model, owners, settings.estimator, settings.sketch_dim, known=self._state.trackers
        )
        sketched = [name for name, tracker in trackers.items() if tracker.estimator != "exact"]
        if sketched and self._sketch_dim is None:
            raise UnsupportedModuleError(
                f"parameter {sketched[0]!r} was unfrozen and needs a sketch, but the run is accounted with exact norms "
                "alone; set estimator=exact, or let one sketched parameter train from the start"
            )
        self._add(owners, trackers)

    def _add(self, owners: Owners, trackers: dict[str, ParameterTracker]) -> None:
        """Swap the classes of the owners, and guard their new parameters."""
        self._state.trackers.update(trackers)
        self._share_memory()
        by_id = {id(tracker.parameter): tracker for tracker in self._state.trackers.values()}
        names = {id(module): name for name, (module, _) in owners.items()}
        for module, rule in owners.values():
            local = {
                name: by_id[id(parameter)]
                for name, parameter in module._parameters.items()
                if parameter is not None and id(parameter) in by_id
            }
            self._instrument(module, names[id(module)], rule, local)
        for tracker in trackers.values():
            self._watching += self._guard.watch(tracker)
            accumulate_in_float32(tracker.parameter)

    def _share_memory(self) -> None:
        """Which projections are kept for a step. What joins later comes last, so it changes nothing for the others."""
        settings = self._settings
        stored_bytes, limit = PROJECTIONS[settings.projection].stored_bytes, settings.projection_memory
        sizes = {
            name: stored_bytes(rows, settings.sketch_dim)
            for tracker in self._state.trackers.values()
            for name, rows in tracker.draws.items()
        }
        self._streamed = not_kept(sizes, None if limit is None else int(limit * 2**30))
        if isinstance(self._state.projections, KeyedProjections):
            self._state.projections.stream(self._streamed)

    def _instrument(self, module: nn.Module, name: str, rule: LayerRule, trackers: dict[str, ParameterTracker]) -> None:
        if ATTRIBUTE in module.__dict__:
            original = module.__dict__[ATTRIBUTE].original_class
        else:
            original = type(module)
            module.__class__ = rule.instrumented_class(module)
            self._swapped.append(module)
            if isinstance(rule, EmbeddingRule):
                self._watch_batch_size(name)
        module.__dict__[ATTRIBUTE] = Instrumentation(self._state, name or original.__name__, rule, trackers, original)

    def _watch_batch_size(self, embedding: str) -> None:
        """Let an embedding know the number of records, where its own ids come once for all."""
        hints = self._state.batch_hints

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            found = batch_size_of([*args, *kwargs.values()])
            hints.append(hints[-1] if found is None and hints else found)

        def after(*_: Any) -> None:
            hints.pop()

        parts = embedding.split(".")
        for depth in range(len(parts)):
            parent = self._model.get_submodule(".".join(parts[:depth]))
            # Only while the parent runs: the next micro-batch has another size.
            self._hooks.append(parent.register_forward_pre_hook(before, with_kwargs=True))
            self._hooks.append(parent.register_forward_hook(after, always_call=True))
