"""The quickstart's module and data on a tiny model and a file of one's own: nothing needs to be installed."""

import copy
import json
from collections.abc import Callable
from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from transformers import LlamaModel, PreTrainedTokenizerFast

from dprc_lightning import PerformanceConfig, PrivacyConfig
from dprc_lightning.errors import ConfigurationError
from dprc_lightning.report import read_report
from dprc_lightning.strategies import PrivateSingleDeviceStrategy
from dprc_lightning.tasks.classification import TextClassification, TextClassificationData

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def source(tiny_llama: Callable[[], LlamaModel], word_tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> str:
    folder = tmp_path / "model"
    tiny_llama().save_pretrained(folder)
    word_tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture
def records(tmp_path: Path) -> Path:
    path = tmp_path / "records.jsonl"
    sports, finance = ("team", "goal", "film"), ("bank", "market", "law")
    rows = []
    for i in range(90):
        words = (sports, finance)[i % 2]
        extra = " ".join(["rain", "sun", "dog", "cat", "code"][int(d) % 5] for d in f"{i:03d}")
        rows.append({"text": f"the {words[i % 3]} {extra}", "label": ("sports", "finance")[i % 2]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def module_of(source: str, **changes) -> TextClassification:
    privacy = {"noise_multiplier": 0.7, "delta": 1e-2, "expected_batch_size": 20, "steps": 6, "estimator": "hutchinson"}
    return TextClassification(
        PrivacyConfig(**(privacy | changes.pop("privacy", {}))),
        PerformanceConfig(**changes.pop("performance", {"physical_batch_size": 8})),
        source=source,
        num_layers=3,
        num_classes=2,
        max_length=8,
        lr=1e-3,
        head_lr=0.1,
        **changes,
    )


def data_of(records: Path, source: str) -> TextClassificationData:
    sizes = (50, 10, 20)
    return TextClassificationData(str(records), ["sports", "finance"], sizes, source, 8, eval_batch_size=10)


def trainer(folder: Path) -> pl.Trainer:
    return pl.Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        strategy=PrivateSingleDeviceStrategy(),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        num_sanity_val_steps=0,
    )


@pytest.mark.parametrize("performance", [{"physical_batch_size": 8}, {"physical_batch_size": None, "max_tokens": 40}])
def test_whole_blocks_train_with_sketched_norms(source, records, tmp_path, performance):
    module = module_of(source, performance=performance)
    before = copy.deepcopy(module.state_dict())
    run = trainer(tmp_path / "run")
    run.fit(module, datamodule=data_of(records, source))
    moved = {n for n, p in module.state_dict().items() if not torch.equal(p, before[n])}
    assert moved == {n for n, p in module.named_parameters() if p.requires_grad}
    assert any("layers.2.mlp" in n for n in moved) and not any("layers.0." in n for n in moved)
    run.test(module, datamodule=data_of(records, source), verbose=False)
    report = read_report(tmp_path / "run")
    assert report["data"]["test_majority_class_accuracy"] >= 0.5
    assert report["data"]["sizes"] == {"train": 50, "validation": 10, "test": 20}
    assert 0 <= report["metrics"]["test/accuracy"] <= 1
    sketched = {p["parameter"] for p in report["parameters"] if p["estimator"] == "hutchinson"}
    assert len(sketched) == 2 * 7 + 1


def test_the_head_has_its_own_learning_rate(source):
    optimizer = module_of(source).configure_optimizers()["optimizer"]
    assert [(group["lr"], len(group["params"])) for group in optimizer.param_groups] == [(1e-3, 2 * 9 + 1), (0.1, 2)]
    assert len(module_of(source, trainable_blocks=0).configure_optimizers()["optimizer"].param_groups) == 1


def test_learning_rates_fall_to_zero_over_the_run(source, records, tmp_path):
    run = trainer(tmp_path / "run")
    run.fit(module_of(source), datamodule=data_of(records, source))
    assert run.strategy.lr_scheduler_configs[0].scheduler.get_last_lr() == [0.0, 0.0]


def test_a_file_needs_its_labels(records, source):
    with pytest.raises(ConfigurationError, match="give both"):
        TextClassificationData(path=str(records))
