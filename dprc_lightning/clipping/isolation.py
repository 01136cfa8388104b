"""Does any record's loss or norm depend on another record of its micro-batch? Change one, and see."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from dprc_lightning.dropout import preserved_randomness
from dprc_lightning.errors import ConfigurationError, IsolationError

TOLERANCE = 1e-4
"""Of a loss or norm in float32. On a CPU the other records' rows do not change in one bit; where tokens are grouped
otherwise (mixtures of experts), their sums may round otherwise."""
HALF_TOLERANCE = 1e-2
_CHANGES = 3


def check_isolation(
    losses_of: Callable[[Any], Tensor],
    norms_of: Callable[[Tensor], Tensor],
    batch: Any,
    device: torch.device | str = "cpu",
    *,
    half_precision: bool = False,
    any_rank: Callable[[bool], bool] = bool,
) -> bool:
    """Change records of a micro-batch; no other record's loss or norm may move.

    Three times: the last record becomes a copy of another one, and all others are watched; all but the first become
    copies of it, and the first is watched; the last record is taken away, and all others are watched.

    Guarantee: none by itself. The accounting requires that one record's clipped gradient depends on that record alone.
    This finds what breaks it in the batch at hand: normalisation over the batch, a balancing loss, negatives from the
    same batch, a loss reduced over the batch, positions taken for records.

    Args:
        losses_of: The forward: the batch -> losses [B].
        norms_of: Losses -> norms [B], `ClippingHandle.norms` after a `begin_step`, so that P is the same each time.
        batch: Tensors [B, ...], alone or in mappings, sequences and dataclasses. Not changed.
        device: Where the model draws its random numbers: every run draws the same, and none is used up.
        half_precision: Whether layers run in bfloat16.
        any_rank: Whether something holds on any rank, for an engine whose forwards are collectives: a rank with nothing
            to try then runs as many as the others, on its batch as it is.

    Returns:
        Whether there was anything to try: at least two records that differ.

    Raises:
        IsolationError: A record's loss or norm moved.
        ConfigurationError: The batch shows no tensor whose first dimension is the record.
    """

    def run(data: Any, records: int | None) -> dict[str, Tensor]:
        with preserved_randomness(device):
            losses = losses_of(data)
            if records is not None and len(losses) != records:
                raise IsolationError(
                    f"the number of losses changed from {records} to {len(losses)} when one record was changed; "
                    "per_sample_loss must return one loss per record, whatever the records hold"
                )
            return {"loss": losses.detach().float().cpu(), "gradient norm": norms_of(losses).cpu()}

    before = run(batch, None)
    records = len(before["loss"])
    changes = list(_changes(batch, records)) if records >= 2 else []
    if not any_rank(bool(changes)):
        return False
    if not changes:
        for _ in range(_CHANGES):
            run(batch, None)
    tolerance = HALF_TOLERANCE if half_precision else TOLERANCE
    for change in changes:
        after = run(change.batch, records - change.taken_away)
        for name in before:
            moved = int(_apart(before[name][change.watched], after[name][change.watched], tolerance).sum())
            if moved:
                raise IsolationError(
                    f"the {name} of {moved} of {len(before[name][change.watched])} records moved when ANOTHER record "
                    "of the micro-batch was changed, so clipping would not bound what one record does: use no "
                    "normalisation over the batch, division by its size, batch-wide loss term or negatives from "
                    "the batch, reduce per record, and give positions the shape [1, T] (found by check_isolation)"
                )
    return True


@dataclasses.dataclass(frozen=True)
class _Change:
    batch: Any
    watched: slice
    taken_away: int = 0


def _changes(batch: Any, records: int) -> Iterator[_Change]:
    last = [records - 1]
    for source in range(records - 1):
        changed, differs = _replaced(batch, records, source, last)
        if differs:
            yield _Change(changed, slice(0, records - 1))
            yield _Change(_replaced(batch, records, 0, list(range(1, records)))[0], slice(0, 1))
            yield _Change(_without_last(batch, records), slice(0, records - 1), taken_away=1)
            return


def _apart(before: Tensor, after: Tensor, tolerance: float) -> Tensor:
    # A record that is not finite is another matter.
    usual = before.isfinite() & after.isfinite()
    largest = before.where(usual, 0.0).abs().max()
    return usual & ((before - after).abs() > tolerance * before.abs() + 1e-6 * largest)


def _replaced(batch: Any, records: int, source: int, targets: list[int]) -> tuple[Any, bool]:
    """A copy of a batch in which some records are copies of record ``source``, and whether that changes anything."""
    found: list[bool] = []
    changed, differs = _replace(batch, records, source, targets, found)
    if not found:
        raise ConfigurationError([
            f"privacy.check_isolation=True: the batch ({type(batch).__name__}) shows no tensor whose first dimension "
            f"is the record ({records}); give per_sample_loss such tensors, or set it to false"
        ])
    return changed, differs


def _replace(value: Any, records: int, source: int, targets: list[int], found: list[bool]) -> tuple[Any, bool]:
    differs = []

    def replace(tensor: Tensor) -> Tensor:
        found.append(True)
        copy = tensor.clone()
        copy[targets] = tensor[source]
        differs.append(not torch.equal(copy, tensor))
        return copy

    return _map_records(value, records, replace), any(differs)


def _without_last(value: Any, records: int) -> Any:
    return _map_records(value, records, lambda tensor: tensor[:-1])


def _map_records(value: Any, records: int, change: Callable[[Tensor], Tensor]) -> Any:
    """A copy of a batch with every tensor of ``records`` rows changed."""

    def inner(part: Any) -> Any:
        return _map_records(part, records, change)

    if isinstance(value, Tensor):
        return change(value) if value.ndim and value.shape[0] == records else value
    if isinstance(value, Mapping):
        made = {key: inner(part) for key, part in value.items()}
        # A subclass such as Hugging Face's BatchEncoding is made from a dict.
        return made if type(value) is dict else type(value)(made)  # type: ignore[call-arg]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: inner(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **fields)
    if isinstance(value, tuple | list):
        contents = [inner(part) for part in value]
        return type(value)(*contents) if hasattr(value, "_fields") else type(value)(contents)
    return value
