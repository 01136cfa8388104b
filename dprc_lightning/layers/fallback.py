"""Any small layer: its own forward, record by record, with a copy of its parameters for each (`torch.vmap`)."""

from typing import Any

import torch
from torch import Tensor, nn

from dprc_lightning.errors import UnsupportedModuleError
from dprc_lightning.layers.instrumentation import instrumentation
from dprc_lightning.layers.recording import per_record_parameter
from dprc_lightning.layers.rule import LayerRule, detached_parameters, replaced_parameters


class PerRecordRule(LayerRule):
    """For a layer without a rule of its own: ``register_rule(PerRecordRule(MyLayer))``.

    Every norm is exact, and the forward sees one record at a time (as a batch of one), so it cannot mix them. Memory: B
    times the layer's parameters in each pass, so not for large matrices. The forward must consist of operations that
    `torch.vmap` can batch, take and return tensors whose first dimension is the record, and change no buffer; the layer
    owns its parameters itself, not through child modules.

    Args:
        module_class: The class of the layer.
    """

    def __init__(self, module_class: type[nn.Module]) -> None:
        super().__init__()
        self._class = module_class

    def matches(self, module: nn.Module) -> bool:
        """Whether this rule is for the module."""
        if type(module) is not self._class:
            return False
        self.kinds = {**self.kinds, **dict.fromkeys(module._parameters, "vector")}
        return True

    def refuse(self, module: nn.Module) -> str | None:
        """Why the module's settings cannot be handled, or None."""
        children = [name for name, _ in module.named_parameters() if "." in name]
        if children:
            return (
                f"PerRecordRule is for layers without child modules, and it has {children[0]}; write a LayerRule for it"
            )
        return None

    def forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """The layer's own forward under `torch.vmap`.

        Args:
            module: The layer.
            *args: Tensors [B, ...]; anything else goes to every record as it is.
            **kwargs: Likewise.

        Returns:
            What its own forward returns.

        Raises:
            UnsupportedModuleError: The first dimensions of the inputs differ, or `torch.vmap` cannot run it.
        """
        carried = instrumentation(module)
        inputs = [*args, *kwargs.values()]
        shapes = [tuple(v.shape) for v in inputs if isinstance(v, Tensor)]
        if not shapes or len({shape[:1] for shape in shapes}) != 1 or not shapes[0]:
            raise UnsupportedModuleError(
                f"module {carried.name!r}: its forward got tensors of shapes {shapes}, and PerRecordRule needs the "
                "record to be the first dimension of all; write a LayerRule for it"
            )
        records = shapes[0][0]
        if records == 0:
            with detached_parameters(module, carried.trackers):
                return carried.original_class.forward(module, *args, **kwargs)
        copies = {name: per_record_parameter(module, name, records, new_axis=True) for name in carried.trackers}

        def one_record(parameters: dict[str, Tensor], values: list[Any]) -> Any:
            given = [v.unsqueeze(0) if mapped else v for v, mapped in zip(values, is_mapped, strict=True)]
            with replaced_parameters(module, parameters):
                keywords = dict(zip(kwargs, given[len(args) :], strict=True))
                output = carried.original_class.forward(module, *given[: len(args)], **keywords)
            return torch.utils._pytree.tree_map_only(Tensor, lambda t: t.squeeze(0), output)

        is_mapped = [isinstance(v, Tensor) for v in inputs]
        in_dims = (0, [0 if mapped else None for mapped in is_mapped])
        try:
            return torch.vmap(one_record, in_dims=in_dims, randomness="different")(copies, inputs)
        except RuntimeError as error:
            # torch has no type for an operation without a batching rule (an LSTM, say).
            raise UnsupportedModuleError(
                f"module {carried.name!r}: torch.vmap cannot run its forward record by record ({error}); write a "
                "LayerRule for it, or freeze it"
            ) from error
