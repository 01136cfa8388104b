"""``dprc bench step --simulate``: peak memory and FLOPs of one step of a model of any size, without its memory.

Everything lies on torch's meta device: the very layers, Functions and autograd graphs of a step run, and each operation
gives tensors of the right shape whose storages have a size and no memory. `CategorisedMemory` counts them, as
`LiveMemory` counts those of real tensors; `compare` runs both. What differs from a real step:

* P has its shape and no numbers (`ShapedProjections`). What the private step reads of its own numbers is left out: the
  clip factors are ones, and the findings of the clipped backward are not looked at.
* Attention is the flash kernel that torch takes on a CPU; torch has no such choice for the meta device and would make
  matrices of tokens by tokens.
* Rules that try a module's forward on numbers have done so on the same model with stand-ins for its weights.
"""

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dprc_lightning.bench.categories import (
    ACTIVATIONS,
    GRADIENTS,
    PARAMETERS,
    PROJECTIONS,
    SKETCHES,
    CategorisedMemory,
)
from dprc_lightning.bench.memory import LiveMemory
from dprc_lightning.bench.meta import META, Operations, put, replaced, without_numbers
from dprc_lightning.bench.shaped import ShapedProjections
from dprc_lightning.bench.step import NON_PRIVATE, StepShape
from dprc_lightning.clipping import ClippingHandle, attach, causal_lm_loss, causal_lm_losses
from dprc_lightning.clipping.instrument import find_owners, frozen_norms
from dprc_lightning.errors import InvalidArgumentError
from dprc_lightning.layers import ATTRIBUTE, restore_class
from dprc_lightning.offload import CheckpointOffload
from dprc_lightning.plan.shapes import hugging_face_model

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
HALF_GRADIENTS = "non-private, bfloat16 gradients"


@dataclass(frozen=True)
class SimulatedStep:
    """A model, its batch, and how a step runs.

    Attributes:
        model: A folder with config.json, or a Hugging Face name; None for the small Llama of `StepShape`.
        tokens: T.
        records: B.
        lora: Rank of LoRA on every linear layer but the head, all else frozen; None to train everything.
        checkpointing: Whether each decoder layer's activations are recomputed (non-reentrant).
        dtype: Of the parameters, LoRA's too: ``float32`` or ``bfloat16``.
        estimator: See `dprc_lightning.clipping.attach`.
        sketch_dim: k.
        projection: Distribution of P's entries; all of P is kept for the step (projection_memory=None).
        chunked_head: Whether head and loss run in blocks of tokens (`dprc_lightning.clipping.causal_lm_losses`).
        mlp_chunk: See `dprc_lightning.clipping.attach`.
        offload_checkpoints: Likewise.
        shape: The small Llama; its own tokens, records and checkpointing are not looked at.
    """

    model: str | None = None
    tokens: int = 512
    records: int = 1
    lora: int | None = None
    checkpointing: bool = False
    dtype: str = "float32"
    estimator: str = "hutchinson"
    sketch_dim: int = 32
    projection: str = "gaussian"
    chunked_head: bool = False
    mlp_chunk: int | None = None
    offload_checkpoints: bool = False
    shape: StepShape = field(default_factory=StepShape)

    def __post_init__(self) -> None:
        """Refuse what cannot be built."""
        for name in ("tokens", "records", "sketch_dim"):
            if getattr(self, name) < 1:
                raise InvalidArgumentError(f"--{name}", getattr(self, name), "expected an integer >= 1")
        if self.dtype not in DTYPES:
            raise InvalidArgumentError("--dtype", self.dtype, f"expected one of {', '.join(DTYPES)}")
        if self.lora is not None and self.model is None:
            raise InvalidArgumentError("--lora", self.lora, "the small Llama has none; name a model with --model")

    @property
    def sketch_name(self) -> str:
        """What its private row is called."""
        return self.estimator if self.estimator == "exact" else f"{self.estimator} k={self.sketch_dim}"


