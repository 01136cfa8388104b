"""Labelled texts: reading them from JSON Lines, removing duplicates, and splitting them in a fixed public way."""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from dprc_lightning.errors import DatasetError, InvalidArgumentError

# A public constant: a salt chosen after looking at results would be tuning on the test set.
SPLIT_SALT = "dprc-lightning-split-1"

_SHINGLE = 5  # words
_MAX_SHARED = 50  # a shingle found in more texts than this is boilerplate, not evidence of a copy
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class Record:
    """One labelled text.

    Attributes:
        text: The text. Left out of ``repr``, so that a log line or an error never shows a private text.
        label: The class, by name.
        id: Where the text came from; unique within its source.
        columns: Whatever else the source tells of it, such as whose it is.
    """

    text: str = field(repr=False)
    label: str
    id: str
    columns: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)


@dataclass(frozen=True)
class TextSplit:
    """Disjoint training, validation and test records.

    Attributes:
        train: Records to train on: the private data set.
        validation: Records to choose settings with.
        test: Records to report on.
        label_names: All classes, in the order of their integer labels. Public.
        records_read: Records before any was dropped.
        exact_duplicates: Records dropped because an earlier one has the very same text.
        near_duplicates: Kept records that share most of their words with another one; all of them are in ``train``.
    """

    train: tuple[Record, ...] = field(repr=False)
    validation: tuple[Record, ...] = field(repr=False)
    test: tuple[Record, ...] = field(repr=False)
    label_names: tuple[str, ...]
    records_read: int
    exact_duplicates: int
    near_duplicates: int


def drop_duplicates(records: Sequence[Record]) -> tuple[list[Record], int]:
    """Keep the first record of each text.

    A text that is there twice doubles its own influence, which the guarantee (stated for one record) does not cover.

    Args:
        records: Records in a fixed order.

    Returns:
        The kept records in their order, and how many were dropped.
    """
    first: dict[str, Record] = {}
    for record in records:
        first.setdefault(record.text, record)
    return list(first.values()), len(records) - len(first)


def near_duplicate_pairs(texts: Sequence[str], threshold: float = 0.5) -> list[tuple[int, int]]:
    """Find pairs of texts that share most of their runs of five words, ignoring case, punctuation and white space.

    Args:
        texts: The texts. One with fewer than five words takes no part.
        threshold: Smallest Jaccard similarity (shared runs over all runs of the two) that counts, in (0, 1].

    Returns:
        Pairs of positions ``(i, j)`` with ``i < j``, sorted.

    Raises:
        InvalidArgumentError: If ``threshold`` is not in (0, 1].
    """
    if not 0 < threshold <= 1:
        raise InvalidArgumentError("threshold", threshold, "pass a Jaccard similarity in (0, 1]")
    vocabulary: dict[str, int] = {}
    shingles = [_shingles(text, vocabulary) for text in texts]
    if not shingles:
        return []
    flat = np.concatenate(shingles)
    owner = np.repeat(np.arange(len(texts)), [len(s) for s in shingles])
    order = np.argsort(flat, kind="stable")
    starts = np.flatnonzero(np.r_[True, np.diff(flat[order]) != 0]) if len(flat) else np.empty(0, int)
    sizes = np.diff(np.r_[starts, len(flat)])
    shared: Counter[tuple[int, int]] = Counter()
    for start, size in zip(starts[sizes > 1], sizes[sizes > 1], strict=True):
        if size <= _MAX_SHARED:
            shared.update(combinations(owner[order[start : start + size]].tolist(), 2))
    return sorted(
        (i, j) for (i, j), count in shared.items() if count >= threshold * (len(shingles[i]) + len(shingles[j]) - count)
    )


