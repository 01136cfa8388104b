"""Parameters that a module adds to, or puts before, every record: a class token, learned positions of patches."""

from typing import Any

from torch import Tensor, nn

from dprc_lightning.errors import UnsupportedModuleError
from dprc_lightning.layers.instrumentation import instrumentation
from dprc_lightning.layers.recording import per_record_parameter
from dprc_lightning.layers.rule import LayerRule, replaced_parameters


class BroadcastRule(LayerRule):
    """A module with parameters of shape [1, ...] whose first axis its forward broadcasts, or expands, over the records.

    The forward gets each one expanded to [B, ...] instead, so that its gradient arrives once per record. The module
    must treat that axis as it treats the records' own; `PrivacyConfig.check_isolation` tries it.

    Args:
        module_class: The class of the module, or its name where importing it is not wanted.
        names: The parameters.
    """

    def __init__(self, module_class: type[nn.Module] | str, names: tuple[str, ...]) -> None:
        super().__init__()
        self._class = module_class
        self.kinds = dict.fromkeys(names, "vector")

    def matches(self, module: nn.Module) -> bool:
        """Whether this rule is for the module."""
        cls = type(module)
        return self._class in (cls, f"{cls.__module__}.{cls.__name__}")

    def refuse(self, module: nn.Module) -> str | None:
        """Why the module's settings cannot be handled, or None."""
        for name in self.kinds:
            parameter = module._parameters.get(name)
            if parameter is not None and parameter.requires_grad and parameter.shape[:1] != (1,):
                return f"{name} has shape {tuple(parameter.shape)}; its first axis must be 1"
        return None

    def forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """The module's own forward, with a copy of each parameter per record.

        Args:
            module: The module.
            *args: The first tensor is [B, ...].
            **kwargs: Likewise.

        Returns:
            What its own forward returns.

        Raises:
            UnsupportedModuleError: No input is a tensor.
        """
        carried = instrumentation(module)
        records = next((v.shape[0] for v in (*args, *kwargs.values()) if isinstance(v, Tensor) and v.ndim > 1), None)
        if records is None:
            raise UnsupportedModuleError(
                f"module {carried.name!r}: its forward got no tensor [B, ...], which tells the number of records"
            )
        copies = {name: per_record_parameter(module, name, records, new_axis=False) for name in carried.trackers}
        with replaced_parameters(module, copies):
            return carried.original_class.forward(module, *args, **kwargs)
