from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaModel, PreTrainedTokenizerFast

from dprc_lightning.errors import DatasetError, InvalidArgumentError
from dprc_lightning.tasks.bbc import load_bbc
from dprc_lightning.tasks.text_classifier import MeanPooledClassifier, load_text_classifier, public_sentences
from dprc_lightning.tasks.tokenized import PadCollator, TokenizedRecords

PAD = 0
ROWS = [[3, 4, 5], [6, 0, 8, 9, 10, 0], [11], [12, 13, 14, 15, 16, 17, 18, 19]]


def pad(rows: list[list[int]], width: int | None = None, token: int = PAD) -> tuple[Tensor, Tensor]:
    collate = PadCollator(token, width)
    batch = collate([{"input_ids": torch.tensor(row), "length": len(row), "label": 0} for row in rows])
    return batch["input_ids"], batch["lengths"]


@pytest.fixture
def build(tiny_llama: Callable[[], LlamaModel]) -> Callable[..., MeanPooledClassifier]:
    def make(head: bool = True, **settings: object) -> MeanPooledClassifier:
        model = MeanPooledClassifier(tiny_llama(), 5, **settings)  # type: ignore[arg-type]
        torch.manual_seed(1)
        model.set_public_mean(*pad([[3, 5, 7, 9], [4, 6, 8]]))
        if head:
            nn.init.normal_(model.head.weight)
            nn.init.normal_(model.head.bias)
        return model

    return make


def test_padding_and_batch_are_neutral(build: Callable[..., MeanPooledClassifier]) -> None:
    model = build()
    with torch.no_grad():
        together = model(*pad(ROWS))
        assert together.std(dim=0).min() > 0.01
        for i, row in enumerate(ROWS):
            torch.testing.assert_close(model(*pad([row])), together[i : i + 1], rtol=0, atol=1e-5)
            torch.testing.assert_close(model(*pad([row], 20)), together[i : i + 1], rtol=0, atol=1e-5)
            torch.testing.assert_close(model(*pad([row], 20, token=7)), together[i : i + 1], rtol=0, atol=1e-5)


def test_padding_is_neutral_for_gradients(build: Callable[..., MeanPooledClassifier]) -> None:
    gradients = []
    for width in (None, 20):
        model = build()
        model(*pad(ROWS, width))[:, 1].sum().backward()
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    assert len(gradients[0]) == 2 * 9 + 1 + 2
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-5)


def test_feature_is_the_centred_mean_over_the_length_pad_tokens_in_the_text_included(
    build: Callable[..., MeanPooledClassifier],
) -> None:
    model = build(scale=3.0)
    row = ROWS[1]
    assert PAD in row
    with torch.no_grad():
        states = model.backbone(input_ids=torch.tensor([row])).last_hidden_state[0]
        direction = states.mean(dim=0) / states.mean(dim=0).norm()
        centred = direction - model.public_mean
        features = model.features(*pad([row], 12))
    torch.testing.assert_close(features[0], 3.0 * centred / centred.norm(), rtol=1e-5, atol=1e-5)


def test_public_mean_is_the_mean_direction(build: Callable[..., MeanPooledClassifier]) -> None:
    model = build()
    rows = [[3, 5, 7, 9], [4, 6, 8]]
    with torch.no_grad():
        states = [model.backbone(input_ids=torch.tensor([row])).last_hidden_state[0].mean(dim=0) for row in rows]
    expected = torch.stack([state / state.norm() for state in states]).mean(dim=0)
    torch.testing.assert_close(model.public_mean, expected, rtol=1e-5, atol=1e-6)
    assert not model.public_mean.requires_grad
    assert "public_mean" in model.state_dict()
    assert "public_mean" not in dict(model.named_parameters())


def test_head_starts_at_zero_and_then_nothing_below_it_has_a_gradient(
    build: Callable[..., MeanPooledClassifier],
) -> None:
    model = build(head=False)
    logits = model(*pad(ROWS))
    assert torch.equal(logits.softmax(dim=1), torch.full((4, 5), 0.2))
    nn.functional.cross_entropy(logits, torch.tensor([0, 1, 2, 3])).backward()
    assert model.head.weight.grad is not None and model.head.weight.grad.norm() > 0.1
    assert all(not p.grad.any() for p in model.backbone.parameters() if p.grad is not None)


MATRICES = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
MATRICES += ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]


@pytest.mark.parametrize("blocks", [0, 1, 2, 3])
def test_what_trains(build: Callable[..., MeanPooledClassifier], blocks: int) -> None:
    model = build(trainable_blocks=blocks)
    expected = {"head.weight", "head.bias"} | ({"backbone.norm.weight"} if blocks else set())
    for layer in range(3 - blocks, 3):
        for name in [*MATRICES, "input_layernorm", "post_attention_layernorm"]:
            expected.add(f"backbone.layers.{layer}.{name}.weight")
    assert {name for name, p in model.named_parameters() if p.requires_grad} == expected
    model(*pad(ROWS))[:, 0].sum().backward()
    assert {name for name, p in model.named_parameters() if p.grad is not None} == expected


def test_frozen_layers_record_no_graph(build: Callable[..., MeanPooledClassifier]) -> None:
    model = build(trainable_blocks=1)
    needs_grad: list[bool] = []
    for layer in model.backbone.layers:
        layer.register_forward_hook(lambda _module, _inputs, output: needs_grad.append(output.requires_grad))
    model(*pad(ROWS))
    assert needs_grad == [False, False, True]


