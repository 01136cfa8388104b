"""Which memory flags a model needs at a context: the cheapest set whose simulated step fits."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dprc_lightning.bench.simulate import DTYPES, META, SimulatedStep, build, simulate
from dprc_lightning.sketch import BLOCK_ROWS

GIB = 2.0**30

MLP_CHUNK = 4096
"""Tokens at a time: long enough for full speed of the products, short beside the contexts that need it."""


@dataclass(frozen=True)
class MemoryRow:
    """One set of flags.

    Attributes:
        flags: Those that are on.
        peak_bytes: Of a later micro-batch of a private step, on the device: gradients and P are there already. Without
            optimizer.
        optimizer_bytes: Adam's two states of each trainable parameter, in the parameter's own precision; where an
            engine has one, its copy of the gradients.
        host_bytes: What lies in the host's memory beside it.
        flops_ratio: All FLOPs, attention's too, over those of the first row.
        update_bytes: Of the optimizer's step, without what `optimizer_bytes` counts.
    """

    flags: dict[str, Any]
    peak_bytes: int
    optimizer_bytes: int
    host_bytes: int
    flops_ratio: float
    update_bytes: int

    @property
    def total_bytes(self) -> int:
        """The most that the device must hold at one time."""
        return max(self.peak_bytes, self.update_bytes) + self.optimizer_bytes

    def fits(self, limit_bytes: float) -> bool:
        """Whether the device holds it.

        Args:
            limit_bytes: Of the device.

        Returns:
            Whether it does.
        """
        return self.total_bytes <= limit_bytes

    def to_text(self, limit_bytes: float) -> str:
        """A line of the table.

        Args:
            limit_bytes: Of the device.

        Returns:
            The line.
        """
        sizes = (max(self.peak_bytes, self.update_bytes), self.optimizer_bytes, self.host_bytes)
        figures = " ".join(f"{size / GIB:>9.2f}" for size in sizes)
        fits = "yes" if self.fits(limit_bytes) else "no"
        return f"{describe(self.flags):<66} {figures} {self.flops_ratio:>6.2f}  {fits}"


def chunk_for(tokens: int) -> int | None:
    """The mlp_chunk to try at a context.

    Args:
        tokens: T.

    Returns:
        None where a piece would be as long as the record, and save nothing.
    """
    return min(MLP_CHUNK, (tokens - 1) // BLOCK_ROWS * BLOCK_ROWS) or None if tokens > 0 else None


HEADER = f"{'flags':<66} {'step GiB':>9} {'Adam GiB':>9} {'host GiB':>9} {'FLOPs':>6}  fits"
"""Of the lines of `MemoryRow.to_text`."""


def candidates(tokens: int) -> list[dict[str, Any]]:
    """Sets of flags, from the cheapest in time to the dearest.

    The head in blocks makes the logits once more; checkpointing makes every layer's forward once more in each of the
    two passes; with it the MLP in pieces costs nothing, and offloading costs the way to the host.

    Args:
        tokens: T.

    Returns:
        As `SimulatedStep` takes them.
    """
    head = {"chunked_head": True}
    checkpointed = {"checkpointing": True, **head}
    sets: list[dict[str, Any]] = [{}, head, checkpointed]
    chunk = chunk_for(tokens)
    if chunk is not None:
        sets.append(checkpointed | {"mlp_chunk": chunk})
    sets.append(sets[-1] | {"offload_checkpoints": True})
    return sets


def memory_rows(
    step: SimulatedStep, limit_bytes: float, progress: Callable[[str], None] = lambda _: None
) -> list[MemoryRow]:
    """Simulate one set of flags after the other until one fits.

    Args:
        step: Model, batch, precision and sketch; its own flags are not looked at.
        limit_bytes: Of the device.
        progress: Called with what is about to run.

    Returns:
        The rows; only the last may fit.
    """
    sizes = [(p.numel(), DTYPES[step.dtype].itemsize, p.requires_grad) for p in build(step, META).parameters()]
    _, states, update = update_of(sizes)
    rows: list[MemoryRow] = []
    base = None
    for flags in candidates(step.tokens):
        off = {"checkpointing": False, "chunked_head": False, "mlp_chunk": None, "offload_checkpoints": False}
        progress(f"simulating {describe(flags)}")
        (found,) = simulate(replace(step, **off | flags), kinds=[step.sketch_name], later=True)
        base = base or found["all_flops"]
        ratio = found["all_flops"] / base
        rows.append(MemoryRow(flags, found["peak_bytes"], states, found["host_bytes"], ratio, update))
        if rows[-1].fits(limit_bytes):
            break
    return rows


def update_of(parameters: Iterable[tuple[int, int, bool]]) -> tuple[int, int, int]:
    """What Adam's update takes.

    Args:
        parameters: Of each its elements, bytes of one, and whether it trains.

    Returns:
        Bytes of the gradients, float32 or better until the noise is in them; of the two states, in the parameters' own
        precision; and what lives in an update beside the states: it takes the root of one of them, on a GPU of all
        parameters at once.
    """
    known = list(parameters)
    trained = [(numel, size) for numel, size, trains in known if trains]
    gradients = sum(numel * max(size, 4) for numel, size in trained)
    states = sum(2 * numel * size for numel, size in trained)
    return gradients, states, sum(numel * size for numel, size, _ in known) + gradients + states // 2


def describe(flags: Mapping[str, Any]) -> str:
    """A set of flags in words.

    Args:
        flags: From `candidates`.

    Returns:
        ``no flags``, or their names and values.
    """
    return ", ".join(name if value is True else f"{name}={value}" for name, value in flags.items()) or "no flags"


def to_text(rows: Sequence[MemoryRow], limit_bytes: float, tokens: int, records: int) -> str:
    """The table, and what to set.

    Args:
        rows: From `memory_rows`.
        limit_bytes: Of the device.
        tokens: T.
        records: B.

    Returns:
        Lines.
    """
    lines = [
        f"memory of one private step, simulated: micro-batches of {records} x {tokens} tokens; at most "
        f"{limit_bytes / GIB:g} GiB of the device may be used",
        "",
        HEADER,
        *(row.to_text(limit_bytes) for row in rows),
    ]
    last = rows[-1]
    if not last.fits(limit_bytes):
        return "\n".join([
            *lines,
            "",
            "nothing fits: shorten the context, train LoRA (--lora 8), take a larger device, or share the model among "
            "ranks (dprc_fsdp2)",
        ])
    settings = [
        *(["the model's activation_checkpointing_enable()"] if last.flags.get("checkpointing") else []),
        *(["losses by dprc_lightning.clipping.causal_lm_losses"] if last.flags.get("chunked_head") else []),
        *([f"performance.mlp_chunk={last.flags['mlp_chunk']}"] if "mlp_chunk" in last.flags else []),
        *(["performance.offload_checkpoints=true"] if last.flags.get("offload_checkpoints") else []),
    ]
    return "\n".join([*lines, "", f"pick: {', '.join(settings) or 'nothing needs to be set'}"])