def split_records(
    records: Sequence[Record],
    label_names: Sequence[str],
    sizes: tuple[int, int, int],
    salt: str = SPLIT_SALT,
) -> TextSplit:
    """Drop exact duplicates, then split by a fixed public permutation.

    The permutation orders records by a hash of their ids: it needs no random generator, whose stream may change between
    versions. Records with a near duplicate all go to the training set: nothing in the test set was seen, nearly word
    for word, in training, and no test record counts twice.

    Formal Guarantees:
        None. Dropping duplicates and splitting look at the texts and come before the mechanism; the private data set
        is ``train`` as it comes out. Near duplicates stay separate records there: a story told by two records is
        protected at twice the epsilon of one.

    Args:
        records: All records, in a fixed order.
        label_names: All classes, in the order of their integer labels.
        sizes: How many records for training, validation and test; what is left over is not used.
        salt: The permutation. A public constant, never something to tune.

    Returns:
        The split, with the numbers of records read, dropped and found nearly alike.

    Raises:
        InvalidArgumentError: If a size is negative, or the training set is too small to hold all near duplicates.
        DatasetError: If there are fewer different records than ``sizes`` asks for, two records share an id, or a label
            is not in ``label_names``.
    """
    if min(sizes) < 0:
        raise InvalidArgumentError("sizes", sizes, "pass three numbers of records, none of them negative")
    check_labels(records, label_names)
    repeated = [i for i, n in Counter(record.id for record in records).items() if n > 1]
    if repeated:
        raise DatasetError(f"id {repeated[0]!r}: two records share it; the split goes by id, so make the ids unique")
    kept, dropped = drop_duplicates(records)
    if len(kept) < sum(sizes):
        raise DatasetError(
            f"sizes={sizes}: asks for {sum(sizes)} records, but only {len(kept)} different ones are there "
            f"({len(records)} read); ask for fewer, or check that the data set is complete"
        )
    kept.sort(key=lambda record: hashlib.sha256(f"{salt}:{record.id}".encode()).digest())
    near = {i for pair in near_duplicate_pairs([record.text for record in kept]) for i in pair}
    train, validation, test = sizes
    if len(near) > train:
        raise InvalidArgumentError(
            "sizes", sizes, f"use at least {len(near)} for training: all near duplicates go there"
        )
    # sorted() is stable: within the two groups the order of the permutation stays.
    kept = [kept[i] for i in sorted(range(len(kept)), key=lambda i: i not in near)]
    return TextSplit(
        train=tuple(kept[:train]),
        validation=tuple(kept[train : train + validation]),
        test=tuple(kept[train + validation : train + validation + test]),
        label_names=tuple(label_names),
        records_read=len(records),
        exact_duplicates=dropped,
        near_duplicates=len(near),
    )


def check_labels(records: Sequence[Record], label_names: Sequence[str]) -> None:
    """Check that every record's label is one of the classes.

    Args:
        records: Any records.
        label_names: All classes. They are public: never take them from the private records themselves.

    Raises:
        DatasetError: If a label is unknown; names the record and the classes.
    """
    known = set(label_names)
    for record in records:
        if record.label not in known:
            raise DatasetError(
                f"record {record.id!r}: label {record.label!r} is not one of {', '.join(sorted(known))}; "
                "correct the record, or add the class to label_names"
            )


def read_jsonl(path: str | Path) -> list[Record]:
    """Read labelled texts from a JSON Lines file: one object a line, with columns ``text`` and ``label``.

    ``label`` may be a string or an integer (kept as its decimal string); other columns are kept beside, for
    ``privacy.group_column``; blank lines are skipped.

    Args:
        path: A UTF-8 file.

    Returns:
        One record a line, in the order of the file, with the id ``<file name>:<line>``.

    Raises:
        DatasetError: If the file is missing, is not UTF-8, has no records, or a line is malformed; names the file, the
            line and the column, never the text.
    """
    path = Path(path)
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise DatasetError(f"{path}: cannot be read ({error.strerror}); pass the path of a JSON Lines file") from error
    records = []
    for number, line in enumerate(lines, start=1):
        if line.strip():
            row = _parse_line(line, f"{path}, line {number}")
            others = {name: value for name, value in row.items() if name not in ("text", "label")}
            records.append(Record(row["text"], str(row["label"]), f"{path.name}:{number}", others))
    if not records:
        raise DatasetError(f'{path}: has no records; each line must be {{"text": "...", "label": "..."}}')
    return records


def _parse_line(line: bytes, where: str) -> dict[str, Any]:
    # Errors here never quote the line: it may be private.
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DatasetError(f"{where}, byte {error.start + 1}: is not UTF-8; convert the file to UTF-8") from None
    except json.JSONDecodeError as error:
        raise DatasetError(f"{where}, character {error.colno}: is not valid JSON ({error.msg})") from None
    if not isinstance(row, dict):
        raise DatasetError(f'{where}: is not a JSON object; write {{"text": ..., "label": ...}}')
    for column in ("text", "label"):
        if column not in row:
            raise DatasetError(f"{where}, column {column!r}: is missing; every line needs the columns text and label")
    if not isinstance(row["text"], str) or not row["text"].strip():
        raise DatasetError(f"{where}, column 'text': must be a string that is not empty")
    # bool is an int in Python, and True would become the class "True".
    if isinstance(row["label"], bool) or not isinstance(row["label"], str | int):
        raise DatasetError(
            f"{where}, column 'label': must be a string or an integer, not {type(row['label']).__name__}"
        )
    return row


def _shingles(text: str, vocabulary: dict[str, int]) -> np.ndarray:
    # Distinct 64-bit fingerprints of all runs of five words.
    words = re.findall(r"\w+", text.lower())
    ids = np.array([vocabulary.setdefault(word, len(vocabulary) + 1) for word in words], dtype=np.uint64)
    if len(ids) < _SHINGLE:
        return np.empty(0, dtype=np.uint64)
    fingerprint = np.zeros(len(ids) - _SHINGLE + 1, dtype=np.uint64)
    for offset in range(_SHINGLE):
        # Wraps modulo 2^64 on purpose.
        fingerprint = fingerprint * _MULTIPLIER + ids[offset : offset + len(fingerprint)]
    return np.unique(fingerprint)
