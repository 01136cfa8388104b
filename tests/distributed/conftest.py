"""Tests of DeepSpeed need a compiler: without one they are skipped, and say why. Never in CI, where they fail."""

import importlib.util
import os

import pytest

from dprc_lightning.strategies.deepspeed_op import missing_tools


def why_not() -> str | None:
    if importlib.util.find_spec("deepspeed") is None:
        return 'deepspeed is not installed: pip install -e ".[deepspeed]"'
    missing = missing_tools()
    return f"DeepSpeed compiles an op, and {' and '.join(missing)} cannot be found" if missing else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = None if os.environ.get("CI") else why_not()
    if reason is None:
        return
    for item in items:
        if "distributed" in item.path.parts and any(word in item.name for word in ("zero", "deepspeed")):
            item.add_marker(pytest.mark.skip(reason=reason))
