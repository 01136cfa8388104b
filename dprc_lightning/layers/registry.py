"""Which module classes can be instrumented, and how: one rule per layer kind."""

from collections.abc import Mapping
from typing import Protocol

from torch import nn

from dprc_lightning.layers.embedding import EmbeddingRule
from dprc_lightning.layers.linear import LinearRule
from dprc_lightning.layers.normalization import HuggingFaceRMSNormRule, TorchRMSNormRule


class LayerRule(Protocol):
    """How to instrument one kind of layer.

    Attributes:
        kinds: Local parameter name -> ``matrix`` or ``vector``, for every parameter that the rule covers.
        sides: Local parameter name -> the axis that P must contract, where the layer leaves no choice.
    """

    @property
    def kinds(self) -> Mapping[str, str]:
        """Local parameter name -> ``matrix`` or ``vector``."""

    @property
    def sides(self) -> Mapping[str, int]:
        """Local parameter name -> axis that P must contract."""

    def matches(self, module: nn.Module) -> bool:
        """Whether this rule is for the module."""

    def refuse(self, module: nn.Module) -> str | None:
        """Why the module's settings cannot be handled, or None."""

    def instrumented_class(self, module: nn.Module) -> type[nn.Module]:
        """The class that takes the place of the module's own."""


_RULES: list[LayerRule] = [LinearRule(), EmbeddingRule(), TorchRMSNormRule(), HuggingFaceRMSNormRule()]


def find_rule(module: nn.Module) -> LayerRule | None:
    """The rule for a module.

    Args:
        module: Any module.

    Returns:
        The first rule that matches, or None.
    """
    return next((rule for rule in _RULES if rule.matches(module)), None)
