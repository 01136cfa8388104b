"""Labelled texts as token ids: a map-style data set, and the collation of its items into padded batches."""

from collections.abc import Sequence
from typing import Any, TypedDict

import torch
from torch import Tensor
from torch.utils.data import Dataset

from dprc_lightning.errors import DatasetError, InvalidArgumentError
from dprc_lightning.tasks.records import Record, check_labels


class TokenizedItem(TypedDict):
    """One record: ``input_ids`` int64 [T_i], its ``length`` T_i >= 1, and its ``label``, an index into the classes."""

    input_ids: Tensor
    length: int
    label: int


class TokenizedBatch(TypedDict):
    """A batch: ``input_ids`` int64 [B, T] padded on the right, ``lengths`` int64 [B], ``labels`` int64 [B]."""

    input_ids: Tensor
    lengths: Tensor
    labels: Tensor


class TokenizedRecords(Dataset[TokenizedItem]):
    """Records, tokenised once and cut to a maximal length.

    Args:
        records: The records.
        tokenizer: A Hugging Face tokenizer.
        label_names: All classes, in the order of their integer labels. Public.
        max_length: Tokens to keep of each record, from its beginning; at least 1.

    Attributes:
        records_truncated: How many records were cut.
        tokens_dropped: How many tokens were cut from them, all together.
        groups: The records' other columns, [N] each: whose they are, for ``privacy.group_column``.

    Raises:
        InvalidArgumentError: If ``max_length`` is less than 1.
        DatasetError: If a label is not in ``label_names``.
    """

    def __init__(self, records: Sequence[Record], tokenizer: Any, label_names: Sequence[str], max_length: int) -> None:
        if max_length < 1:
            raise InvalidArgumentError("max_length", max_length, "keep at least 1 token of each record")
        check_labels(records, label_names)
        index = {name: i for i, name in enumerate(label_names)}
        texts = [record.text for record in records]
        rows = tokenizer(texts, verbose=False)["input_ids"] if texts else []
        # A text may have no tokens at all; a mean over none is undefined, so it becomes one end-of-text token.
        rows = [row or [tokenizer.eos_token_id] for row in rows]
        cut = [len(row) - max_length for row in rows if len(row) > max_length]
        self.records_truncated, self.tokens_dropped = len(cut), sum(cut)
        self._rows = [torch.tensor(row[:max_length], dtype=torch.long) for row in rows]
        self._labels = [index[record.label] for record in records]
        names = dict.fromkeys(name for record in records for name in record.columns)
        self.groups = {name: [record.columns.get(name) for record in records] for name in names}

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, i: int) -> TokenizedItem:
        return {"input_ids": self._rows[i], "length": len(self._rows[i]), "label": self._labels[i]}


class PadCollator:
    """Stacks items into one batch, padded on the right.

    The pad token may be a token that texts contain: everything downstream masks by length, never by token.

    Args:
        pad_token_id: What to fill with; any valid token id.
        pad_to: Pad every batch to this many tokens; None for the longest item of each batch. A fixed length keeps the
            shapes, and so the time and memory of a step, free of what the records are.
    """

    def __init__(self, pad_token_id: int, pad_to: int | None = None) -> None:
        self.pad_token_id, self.pad_to = pad_token_id, pad_to

    def __call__(self, items: Sequence[TokenizedItem]) -> TokenizedBatch:
        """Collate items.

        Args:
            items: At least one item.

        Returns:
            The batch, in the order of the items.

        Raises:
            DatasetError: If there are no items.
            InvalidArgumentError: If an item is longer than ``pad_to``.
        """
        if not items:
            raise DatasetError("items=[]: a batch needs at least one record; leave empty batches to the sampler")
        longest = max(item["length"] for item in items)
        width = longest if self.pad_to is None else self.pad_to
        if longest > width:
            raise InvalidArgumentError(
                "pad_to", self.pad_to, f"a record has {longest} tokens; use max_length <= pad_to"
            )
        input_ids = torch.full((len(items), width), self.pad_token_id, dtype=torch.long)
        for row, item in zip(input_ids, items, strict=True):
            row[: item["length"]] = item["input_ids"]
        return {
            "input_ids": input_ids,
            "lengths": torch.tensor([item["length"] for item in items]),
            "labels": torch.tensor([item["label"] for item in items]),
        }
