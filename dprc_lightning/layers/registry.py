"""Which module classes can be instrumented, and how: one rule per layer kind."""

from torch import nn

from dprc_lightning.errors import InvalidArgumentError
from dprc_lightning.layers.broadcast import BroadcastRule
from dprc_lightning.layers.conv import Conv1dRule, Conv2dRule
from dprc_lightning.layers.embedding import EmbeddingRule, HuggingFaceScaledEmbeddingRule
from dprc_lightning.layers.linear import HuggingFaceConv1DRule, LinearRule
from dprc_lightning.layers.normalization import HuggingFaceRMSNormRule, LayerNormRule, TorchRMSNormRule
from dprc_lightning.layers.rule import LayerRule

_RULES: list[LayerRule] = [
    LinearRule(),
    EmbeddingRule(),
    HuggingFaceScaledEmbeddingRule(),
    LayerNormRule(),
    TorchRMSNormRule(),
    HuggingFaceRMSNormRule(),
    HuggingFaceConv1DRule(),
    Conv2dRule(),
    Conv1dRule(),
    BroadcastRule("transformers.models.vit.modeling_vit.ViTEmbeddings", ("cls_token", "position_embeddings")),
]


def find_rule(module: nn.Module) -> LayerRule | None:
    """The rule for a module.

    Args:
        module: Any module.

    Returns:
        The first rule that matches, or None.
    """
    return next((rule for rule in _RULES if rule.matches(module)), None)


def register_rule(rule: LayerRule) -> None:
    """Make a rule known, for models attached from now on. It comes before all that are known already.

    Args:
        rule: The rule. The guarantee rests on its formula: hold it against one backward per record.

    Raises:
        InvalidArgumentError: It is not an instance of a `LayerRule`.
    """
    if not isinstance(rule, LayerRule):
        raise InvalidArgumentError("rule", rule, "expected an instance of a subclass of LayerRule")
    _RULES.insert(0, rule)


def unregister_rule(rule: LayerRule) -> None:
    """Forget a rule.

    Args:
        rule: One that was registered.
    """
    _RULES.remove(rule)
