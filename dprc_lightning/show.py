"""What a command found, as lines for people or as JSON for programs."""

import json
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any


def show(found: dict[str, Any], form: str, settings: Mapping[str, Any] = MappingProxyType({})) -> None:
    """Print what was found in its own order, then the settings by name.

    Args:
        found: By name; a value may be a dict of values.
        form: ``table`` or ``json``.
        settings: What it was found for.
    """
    if form == "json":
        print(json.dumps(_finite({**found, **settings}), allow_nan=False))
        return
    lines = []
    for name, value in [*found.items(), *sorted(settings.items())]:
        for row, entry in value.items() if isinstance(value, dict) else [("", value)]:
            lines.append((f"{name} {row}".strip(), "exact norms" if entry is None else str(entry)))
    width = max(len(name) for name, _ in lines)
    for name, entry in lines:
        print(f"{name:<{width}}  {entry}")


def _finite(value: Any) -> Any:
    """JSON has no infinity: null says that there is no number."""
    if isinstance(value, dict):
        return {name: _finite(entry) for name, entry in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
