"""``performance: auto``, short for ``performance: {memory: auto}``: in files, on the command line, in Python."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import yaml
from jsonargparse import get_loader, set_loader

from dprc_lightning.config import PerformanceConfig
from dprc_lightning.errors import InvalidArgumentError

if TYPE_CHECKING:
    Performance = PerformanceConfig | Literal["auto"]
else:
    # Commands link settings of this very class to the model's; there the short form is spelled out before.
    Performance = PerformanceConfig

AUTO = "auto"
_MODE = "yaml_with_shorthand"


def parser_mode() -> str:
    """How a parser must read files and values to know the short form.

    Returns:
        For jsonargparse's ``parser_mode``.
    """
    set_loader(_MODE, _load, exceptions=(yaml.YAMLError,))
    return _MODE


def spelled_out(arguments: Sequence[str]) -> list[str]:
    """Arguments without the short form: what follows may then set the other fields.

    Args:
        arguments: ``--performance auto`` or ``--performance=auto``, among others.

    Returns:
        The same with ``--performance.memory=auto``.
    """
    found: list[str] = []
    for argument in arguments:
        if argument == AUTO and found and found[-1] == "--performance":
            found[-1] = f"--performance={AUTO}"
        else:
            found.append(argument)
    return [f"--performance.memory={AUTO}" if part == f"--performance={AUTO}" else part for part in found]


def performance_of(given: Performance) -> PerformanceConfig:
    """The settings behind the short form.

    Args:
        given: The settings, or the short form.

    Returns:
        The settings.

    Raises:
        InvalidArgumentError: Another word.
    """
    if given == AUTO:
        return PerformanceConfig(memory="auto")
    if not isinstance(given, PerformanceConfig):
        raise InvalidArgumentError("performance", given, f"expected a PerformanceConfig, or {AUTO!r}")
    return given


def _load(text: str) -> Any:
    loaded = get_loader("yaml")(text)
    if not isinstance(loaded, dict):
        return loaded
    # A file may be that of one subcommand, or have them as keys.
    return {
        key: {"memory": AUTO}
        if key == "performance" and value == AUTO
        else {**value, "performance": {"memory": AUTO}}
        if key == "fit" and isinstance(value, dict) and value.get("performance") == AUTO
        else value
        for key, value in loaded.items()
    }
