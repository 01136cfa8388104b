"""Ready-made tasks: data, models, and how a record becomes a loss.

Names are imported on first use, so that reading articles needs neither torch nor transformers.
"""

from importlib import import_module
from typing import Any

_EXPORTS = {
    "Record": "records",
    "TextSplit": "records",
    "drop_duplicates": "records",
    "near_duplicate_pairs": "records",
    "read_jsonl": "records",
    "split_records": "records",
    "load_bbc": "bbc",
    "read_bbc": "bbc",
    "load_pretrained": "smollm2",
    "load_tokenizer": "smollm2",
    "smollm2_folder": "smollm2",
    "PadCollator": "tokenized",
    "TokenizedRecords": "tokenized",
    "MeanPooledClassifier": "text_classifier",
    "load_text_classifier": "text_classifier",
    "public_sentences": "text_classifier",
}

__all__ = sorted(_EXPORTS)


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(f"{__name__}.{_EXPORTS[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