def simulate(
    step: SimulatedStep,
    progress: Callable[[str], None] = lambda _: None,
    kinds: Sequence[str] | None = None,
    *,
    later: bool = False,
) -> list[dict[str, Any]]:
    """The non-private step and the private one, with the same settings.

    The gradients of bfloat16 parameters are float32 on both sides, because a private step sums them so; what bfloat16
    would save shows in a row of its own.

    Args:
        step: The setting.
        progress: Called with what is about to run.
        kinds: Which of the steps, the first of them the base of the ratios; None for all.
        later: Whether an earlier micro-batch of the logical step has left gradients and P.

    Returns:
        A row for each kind of step. Peak bytes: as `CategorisedMemory` counts them, and what they are made of; without
        optimizer. FLOPs: of matrix products, and beside them those of attention, which torch's counter leaves out on a
        CPU: 4 (forward) and 10 (backward) per query, key and channel of a head, half of it where causal, times the
        calls that there were.
    """
    if kinds is None:
        kinds = [NON_PRIVATE, *([HALF_GRADIENTS] if step.dtype == "bfloat16" else []), step.sketch_name]
    rows: list[dict[str, Any]] = []
    for kind in kinds:
        progress(f"simulating T={step.tokens}: {kind}")
        began = time.process_time()
        found = _simulate_one(step, kind, later)
        base = rows[0] if rows else found
        ratios = {f"{name}_ratio": found[name] / base[name] for name in ("peak_bytes", "flops", "all_flops")}
        rows.append({"step": kind, "tokens": step.tokens, **found, **ratios, "seconds": time.process_time() - began})
    return rows


def compare(step: SimulatedStep, progress: Callable[[str], None] = lambda _: None) -> list[dict[str, Any]]:
    """The same rows, each with the peak of a step on real tensors of this machine, with random weights, on the CPU.

    Args:
        step: The setting; the real step takes the memory that it says.
        progress: Called with what is about to run.

    Returns:
        The rows of `simulate`, with ``real_bytes``, ``real_host_bytes``, and ``difference``: simulated / real - 1.

    Raises:
        InvalidArgumentError: The machine has not the memory.
    """
    rows = simulate(step, progress)
    largest, free = max(row["peak_bytes"] + row["host_bytes"] for row in rows), _free_memory()
    if free is not None and largest > 0.9 * free:
        raise InvalidArgumentError(
            "--compare",
            True,
            f"the step at T={step.tokens} takes {largest / 2**30:.1f} GiB, and this machine has "
            f"{free / 2**30:.1f} GiB free; lower --tokens, or leave it out",
        )
    for row in rows:
        progress(f"running T={step.tokens}: {row['step']} on real tensors")
        live = run_real(step, row["step"])
        row["real_bytes"], row["real_host_bytes"] = live.peak, live.host_peak
        row["difference"] = row["peak_bytes"] / live.peak - 1.0
    return rows


def _free_memory() -> int | None:
    """Bytes that a new process may use; None where the system does not say."""
    told = Path("/proc/meminfo")
    found = re.search(r"^MemAvailable: +(\d+) kB$", told.read_text(), re.MULTILINE) if told.is_file() else None
    return None if found is None else 1024 * int(found[1])


def run_real(step: SimulatedStep, kind: str) -> LiveMemory:
    """A first step on real tensors, all of the production code as it is.

    Args:
        step: The setting.
        kind: One of the steps that `simulate` returned.

    Returns:
        Its live memory.
    """
    model = build(step, torch.device("cpu"))
    ids = torch.randint(0, _vocabulary(model), (step.records, step.tokens), generator=torch.Generator().manual_seed(0))
    handle = _prepare(model, step, kind, None)
    losses_of = losses_closure(model, ids, step)
    with LiveMemory() as live:
        live.add([ids, *model.parameters(), *model.buffers()])
        if handle is None:
            losses_of().sum().backward()
        else:
            handle.begin_step()
            handle.clipped_backward(losses_of(), max_grad_norm=1.0)
    return live


