"""Convolutions without groups: a linear layer on unfolded patches."""

from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from dprc_lightning.layers.rule import LayerRule


class Conv2dRule(LayerRule):
    """Exactly `torch.nn.Conv2d` with ``groups=1`` and zero padding; its weight is a matrix [out, in * height * width].

    Extra memory in each pass: the unfolded input of the micro-batch, (kernel size / stride) times its own size per
    axis; for a vision transformer's patches no more than the input.
    """

    module_class: ClassVar[type[nn.Module] | None] = nn.Conv2d
    kinds = {"weight": "matrix", "bias": "vector"}

    def refuse(self, module: nn.Module) -> str | None:
        """Why the module's settings cannot be handled, or None."""
        assert isinstance(module, nn.Conv2d | nn.Conv1d)
        if module.groups != 1:
            return f"groups={module.groups} is not supported; freeze it, or register_rule(PerRecordRule(...))"
        if module.padding_mode != "zeros" or isinstance(module.padding, str):
            return f"padding={module.padding!r}, padding_mode={module.padding_mode!r}: give the zero padding as numbers"
        return None

    def gradient(self, module: Any, name: str, output_gradient: Tensor, x: Tensor) -> Any:
        """See `LayerRule.gradient`.

        Args:
            module: The layer.
            name: ``weight`` or ``bias``.
            output_gradient: [B, out, height, width].
            x: [B, in, height, width].

        Returns:
            For the weight its factors, for the bias the output gradient by position.
        """
        by_position = output_gradient.flatten(2).mT
        if name == "bias":
            return by_position
        patches = F.unfold(x, module.kernel_size, module.dilation, module.padding, module.stride)
        return by_position, patches.mT.to(by_position.dtype)


class Conv1dRule(Conv2dRule):
    """Exactly `torch.nn.Conv1d`, in the same way."""

    module_class: ClassVar[type[nn.Module] | None] = nn.Conv1d

    def gradient(self, module: Any, name: str, output_gradient: Tensor, x: Tensor) -> Any:
        """See `LayerRule.gradient`.

        Args:
            module: The layer.
            name: ``weight`` or ``bias``.
            output_gradient: [B, out, T].
            x: [B, in, T].

        Returns:
            For the weight its factors, for the bias the output gradient by position.
        """
        if name == "bias":
            return output_gradient.mT
        one = (1, module.kernel_size[0]), (1, module.dilation[0]), (0, module.padding[0]), (1, module.stride[0])
        return output_gradient.mT, F.unfold(x.unsqueeze(2), *one).mT.to(output_gradient.dtype)
