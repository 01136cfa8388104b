"""`performance.memory`: the cheapest memory flags with which a step of one's own module fits, for `fit` and `plan`."""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dprc_lightning.activation_checkpointing import checkpointable
from dprc_lightning.bench.module_step import ModuleStep, shortened, tokens_of
from dprc_lightning.errors import ConfigurationError, DPRCError, InvalidArgumentError, LossShapeError
from dprc_lightning.layers.chunked_mlp import ChunkedMLPRule
from dprc_lightning.offload import checkpoints_activations
from dprc_lightning.plan.memory import GIB, HEADER, MemoryRow, chunk_for, describe, update_of

if TYPE_CHECKING:
    # `fit` calls this file from within the module's own.
    from dprc_lightning.lifecycle import RunLifecycle

_SHARE = 0.9
"""Of a device's memory: what an allocator cannot hand out, and what others hold."""


@dataclass(frozen=True)
class Device:
    """What a run may use.

    Attributes:
        setting: performance.memory, as it was given.
        limit_bytes: What that comes to.
        is_host: Whether it is the machine's own memory: then there is nothing to gain by moving checkpoints there.
    """

    setting: float | str
    limit_bytes: int
    is_host: bool

    @classmethod
    def of(cls, setting: float | str, device: torch.device, sharing: int = 1) -> "Device":
        """Turn the setting into bytes.

        Args:
            setting: performance.memory: GiB, or ``auto``.
            device: Where training runs.
            sharing: Processes of this machine that train, each with a model of its own; they share its memory if they
                run on the CPU.

        Returns:
            The limit.
        """
        is_host = device.type == "cpu"
        if isinstance(setting, str):
            limit = int(_SHARE * memory_of(device))
            return cls(setting, limit // sharing if is_host else limit, is_host)
        return cls(setting, int(setting * GIB), is_host)


@dataclass(frozen=True)
class Pick:
    """The flags that were chosen, and what they were chosen by.

    Attributes:
        device: What the run may use.
        records: B of the largest micro-batch.
        tokens: Its T; 0 if its records have no tokens.
        rows: The sets of flags that were simulated, the chosen one last.
    """

    device: Device
    records: int
    tokens: int
    rows: tuple[MemoryRow, ...]
    in_eval_mode: bool = False
    """Whether the model could checkpoint its activations if it were in training mode."""

    @property
    def fits(self) -> bool:
        """Whether any of them fits."""
        return self.rows[-1].fits(self.device.limit_bytes)

    @property
    def flags(self) -> dict[str, Any]:
        """What is set on top of the user's own settings."""
        return self.rows[-1].flags

    def said(self) -> str:
        """The choice in one line."""
        return f"{self._setting()}: {_words(self.flags)}: {self._step()} takes {_gib(self.rows[-1])} {_WITH}"

    def problem(self) -> str:
        """Why there is no choice, in one line with the remedies."""
        least = min(self.rows, key=lambda row: row.total_bytes)
        train = "call train() on the model, which can then checkpoint; " if self.in_eval_mode else ""
        return (
            f"{self._setting()}: nothing fits; the least is {_gib(least)} for {self._step()} {_WITH}, with "
            f"{_words(least.flags)}; {train}lower performance.physical_batch_size, shorten the records, train LoRA, or "
            "share the model among ranks (trainer.strategy=dprc_fsdp2, without performance.memory)"
        )

    def to_dict(self) -> dict[str, Any]:
        """For the report and `dprc plan --format json`."""
        chosen = asdict(self.rows[-1]) | {"total_bytes": self.rows[-1].total_bytes}
        return {"setting": self.device.setting, "limit_bytes": self.device.limit_bytes, "said": self.said(), **chosen}

    def to_text(self) -> str:
        """The table of `dprc plan`, and what was picked."""
        lines = [
            f"memory of {self._step()}, simulated, within {self.device.limit_bytes / GIB:.4g} GiB",
            "",
            HEADER,
            *(row.to_text(self.device.limit_bytes) for row in self.rows),
        ]
        return "\n".join([*lines, "", f"pick: {self.said()}" if self.fits else self.problem()])

    def _setting(self) -> str:
        of = f" ({self.device.limit_bytes / GIB:.4g} GiB)" if isinstance(self.device.setting, str) else ""
        return f"performance.memory={self.device.setting}{of}"

    def _step(self) -> str:
        return f"a step of {self.records} " + (f"x {self.tokens} tokens" if self.tokens else "records")


_WITH = "with Adam (simulated)"


def _gib(row: MemoryRow) -> str:
    return f"{row.total_bytes / GIB:.3g} GiB"


def _words(flags: Mapping[str, Any]) -> str:
    if not flags:
        return "no flag added"
    # It comes first where it is there.
    return ("activation " if "checkpointing" in flags else "") + describe(flags)


def pick(
    module: "RunLifecycle",
    device: Device,
    *,
    precision: str = "32-true",
    buckets: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> Pick:
    """Simulate one set of flags after the other, from the cheapest in time to the dearest, until one fits.

    What the user has set stays as it is: an mlp_chunk, offload_checkpoints, and a model that checkpoints already. The
    outcome depends on shapes that the user declared, never on records. Flags change rounding at most (mlp_chunk).

    Args:
        module: Before it is attached; not changed. Its parameters have numbers, or stand-ins for them.
        device: What it may use.
        precision: The trainer's.
        buckets: Whether an engine (DDP) copies the gradients into buckets of its own.
        progress: Called with what is about to run.

    Returns:
        The choice; see `Pick.fits`.

    Raises:
        ConfigurationError: The step cannot run without numbers, or a flag that the user set has no use here.
    """
    batches = list(_largest(module))
    tokens = max(tokens_of(batch) for _, batch in batches)
    queue = _candidates(module, tokens, device)
    rows: list[MemoryRow] = []
    base: int | None = None
    while queue:
        flags = queue.pop(0)
        progress(f"simulating {describe(flags)}")
        try:
            found = [_simulate(module, records, batch, flags, precision) for records, batch in batches]
        except InvalidArgumentError as error:
            if error.name not in flags:
                raise ConfigurationError([f"performance.{error}"]) from None
            # Of no use in this model, which shows when it is attached.
            tried = [row.flags for row in rows]
            without = [{k: v for k, v in some.items() if k != error.name} for some in (flags, *queue)]
            queue = [some for i, some in enumerate(without) if some not in tried and some not in without[:i]]
            continue
        base = base or found[0]["all_flops"]
        rows.append(_row(module, device, flags, found, base, precision, buckets))
        if rows[-1].fits(device.limit_bytes):
            break
    parts = checkpointable(module)
    return Pick(device, batches[0][0], tokens, tuple(rows), bool(parts) and not any(part.training for part in parts))


def _row(
    module: "RunLifecycle",
    device: Device,
    flags: dict[str, Any],
    found: list[dict[str, Any]],
    base: int,
    precision: str,
    buckets: bool,
) -> MemoryRow:
    half = precision == "bf16-true"
    gradients, states, update = update_of(
        (p.numel(), 2 if half and p.is_floating_point() else p.element_size(), p.requires_grad)
        for p in module.parameters()
    )
    return MemoryRow(
        flags=flags,
        peak_bytes=max(one["peak_bytes"] + (one["host_bytes"] if device.is_host else 0) for one in found),
        optimizer_bytes=states + (gradients if buckets else 0),
        host_bytes=max(one["host_bytes"] for one in found),
        flops_ratio=found[0]["all_flops"] / base,
        update_bytes=update,
    )


def _candidates(module: "RunLifecycle", tokens: int, device: Device) -> list[dict[str, Any]]:
    """Sets of flags to add, from the cheapest to the dearest.

    The MLP in pieces makes its forward once more in each of the two passes; checkpointing makes every layer's, and with
    it the MLP in pieces costs nothing; offloading costs the way to the host.

    Args:
        module: Before it is attached.
        tokens: T.
        device: Where it trains.

    Returns:
        No two of them the same.
    """
    given = module.performance
    already = any(checkpoints_activations(part) for part in module.modules())
    useful = already or any(part.training for part in checkpointable(module))
    checkpointing: dict[str, Any] = {"checkpointing": True} if useful and not already else {}
    chunk: dict[str, Any] = {}
    if given.mlp_chunk is None and chunk_for(tokens) is not None and _has_chunkable_mlps(module):
        chunk = {"mlp_chunk": chunk_for(tokens)}
    offload: dict[str, Any] = {}
    if useful and not given.offload_checkpoints and not device.is_host:
        offload = {"offload_checkpoints": True}
    # Without checkpoints there is nothing to offload: that setting of the user's asks for them.
    start = checkpointing if given.offload_checkpoints else {}
    sets = [start, start | chunk, checkpointing, checkpointing | chunk, checkpointing | chunk | offload]
    return [some for i, some in enumerate(sets) if some not in sets[:i]]


def _has_chunkable_mlps(module: torch.nn.Module) -> bool:
    try:
        ChunkedMLPRule(512).find(module)
    except InvalidArgumentError:
        # Said where a user asks for it; here it is one way less.
        return False
    return True


def _largest(module: "RunLifecycle") -> Iterator[tuple[int, Any]]:
    """The micro-batches that may take most: of the longest records, and of the most."""
    given = module.performance
    most = given.physical_batch_size
    assert most is not None, "checked by PerformanceConfig.problems"
    if given.max_tokens is None:
        yield most, _largest_batch(module, most)
        return
    tokens = tokens_of(_largest_batch(module, 1))
    # A longer record gets a micro-batch of its own.
    records = min(most, max(given.max_tokens // max(tokens, 1), 1))
    yield records, _largest_batch(module, records)
    if records < most:
        # What is kept for each record (sketches) is most in a micro-batch of many short ones.
        yield most, shortened(_largest_batch(module, most), tokens, max(given.max_tokens // most, 1))


def _largest_batch(module: "RunLifecycle", records: int) -> Any:
    # A DPRCModule's; whoever overrides it owes no type.
    found: Any = module
    return found.largest_batch(records)


def _simulate(
    module: "RunLifecycle", records: int, batch: Any, flags: Mapping[str, Any], precision: str
) -> dict[str, Any]:
    attached = {name: value for name, value in flags.items() if name != "checkpointing"}
    step = ModuleStep(
        module,
        "per_sample_loss",
        batch,
        {**module.attach_settings(), **attached},
        checkpointing="checkpointing" in flags,
        records=records,
        precision=precision,
    )
    try:
        return step.simulate()
    except LossShapeError as error:
        raise ConfigurationError([f"{type(module).__name__}.largest_batch: {error}"]) from None
    except DPRCError:
        raise
    except Exception as error:
        # Code of the user's may do anything with the numbers of a batch, and raise anything without them.
        said = " ".join(str(error).split()) or type(error).__name__
        raise ConfigurationError([
            f"performance.memory={module.performance.memory}: {type(module).__name__}.per_sample_loss does not run on "
            f"the batch of largest_batch without numbers ({said}); leave performance.memory out and set "
            "performance.mlp_chunk, performance.offload_checkpoints and the model's checkpointing by hand"
        ]) from error


def memory_of(device: torch.device) -> int:
    """All memory of a device.

    Args:
        device: A GPU, or the CPU.

    Returns:
        Bytes; for the CPU what the machine has, or less where a container (cgroup) gives less.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if device.type == "mps":
        return torch.mps.recommended_max_memory()
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = Path("/sys/fs/cgroup/memory.max")
    found = limit.read_text().strip() if limit.is_file() else "max"
    return min(machine, int(found)) if found.isdigit() else machine
