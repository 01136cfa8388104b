"""Cut a logical batch into physical micro-batches that fit into memory."""

from collections.abc import Sequence

import numpy as np

from dprc_lightning.errors import InvalidArgumentError


def split_batch(
    indices: Sequence[int] | np.ndarray,
    *,
    physical_batch_size: int | None = None,
    max_tokens: int | None = None,
    lengths: Sequence[int] | np.ndarray | None = None,
) -> list[np.ndarray]:
    """Cut one logical batch into micro-batches by number of records, by tokens after padding, or by both.

    Guarantee: every entry of ``indices`` is in exactly one micro-batch; none is dropped, cut or repeated, however long
    the batch or the record. (Truncating a large batch would make one record's fate depend on the others.) The clipped
    gradients add up to the same sum for any split, so the split has no part in the privacy guarantee, provided that
    nothing random is keyed by a record's place in its micro-batch.

    By number the order stays. By tokens the records are sorted by length, longest first, ties in the given order: like
    lengths meet, so little is padded, and what does not fit into memory fails on the first micro-batch, not hours
    later.

    ===========================  =======================================================================================
    empty logical batch          no micro-batch: an empty list
    one record > ``max_tokens``  a micro-batch of its own
    records of length 0          count as one token, so that a micro-batch stays finite
    ===========================  =======================================================================================

    Args:
        indices: The records of the logical batch (or of this rank's part of it).
        physical_batch_size: At most this many records per micro-batch. None: no such limit.
        max_tokens: At most this many tokens per micro-batch after padding, i.e. records times longest record. None: no
            such limit.
        lengths: The length in tokens of each entry of ``indices``, in the same order; needed with ``max_tokens``.

    Returns:
        The micro-batches: arrays of int64, none of them empty.

    Raises:
        InvalidArgumentError: If a limit is not a positive integer, both are missing, or the lengths do not match.
    """
    records = np.asarray(indices, dtype=np.int64)
    for name, limit in (("physical_batch_size", physical_batch_size), ("max_tokens", max_tokens)):
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int | np.integer) or limit < 1):
            raise InvalidArgumentError(name, limit, "an integer >= 1, or None for no limit")
    if max_tokens is None:
        if physical_batch_size is None:
            raise InvalidArgumentError("physical_batch_size", None, "set it, or max_tokens, or both")
        return [records[i : i + physical_batch_size] for i in range(0, len(records), physical_batch_size)]

    if lengths is None:
        raise InvalidArgumentError("lengths", None, "max_tokens needs the length of every record")
    tokens = np.asarray(lengths, dtype=np.int64)
    if tokens.shape != records.shape or (tokens < 0).any():
        raise InvalidArgumentError(
            "lengths", f"<{tokens.size} numbers>", f"{records.size} numbers >= 0, one per record"
        )
    order = np.argsort(-tokens, kind="stable")
    batches = []
    start = 0
    while start < len(order):
        longest = max(int(tokens[order[start]]), 1)
        count = max(max_tokens // longest, 1)
        if physical_batch_size is not None:
            count = min(count, physical_batch_size)
        batches.append(records[order[start : start + count]])
        start += count
    return batches