def test_every_trainable_module_is_called_once_with_the_records_first(
    build: Callable[..., MeanPooledClassifier],
) -> None:
    model = build(trainable_blocks=2)
    calls: Counter[str] = Counter()
    owners = {name.rpartition(".")[0] for name, p in model.named_parameters() if p.requires_grad}
    for name in owners:

        def count(_module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor, name: str = name) -> None:
            calls[name] += 1
            assert len(inputs) == 1 and inputs[0].shape[0] == output.shape[0] == len(ROWS)

        model.get_submodule(name).register_forward_hook(count)
    model(*pad(ROWS))
    assert calls == Counter(owners) and len(owners) == 2 * 9 + 2


def test_bfloat16_computes_in_half_but_hands_out_float32(build: Callable[..., MeanPooledClassifier]) -> None:
    full, half = build(), build(compute_dtype="bfloat16")
    dtypes: list[torch.dtype] = []
    half.backbone.layers[1].mlp.up_proj.register_forward_hook(lambda _m, _i, output: dtypes.append(output.dtype))
    logits = half(*pad(ROWS))
    assert dtypes == [torch.bfloat16]
    assert logits.dtype == half.features(*pad(ROWS)).dtype == torch.float32
    assert {p.dtype for p in half.parameters()} == {torch.float32}
    exact = full(*pad(ROWS))
    assert not torch.equal(logits, exact)
    torch.testing.assert_close(logits, exact, rtol=0.05, atol=0.2)


def test_features_and_logits_are_float32_under_the_callers_autocast(build: Callable[..., MeanPooledClassifier]) -> None:
    model = build()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        features = model.features(*pad(ROWS))
        logits = model(*pad(ROWS))
    assert features.dtype == logits.dtype == torch.float32
    torch.testing.assert_close(features.norm(dim=1), torch.full((4,), 5.0))
    torch.testing.assert_close(logits, model.head(features), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_classes": 1}, "num_classes=1"),
        ({"trainable_blocks": -1}, "trainable_blocks=-1"),
        ({"trainable_blocks": 4}, "trainable_blocks=4: pass 0 to 3"),
        ({"scale": 0.0}, "scale=0.0"),
        ({"scale": float("nan")}, "scale=nan"),
        ({"compute_dtype": "float16"}, "compute_dtype='float16'"),
        ({"backbone": nn.Linear(2, 2)}, "backbone='Linear'"),
    ],
)
def test_arguments_out_of_range(
    tiny_llama: Callable[[], LlamaModel], settings: dict[str, object], message: str
) -> None:
    arguments = {"backbone": tiny_llama(), "num_classes": 5} | settings
    with pytest.raises(InvalidArgumentError, match=message):
        MeanPooledClassifier(**arguments)  # type: ignore[arg-type]


def test_public_sentences(tmp_path: Path) -> None:
    texts = public_sentences()
    assert len(texts) == len(set(texts)) == 20
    assert not any(text.startswith("#") for text in texts)
    (tmp_path / "own.txt").write_text("# comment\n\none\n two \n")
    assert public_sentences(tmp_path / "own.txt") == ["one", "two"]
    (tmp_path / "own.txt").write_text("# comment\n")
    with pytest.raises(DatasetError, match="own.txt: has no public texts"):
        public_sentences(tmp_path / "own.txt")


def test_loading_from_a_folder(
    tiny_llama: Callable[[], LlamaModel], word_tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    tiny_llama().save_pretrained(tmp_path)
    word_tokenizer.save_pretrained(tmp_path)
    texts = ["the cat runs in the rain", "a dog sleeps"]
    model, tokenizer = load_text_classifier(str(tmp_path), 4, num_layers=2, max_length=4, sentences=texts)
    rows = [tokenizer(text)["input_ids"][:4] for text in texts]
    expected = MeanPooledClassifier(model.backbone, 4)
    expected.set_public_mean(*pad(rows))
    torch.testing.assert_close(model.public_mean, expected.public_mean)
    assert model(*pad(rows)).shape == (2, 4)
    with pytest.raises(InvalidArgumentError, match="sentences="):
        load_text_classifier(str(tmp_path), num_layers=2, sentences=[])


@pytest.mark.data
def test_the_real_model_separates_the_real_articles(smollm2_cache: Path) -> None:
    model, tokenizer = load_text_classifier(compute_dtype="bfloat16", cache_dir=smollm2_cache)
    split = load_bbc()
    data = TokenizedRecords(split.train[-160:], tokenizer, split.label_names, max_length=48)
    batch = PadCollator(tokenizer.pad_token_id)([data[i] for i in range(len(data))])
    with torch.no_grad():
        features = model.features(batch["input_ids"], batch["lengths"])
    labels = batch["labels"]
    means = torch.stack([features[:100][labels[:100] == c].mean(dim=0) for c in range(5)])
    accuracy = ((features[100:] @ means.T).argmax(dim=1) == labels[100:]).double().mean()
    # The same shape with random weights stays near the largest class, about 0.25.
    assert accuracy > 0.75
    # Padding must be neutral in the real model too.
    model.compute_dtype = "float32"
    nn.init.normal_(model.head.weight, std=0.1)
    ids = data[0]["input_ids"]
    wide = torch.full((3, 64), tokenizer.pad_token_id)
    wide[1, : len(ids)] = ids
    with torch.no_grad():
        alone = model(ids[None], torch.tensor([len(ids)]))
        padded = model(wide, torch.tensor([64, len(ids), 1]))
    torch.testing.assert_close(padded[1:2], alone, rtol=0, atol=1e-5)
