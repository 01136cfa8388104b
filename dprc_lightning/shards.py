"""A parameter or gradient of which this rank holds a part: what of it lies here."""

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a sharded tensor, itself and no copy; any other tensor as it is.

    Args:
        tensor: A DTensor or an ordinary one.

    Returns:
        The local tensor, without gradient history.
    """
    if isinstance(tensor, DTensor):
        # Only without grad does to_local() return the very shard.
        with torch.no_grad():
            return tensor.to_local()
    return tensor


def version(tensor: Tensor) -> int:
    """How often a tensor was written to in place; of a sharded one, as a whole or in this rank's part.

    Args:
        tensor: A DTensor or an ordinary one.

    Returns:
        torch's counter; it grows with each write.
    """
    local = local_part(tensor)
    # What is written by the DTensor counts there, and what is written to its part counts here.
    return local._version if local is tensor else tensor._version + local._version
