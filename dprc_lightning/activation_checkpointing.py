"""Activation checkpointing that the library turns on by itself, and off again when the run is over."""

from typing import Any

from torch import nn

from dprc_lightning.offload import checkpoints_activations

_SET_BY_HUGGING_FACE = (
    "gradient_checkpointing",
    "_gradient_checkpointing_func",
    "_require_grads_hook",
    "_require_grads_hooks",
)


def checkpointable(model: nn.Module) -> list[Any]:
    """The parts of a model whose activations could be checkpointed and are not.

    Args:
        model: Any model.

    Returns:
        Its outermost Hugging Face models; none if anything in it checkpoints already: then its user has decided.
    """
    from transformers import PreTrainedModel

    if any(checkpoints_activations(module) for module in model.modules()):
        return []
    found: list[Any] = []
    inside: set[int] = set()
    for module in model.modules():
        if isinstance(module, PreTrainedModel) and id(module) not in inside:
            inside |= {id(part) for part in module.modules()}
            if module.supports_gradient_checkpointing:
                found.append(module)
    return found


class ActivationCheckpointing:
    """Hugging Face's own, non-reentrant, of each part that `checkpointable` finds, until `remove`.

    What is computed is the same, bit for bit: each pass makes the activations again from the same inputs.

    Args:
        model: Any model.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parts = checkpointable(model)
        self._before = [
            (module, {name: vars(module)[name] for name in _SET_BY_HUGGING_FACE if name in vars(module)})
            for part in self._parts
            for module in part.modules()
        ]
        for part in self._parts:
            part.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})

    def remove(self) -> None:
        """Make the model what it was; twice changes nothing."""
        for part in self._parts:
            part.activation_checkpointing_disable()
        for module, before in self._before:
            for name in _SET_BY_HUGGING_FACE:
                vars(module).pop(name, None)
            vars(module).update(before)
        self._parts, self._before = [], []
