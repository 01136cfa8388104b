import json
from pathlib import Path

import pytest

from dprc_lightning.errors import DatasetError, DPRCError, InvalidArgumentError
from dprc_lightning.tasks.records import (
    Record,
    drop_duplicates,
    near_duplicate_pairs,
    read_jsonl,
    split_records,
)

LONG = " ".join(f"word{i}" for i in range(60))


def unrelated(n: int, label: str = "a") -> list[Record]:
    return [Record(text=" ".join(f"w{i}x{j}" for j in range(30)), label=label, id=str(i)) for i in range(n)]


def test_first_of_equal_texts_stays_and_the_rest_is_counted() -> None:
    records = [Record("x", "a", "1"), Record("y", "a", "2"), Record("x", "a", "3"), Record("x", "a", "4")]
    kept, dropped = drop_duplicates(records)
    assert [record.id for record in kept] == ["1", "2"]
    assert dropped == 2


def test_near_duplicates_ignore_case_space_and_punctuation() -> None:
    texts = [LONG, "something else entirely, five words or more", LONG.upper().replace(" ", ",  "), "short"]
    assert near_duplicate_pairs(texts) == [(0, 2)]


def test_near_duplicate_threshold_is_the_jaccard_similarity_of_five_word_runs() -> None:
    # 60 words have 56 runs; replacing the last 20 words keeps the first 36 runs: 36 / (56 + 56 - 36) = 0.474.
    changed = " ".join([*LONG.split()[:40], *(f"new{i}" for i in range(20))])
    assert near_duplicate_pairs([LONG, changed], threshold=0.47) == [(0, 1)]
    assert near_duplicate_pairs([LONG, changed], threshold=0.48) == []


def test_near_duplicates_of_nothing() -> None:
    assert near_duplicate_pairs([]) == []
    assert near_duplicate_pairs(["", ""]) == []


@pytest.mark.parametrize("threshold", [0.0, 1.1])
def test_threshold_out_of_range(threshold: float) -> None:
    with pytest.raises(InvalidArgumentError, match="threshold="):
        near_duplicate_pairs([LONG], threshold)


def test_split_is_disjoint_and_sized_and_does_not_depend_on_the_order_of_reading() -> None:
    records = unrelated(30)
    split = split_records(records, ["a"], (15, 5, 10))
    ids = [[record.id for record in part] for part in (split.train, split.validation, split.test)]
    assert [len(part) for part in ids] == [15, 5, 10]
    assert len({i for part in ids for i in part}) == 30
    assert split_records(records[::-1], ["a"], (15, 5, 10)) == split
    assert split_records(records, ["a"], (15, 5, 10), salt="another") != split


def test_split_permutes() -> None:
    split = split_records(unrelated(30), ["a"], (15, 5, 10))
    assert [int(record.id) for record in split.train] != sorted(int(record.id) for record in split.train)


def test_near_duplicates_all_go_to_training_and_are_counted() -> None:
    records = unrelated(30) + [Record(LONG, "a", "n1"), Record(LONG.upper(), "a", "n2"), Record(LONG, "a", "n3")]
    for salt in ("0", "1", "2", "3"):
        split = split_records(records, ["a"], (12, 8, 12), salt=salt)
        assert {"n1", "n2"} <= {record.id for record in split.train}
        assert (split.records_read, split.exact_duplicates, split.near_duplicates) == (33, 1, 2)


def test_split_errors() -> None:
    records = unrelated(3) + [Record("w", "a", "d1"), Record("w", "a", "d2")]
    with pytest.raises(DatasetError, match=r"sizes=\(3, 1, 1\).*only 4 different ones.*\(5 read\)"):
        split_records(records, ["a"], (3, 1, 1))
    with pytest.raises(DatasetError, match="label 'a' is not one of b, c"):
        split_records(records, ["c", "b"], (1, 1, 1))
    with pytest.raises(DatasetError, match="id '1'"):
        split_records([*records, Record("other", "a", "1")], ["a"], (1, 1, 1))
    with pytest.raises(InvalidArgumentError, match="sizes="):
        split_records(records, ["a"], (-1, 1, 1))
    with pytest.raises(InvalidArgumentError, match="at least 2 for training"):
        split_records([*unrelated(3), Record(LONG, "a", "x"), Record(LONG.upper(), "a", "y")], ["a"], (1, 2, 2))


def test_records_never_show_their_text() -> None:
    assert "secret" not in repr(Record("secret", "a", "1"))
    assert "w0x" not in repr(split_records(unrelated(3), ["a"], (1, 1, 1)))


def test_read_jsonl(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    rows = [{"text": "caf\u00e9\u2028one", "label": "x", "more": 1}, {"label": 3, "text": "two"}]
    file.write_text("\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\r\n", encoding="utf-8")
    assert read_jsonl(str(file)) == [
        Record("caf\u00e9\u2028one", "x", "data.jsonl:1"),
        Record("two", "3", "data.jsonl:3"),
    ]
    assert [record.columns for record in read_jsonl(file)] == [{"more": 1}, {}]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": "private", "label": }', "line 2, character 30: is not valid JSON"),
        (b'["private"]', "line 2: is not a JSON object"),
        (b'{"text": "private"}', "line 2, column 'label': is missing"),
        (b'{"label": "private"}', "line 2, column 'text': is missing"),
        (b'{"text": 7, "label": "private"}', "line 2, column 'text': must be a string"),
        (b'{"text": "  ", "label": "private"}', "line 2, column 'text': must be a string that is not empty"),
        (b'{"text": "private", "label": true}', "line 2, column 'label': .*not bool"),
        (b'{"text": "private", "label": null}', "line 2, column 'label': .*not NoneType"),
        (b'{"text": "private", "label": 0.5}', "line 2, column 'label': .*not float"),
        (b'{"text": "private\xa3", "label": "x"}', "line 2, byte 18: is not UTF-8"),
    ],
)
def test_malformed_lines_are_named_and_never_quoted(tmp_path: Path, line: bytes, message: str) -> None:
    file = tmp_path / "data.jsonl"
    file.write_bytes(b'{"text": "fine", "label": "x"}\n' + line + b"\n")
    with pytest.raises(DatasetError, match=message) as caught:
        read_jsonl(file)
    assert str(caught.value).startswith(str(file))
    assert "private" not in str(caught.value)


def test_missing_and_empty_files(tmp_path: Path) -> None:
    with pytest.raises(DPRCError, match="nowhere.jsonl: cannot be read"):
        read_jsonl(tmp_path / "nowhere.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n\n")
    with pytest.raises(DatasetError, match="has no records"):
        read_jsonl(tmp_path / "empty.jsonl")
