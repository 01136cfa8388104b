"""A Llama of a few thousand parameters, and a tokenizer of whole words, so that most tests need nothing installed."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaModel, PreTrainedTokenizerFast

WORDS = [
    "<eos>",
    "<unk>",
    *"the a cat dog runs sleeps in sun rain and bank market goal team vote law chip code song film".split(),
]


@pytest.fixture
def tiny_llama() -> Callable[[], LlamaModel]:
    def build() -> LlamaModel:
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=len(WORDS),
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            pad_token_id=0,
            eos_token_id=0,
            bos_token_id=0,
        )
        return LlamaModel(config).eval()

    return build


@pytest.fixture(scope="session")
def word_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", unk_token="<unk>")


@pytest.fixture(scope="session")
def smollm2_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache of its own: the conversion under test runs once a session, whatever lies in the user's cache."""
    return tmp_path_factory.mktemp("cache")
