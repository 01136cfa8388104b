"""What the ranks of a run tell each other, beside gradients."""

import atexit
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed
from torch import Tensor

from dprc_lightning.errors import RankZeroError

T = TypeVar("T")


_DRAIN_SECONDS = 0.3


@atexit.register
def leave() -> None:
    """Give up the process group before the interpreter ends. Lightning does it for nccl alone.

    A thread of gloo's drops the tensors of the last collective a moment after the collective is done. If the
    interpreter has gone by then, the process is aborted ("terminate called without an active exception"), and a run
    that has ended well has the status of one that crashed. An engine that holds groups of its own (DeepSpeed) keeps
    their threads alive beyond the group, so they get a moment.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        of_gloo = "gloo" in str(torch.distributed.get_backend())
        torch.distributed.destroy_process_group()
        if of_gloo:
            time.sleep(_DRAIN_SECONDS)


def from_rank_zero(make: Callable[[], T], rank: int) -> T:
    """Call a function on rank 0; every rank gets its value, or stops with it.

    Without the second half the other ranks would wait for a rank 0 that has given up.

    Args:
        make: What rank 0 calls. Its value must be picklable.
        rank: This process.

    Returns:
        The value.

    Raises:
        RankZeroError: On the other ranks, if rank 0 raised.
    """
    message: list[Any] = [(False, "")]
    try:
        if rank == 0:
            message = [(True, make())]
    except BaseException as error:
        message = [(False, f"{type(error).__name__}: {error}")]
        raise
    finally:
        torch.distributed.broadcast_object_list(message, src=0)
    worked, value = message[0]
    if not worked:
        raise RankZeroError(f"rank 0 stopped: {value}")
    return value


def on_rank_zero(make: Callable[[], T], rank: int) -> T | None:
    """Call a function on rank 0 and keep its value there; the other ranks learn that it worked, or stop.

    Args:
        make: What rank 0 calls.
        rank: This process.

    Returns:
        The value on rank 0, None elsewhere.
    """
    kept: list[T] = []
    from_rank_zero(lambda: kept.append(make()), rank)
    return kept[0] if kept else None


def max_over_ranks(values: Sequence[int], device: torch.device) -> list[int]:
    """The largest of each value over all ranks.

    Args:
        values: Integers, as many on every rank.
        device: Where the backend reduces.

    Returns:
        As many.
    """
    tensor = torch.tensor(values, dtype=torch.int64, device=device)
    torch.distributed.all_reduce(tensor, op=torch.distributed.ReduceOp.MAX)
    return tensor.tolist()


def sum_over_ranks(values: Tensor, device: torch.device) -> Tensor:
    """The sum over all ranks.

    Args:
        values: Of the same shape on every rank.
        device: Where the backend reduces.

    Returns:
        The sum, where `values` was.
    """
    tensor = values.to(device, copy=True)
    torch.distributed.all_reduce(tensor)
    return tensor.to(values.device)
