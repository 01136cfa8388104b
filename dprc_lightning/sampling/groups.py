"""Whose a record is: the unit of privacy when one person has many records."""

import datetime
import math
import uuid
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import numpy as np

from dprc_lightning.errors import ConfigurationError
from dprc_lightning.keys import KeyStream, derive

# Groups whose bits are held at once (8 bytes each).
_BLOCK = 2**20


class Groups:
    """The records of each group, and the one that stands for it in a step.

    Guarantee: in each step a group that was drawn takes part with exactly one of its records, chosen by bits of a
    cryptographic pseudo-random function of (key, sequence, group): the choice depends on that group alone. So the
    groups are what Poisson sampling draws, and adding or removing a whole group, with however many records, adds or
    removes one clipped gradient: the accounting of one record holds for the group, without a factor for its size. (For
    every choice of the record the step with the group and the one without it are dominated by the accountant's pair;
    the choice is independent of sampling, projection and noise, and the step without the group does not depend on it.
    The hockey-stick divergence is jointly convex, so the mixture over the choices is dominated by that pair too. Cf.
    Charles et al., arXiv 2407.07737, who sample users likewise.)

    Args:
        owners: For each record, in order, whose it is.

    Raises:
        ConfigurationError: A record without an owner, or one that cannot be compared.
    """

    def __init__(self, owners: Iterable[Hashable]) -> None:
        numbers: dict[Hashable, int] = {}
        of_record = []
        for index, owner in enumerate(owners):
            of_record.append(numbers.setdefault(_plain(owner, index), len(numbers)))
        group = np.asarray(of_record, dtype=np.int64)
        self._records = np.argsort(group, kind="stable")
        self._sizes = np.bincount(group, minlength=len(numbers)) if len(group) else np.zeros(0, dtype=np.int64)
        self._starts = np.cumsum(self._sizes) - self._sizes

    def __len__(self) -> int:
        return len(self._sizes)

    @property
    def num_records(self) -> int:
        """Records of all groups."""
        return len(self._records)

    def numbers(self) -> np.ndarray:
        """The group of each record, int64, [N records]."""
        found = np.empty(len(self._records), dtype=np.int64)
        found[self._records] = np.repeat(np.arange(len(self)), self._sizes)
        return found

    def pick(self, groups: np.ndarray, key: bytes, sequence: int) -> np.ndarray:
        """One record of each group.

        Args:
            groups: Group numbers, int64, [n].
            key: 32 secret bytes, used for nothing else.
            sequence: The ledger's number of the step.

        Returns:
            Record indices, int64, [n], in the order of `groups`.
        """
        stream = KeyStream(derive(key, sequence))
        # Group g owns the eight bytes at offset 8 g, whichever other groups were drawn.
        words = np.empty(len(groups), dtype=np.uint64)
        for start in range(0, len(self), _BLOCK):
            block = stream.uint64(min(_BLOCK, len(self) - start))
            inside = (groups >= start) & (groups < start + len(block))
            words[inside] = block[groups[inside] - start]
        # In Python's integers: uniform but for 2^-64, whatever the size.
        chosen = [
            int(self._starts[g]) + ((int(word) * int(self._sizes[g])) >> 64)
            for g, word in zip(groups, words, strict=True)
        ]
        return self._records[np.asarray(chosen, dtype=np.int64)]


def _plain(owner: Any, index: int) -> Hashable:
    """An owner as a plain value: tensors and most objects equal nothing but themselves, each a group of its own."""
    # By what they have, because light commands must not import torch.
    if getattr(owner, "ndim", None) == 0 and hasattr(owner, "item"):
        owner = owner.item()
    # A record of nobody would be a group with all the others of nobody, or be left out: neither is meant.
    if owner is None or (isinstance(owner, float) and math.isnan(owner)):
        raise ConfigurationError([f"privacy.group_column: record {index} has no value; drop it, or give it one"])
    if not isinstance(owner, str | bytes | bool | int | float | datetime.date | uuid.UUID):
        raise ConfigurationError([
            f"privacy.group_column: record {index} has a {type(owner).__name__}, which does not tell whether two "
            "owners are the same; use a string or a number"
        ])
    return owner


def owners_of(dataset: Any, column: str) -> Iterable[Hashable]:
    """The values of a column, one per record.

    Args:
        dataset: A Hugging Face data set, a map-style one whose records are mappings, or one with an attribute
            ``groups``: column name -> one value per record.
        column: Its name, as in ``privacy.group_column``.

    Returns:
        The values in the order of the records.

    Raises:
        ConfigurationError: No such column.
    """
    beside, names = getattr(dataset, "groups", None), getattr(dataset, "column_names", None)
    if isinstance(beside, Mapping) and column in beside:
        return beside[column]
    if isinstance(names, list | tuple):
        if column in names:
            return dataset[column]
    else:
        first = dataset[0] if len(dataset) else None
        names = sorted(first) if isinstance(first, Mapping) else []
        if column in names:
            return (dataset[index][column] for index in range(len(dataset)))
    names = [*names, *(beside if isinstance(beside, Mapping) else ())]
    known = f"it has {', '.join(map(repr, names))}" if names else "its records have no named columns"
    raise ConfigurationError([
        f"privacy.group_column={column!r}: the training set has no such column ({known}); name one, give the data set "
        f"an attribute groups = {{{column!r}: [one value per record]}}, or leave group_column out"
    ])
