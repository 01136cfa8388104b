import pytest
import torch
from transformers import PreTrainedTokenizerFast

from dprc_lightning.errors import DatasetError, InvalidArgumentError
from dprc_lightning.tasks.records import Record
from dprc_lightning.tasks.tokenized import PadCollator, TokenizedRecords

RECORDS = [
    Record("the cat runs", "pets", "1"),
    Record("a dog sleeps in the sun and rain", "pets", "2"),
    Record(" ", "news", "3"),
]


def test_items_and_truncation_counts(word_tokenizer: PreTrainedTokenizerFast) -> None:
    data = TokenizedRecords(RECORDS, word_tokenizer, ["news", "pets"], max_length=5)
    assert len(data) == 3
    assert (data.records_truncated, data.tokens_dropped) == (1, 3)
    assert data[0]["input_ids"].tolist() == word_tokenizer.convert_tokens_to_ids(["the", "cat", "runs"])
    assert data[0]["input_ids"].dtype == torch.long
    assert [data[i]["length"] for i in range(3)] == [3, 5, 1]
    assert [data[i]["label"] for i in range(3)] == [1, 1, 0]
    # A text without tokens is one end-of-text token: a mean over nothing would be NaN.
    assert data[2]["input_ids"].tolist() == [word_tokenizer.eos_token_id]


def test_nothing_is_cut_at_the_very_length(word_tokenizer: PreTrainedTokenizerFast) -> None:
    data = TokenizedRecords(RECORDS, word_tokenizer, ["news", "pets"], max_length=8)
    assert (data.records_truncated, data.tokens_dropped) == (0, 0)
    assert len(TokenizedRecords([], word_tokenizer, ["news"], max_length=8)) == 0


def test_dataset_errors(word_tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(DatasetError, match="record '1': label 'pets' is not one of news"):
        TokenizedRecords(RECORDS, word_tokenizer, ["news"], max_length=8)
    with pytest.raises(InvalidArgumentError, match="max_length=0"):
        TokenizedRecords(RECORDS, word_tokenizer, ["news", "pets"], max_length=0)


@pytest.mark.parametrize(("pad_to", "width"), [(None, 5), (7, 7)])
def test_collation_pads_on_the_right(word_tokenizer: PreTrainedTokenizerFast, pad_to: int | None, width: int) -> None:
    data = TokenizedRecords(RECORDS, word_tokenizer, ["news", "pets"], max_length=5)
    batch = PadCollator(9, pad_to)([data[2], data[1]])
    assert batch["input_ids"].shape == (2, width)
    assert batch["input_ids"][0].tolist() == [word_tokenizer.eos_token_id] + [9] * (width - 1)
    assert batch["input_ids"][1].tolist() == data[1]["input_ids"].tolist() + [9] * (width - 5)
    assert batch["lengths"].tolist() == [1, 5]
    assert batch["labels"].tolist() == [0, 1]


def test_collation_errors(word_tokenizer: PreTrainedTokenizerFast) -> None:
    data = TokenizedRecords(RECORDS, word_tokenizer, ["news", "pets"], max_length=5)
    with pytest.raises(DatasetError, match="at least one record"):
        PadCollator(0)([])
    with pytest.raises(InvalidArgumentError, match="pad_to=4.*5 tokens"):
        PadCollator(0, pad_to=4)([data[1]])


def test_other_columns_tell_whose_a_record_is(word_tokenizer: PreTrainedTokenizerFast) -> None:
    records = [
        Record("the cat", "pets", "1", {"author": "x"}),
        Record("a dog", "pets", "2", {"author": "y", "year": 3}),
    ]
    data = TokenizedRecords(records, word_tokenizer, ["pets"], max_length=5)
    assert data.groups == {"author": ["x", "y"], "year": [None, 3]}
