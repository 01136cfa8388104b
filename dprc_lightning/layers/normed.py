"""The head's input made anew from the input of the norm before it, so that the norm's output need not stay."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dprc_lightning.layers.rule import replaced_parameters


@dataclass(frozen=True, eq=False)
class NormRecipe:
    """How a norm that treats each token by itself made its output.

    Attributes:
        module: The norm.
        original_class: Its own class.
        weight: [d], a copy: an engine may have sharded its own again when the head's backward runs.
    """

    module: nn.Module
    original_class: Any
    weight: Tensor

    def __call__(self, x: Tensor) -> Tensor:
        """The norm's forward.

        Args:
            x: [B, T, d].

        Returns:
            Likewise, without a graph.
        """
        with torch.no_grad(), replaced_parameters(self.module, {"weight": self.weight}):
            made: Tensor = self.original_class.forward(self.module, x)
        return made


@dataclass(frozen=True, eq=False)
class Normed:
    """One forward of such a norm; kept from there to the head, no longer.

    Attributes:
        recipe: How.
        x: [B, T, d], its input, detached: the norm keeps the same memory for its own backward.
        out: [B, T, d], its output. Held so that nothing else comes to lie in its place.
        version: Of the output, when the norm gave it.
    """

    recipe: NormRecipe
    x: Tensor
    out: Tensor
    version: int

    @classmethod
    def of(cls, recipe: NormRecipe, x: Tensor, out: Tensor) -> "Normed":
        """Note a forward.

        Args:
            recipe: How it was made.
            x: Its input.
            out: Its output.

        Returns:
            The note.
        """
        return cls(recipe, x.detach(), out.detach(), out._version)

    def gave(self, hidden: Tensor) -> bool:
        """Whether a tensor is the norm's output: the same memory, and unchanged since.

        Args:
            hidden: [B, T, d].

        Returns:
            Whether it is.
        """

        def place(tensor: Tensor) -> tuple[Any, ...]:
            # Not data_ptr: tensors without memory (meta) all have the same.
            storage = tensor.untyped_storage()._cdata
            return storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version

        unchanged = self.out._version == self.version
        alike = self.x.shape == self.out.shape and self.x.dtype is self.out.dtype
        return unchanged and alike and place(hidden) == place(self.out)


@dataclass(frozen=True, eq=False)
class HeadInput:
    """The head's input, some tokens of one record at a time.

    Attributes:
        kept: [B, T, d]: the input itself; or the norm's, with a recipe.
        recipe: What makes it anew; None for the input itself.
    """

    kept: Tensor
    recipe: NormRecipe | None = None

    def rows(self, record: int, rows: slice) -> Tensor:
        """Some tokens.

        Args:
            record: Of which record.
            rows: Which tokens.

        Returns:
            [rows, d]. Each time by the same operations on the same shapes, so the same numbers.
        """
        if self.recipe is None:
            return self.kept[record, rows]
        return self.recipe(self.kept[record : record + 1, rows])[0]