def build(step: SimulatedStep, device: torch.device) -> nn.Module:
    """The model, in training mode.

    Args:
        step: The setting.
        device: The meta device, or one on which it gets random weights.

    Returns:
        The model; tied parameters are tied.
    """
    if step.model is None:
        shape = replace(step.shape, tokens=step.tokens, records=step.records, checkpointing=False)
        model = shape.build()
    else:
        model = hugging_face_model(step.model, step.lora)
    put(model, device, DTYPES[step.dtype])
    model.config.use_cache = False  # type: ignore[union-attr]
    if step.checkpointing:
        model.activation_checkpointing_enable(  # type: ignore[operator]
            activation_checkpointing_kwargs={"use_reentrant": False}
        )
    return model.train()


def losses_closure(model: nn.Module, ids: Tensor, step: SimulatedStep) -> Callable[[], Tensor]:
    """The forward of a step.

    Args:
        model: As `build` made it, attached or not.
        ids: [B, T].
        step: The setting.

    Returns:
        A function without arguments, which gives the losses [B] and keeps nothing.
    """
    if step.chunked_head:
        return lambda: causal_lm_losses(model, ids, input_ids=ids)
    return lambda: causal_lm_loss(model(input_ids=ids).logits, ids)


def _simulate_one(step: SimulatedStep, kind: str, later: bool) -> dict[str, Any]:
    model = build(step, META)
    ids = torch.empty(step.records, step.tokens, dtype=torch.int64, device=META)
    return run_on_meta(
        MetaStep(
            model=model,
            tried=step.shape.build() if step.model is None else hugging_face_model(step.model, step.lora),
            inputs=[ids],
            losses=losses_closure(model, ids, step),
            prepare=lambda projections: _prepare(model, step, kind, projections),
            projection=step.projection,
            sketch_dim=step.sketch_dim,
            vocabulary=_vocabulary(model),
            later=later,
        )
    )


@dataclass(frozen=True)
class MetaStep:
    """A step on the meta device, whoever made the model.

    Attributes:
        model: On the meta device.
        tried: The same model with numbers, or stand-ins for them: what the rules of its layers look at.
        inputs: The micro-batch's tensors.
        losses: The forward, which gives the losses [B] and keeps nothing.
        prepare: Attaches the model; None for a non-private step.
        projection: Distribution of P's entries.
        sketch_dim: k.
        vocabulary: How many distinct ids a batch may hold.
        later: Whether an earlier micro-batch of the logical step has left gradients and P.
    """

    model: nn.Module
    tried: nn.Module
    inputs: Sequence[Tensor]
    losses: Callable[[], Tensor]
    prepare: Callable[[ShapedProjections], ClippingHandle | None]
    projection: str
    sketch_dim: int
    vocabulary: int
    later: bool = False


def run_on_meta(step: MetaStep) -> dict[str, Any]:
    """Run it.

    Args:
        step: Model, batch, and how.

    Returns:
        ``peak_bytes`` with its ``categories``, ``host_bytes``, ``flops``, ``attention_flops`` and their sum
        ``all_flops``.
    """
    model = step.model
    memory = CategorisedMemory()
    with _rules_that_trust(step.tried):
        projections = ShapedProjections(step.projection, step.sketch_dim, partial(memory.inside, PROJECTIONS))
        handle = step.prepare(projections)
    with without_numbers(step.vocabulary), Operations() as counted, memory:
        with memory.inside(PARAMETERS):
            memory.add([*step.inputs, *model.parameters(), *model.buffers()])
        if handle is not None:
            projections.stream(handle._streamed)
            handle.begin_step()
            if step.later:
                _leave_gradients(handle, projections, memory)
        losses = step.losses()
        memory.mark_alive(ACTIVATIONS)
        with memory.recomputation():
            if handle is None:
                losses.sum().backward()
            else:
                _two_passes(handle, losses, memory)
    memory.mark([p.grad for p in model.parameters() if p.grad is not None], GRADIENTS)
    return {
        "peak_bytes": memory.peak,
        "categories": memory.at_peak(),
        "host_bytes": memory.host_peak,
        "flops": counted.products,
        "attention_flops": counted.attention,
        "all_flops": counted.products + counted.attention,
    }


