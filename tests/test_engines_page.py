"""docs/engines.md: its links lead somewhere, its names exist, its YAML is a strategy that can be made."""

import importlib
import re
from pathlib import Path

import pytest
import yaml
from lightning.pytorch.strategies import StrategyRegistry

import dprc_lightning.strategies  # noqa: F401 (registers the aliases)
from dprc_lightning.strategies.refusals import deepspeed_problems

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "engines.md"
TEXT = PAGE.read_text()
SNIPPETS = re.findall(r"^```yaml\n(.*?)^```", TEXT, flags=re.MULTILINE | re.DOTALL)


def test_links_and_files():
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", TEXT)
    assert links and all((PAGE.parent / link).exists() for link in links if "://" not in link)
    files = re.findall(r"\b(?:configs|tests)/[\w/.]+\w", TEXT)
    assert files and all((ROOT / file).exists() for file in files), files
    assert "docs/engines.md" in (ROOT / "README.md").read_text()


def test_every_alias_is_registered_and_none_is_left_out():
    named = set(re.findall(r"\bdprc_(?:single|ddp|fsdp2?|deepspeed_stage_\d)\b", TEXT))
    named |= {f"dprc_deepspeed_stage_{stage}" for stage in (2, 3)}
    assert named == {name for name in StrategyRegistry.available_strategies() if name.startswith("dprc_")}


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_yaml_makes_a_strategy(snippet):
    strategy = yaml.safe_load(snippet)["trainer"]["strategy"]
    module, name = strategy["class_path"].rsplit(".", 1)
    assert getattr(importlib.import_module(module), name)(**strategy["init_args"]).strategy_name in TEXT


def test_there_is_a_snippet():
    assert SNIPPETS


@pytest.mark.parametrize(
    ("zero", "said"),
    [
        ({"offload_optimizer": {"device": "nvme"}}, "nvme"),
        ({"offload_optimizer": {"device": "cpu", "ratio": 0.5}}, "ratio=0.5"),
        ({"offload_optimizer": {"device": "cpu", "super_offload": True}}, "super_offload"),
        ({"mics_shard_size": 2}, "mics_shard_size=2"),
        ({"zero_hpz_partition_size": 2}, "zero_hpz_partition_size=2"),
    ],
)
def test_what_the_page_says_is_refused(zero, said):
    assert not list(deepspeed_problems({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}, 3))
    (problem,) = deepspeed_problems({"zero_optimization": {"stage": 3} | zero}, 3)
    assert said in problem


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "csv_monitor", "comet"])
def test_monitors_of_deepspeed_are_refused(name):
    (problem,) = deepspeed_problems({"zero_optimization": {"stage": 2}, name: {"enabled": True}}, 2)
    assert problem.startswith(f"{name}.enabled=True")