def _leave_gradients(handle: ClippingHandle, projections: ShapedProjections, memory: CategorisedMemory) -> None:
    """What an earlier micro-batch of the step leaves: the sum of its clipped gradients, and P."""
    with memory.inside(GRADIENTS):
        for parameter in handle.parameters:
            parameter.grad = torch.empty(parameter.shape, dtype=parameter.grad_dtype or parameter.dtype, device=META)
    handle.remember_gradients()
    for tracker in handle._state.trackers.values():
        for name, rows in tracker.draws.items():
            projections.matrix(name, rows, META)


def _two_passes(handle: ClippingHandle, losses: Tensor, memory: CategorisedMemory) -> None:
    """The norm pass as it is, and the clipped backward without what it reads of its numbers."""
    state = handle._state
    finish = state.finish_norms

    def before_they_are_dropped() -> Tensor | None:
        memory.mark(_kept_by([*state.trackers.values()]), SKETCHES)
        return finish()

    state.finish_norms = before_they_are_dropped  # type: ignore[method-assign]
    handle.norms(losses)
    del state.finish_norms
    state.start_clipping(torch.ones(len(losses), device="cpu"), 1.0, 1.0)
    losses.sum().backward()
    state.abort()


def _kept_by(value: Any) -> Iterator[Tensor]:
    """All tensors that lie in a tracker's fields, however deep; not the parameters, which have a kind already."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _kept_by(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _kept_by(part)
    elif type(value).__module__.startswith("dprc_lightning."):
        yield from _kept_by(vars(value))


def _prepare(
    model: nn.Module, step: SimulatedStep, kind: str, projections: ShapedProjections | None
) -> ClippingHandle | None:
    """What comes before a first step of this kind: the handle of a private one, else None."""
    if kind == step.sketch_name:
        return _attach(model, step, projections)
    if step.mlp_chunk is not None:
        _leave_only_mlps(_attach(model, step, projections))
    elif step.offload_checkpoints:
        CheckpointOffload(model)
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.dtype is torch.bfloat16:
            parameter.grad_dtype = torch.bfloat16 if kind == HALF_GRADIENTS else torch.float32
    return None


def _leave_only_mlps(handle: ClippingHandle) -> None:
    """A non-private model whose MLPs run in pieces: outside of the passes an attached layer gives plain gradients."""
    handle._stop_watching()
    pieces = {inner for mlp in handle.chunked_mlps.values() for inner in mlp.modules()}
    for module in handle._swapped:
        if module not in pieces:
            restore_class(module, module.__dict__.pop(ATTRIBUTE).original_class)


def _attach(model: nn.Module, step: SimulatedStep, projections: ShapedProjections | None) -> ClippingHandle:
    return attach(
        model,
        step.estimator,  # type: ignore[arg-type]
        step.sketch_dim,
        step.projection,  # type: ignore[arg-type]
        check_isolation=False,
        projections=projections,
        projection_memory=None,
        mlp_chunk=step.mlp_chunk,
        offload_checkpoints=step.offload_checkpoints,
    )


def _vocabulary(model: nn.Module) -> int:
    return model.config.vocab_size  # type: ignore[union-attr,return-value]


@contextmanager
def _rules_that_trust(tried: nn.Module) -> Iterator[None]:
    """Inside, rules refuse nothing: they have tried the modules of a model with numbers."""
    with ExitStack() as stack:
        rules = [rule for _, rule in find_owners(tried).values()] + [rule for _, _, rule in frozen_norms(tried)]
        for rule in {type(rule) for rule in rules}:
            stack.enter_context(replaced(rule, "refuse", lambda self, module: None))
        yield
