"""A layer rule: what the library must know of one kind of layer to take its per-record gradient norms."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn

from dprc_lightning.errors import UnsupportedModuleError
from dprc_lightning.layers.instrumentation import instrumentation, parameter_in_use
from dprc_lightning.layers.recording import record
from dprc_lightning.layers.tracing import note_tracing

INSTRUMENTED = "_dprc_instrumented"
"""Marks the classes that `attach` puts in the place of others."""


class LayerRule:
    """How to instrument one kind of layer. For one of your own, two attributes and one formula do.

    ::

        class ScaleRule(LayerRule):
            module_class = Scale                # its forward: return x * self.weight
            kinds = {"weight": "vector"}

            def gradient(self, module, name, output_gradient, x):
                return output_gradient * x      # [B, ..., *weight.shape], one per position

        register_rule(ScaleRule())

    A rule is trusted: the guarantee rests on its formula. Hold it against one backward per record, as `tests` do.

    Attributes:
        module_class: The class it is for; subclasses are not matched, they may use a parameter otherwise.
        kinds: Local parameter name -> ``vector`` (its per-record gradient is small and formed) or ``matrix`` (its
            per-record gradient is the product of two factors), for every parameter that the rule covers.
        sides: Local parameter name -> the axis (0 or 1) that P must contract, where the layer leaves no choice.
    """

    module_class: ClassVar[type[nn.Module] | None] = None
    kinds: Mapping[str, str] = {}
    sides: Mapping[str, int] = {}

    def __init__(self) -> None:
        self._classes: dict[type[nn.Module], type[nn.Module]] = {}

    def matches(self, module: nn.Module) -> bool:
        """Whether this rule is for the module."""
        return type(module) is self.module_class

    def refuse(self, module: nn.Module) -> str | None:
        """Why the module's settings cannot be handled, in half a sentence with the remedy, or None."""
        return None

    def gradient(self, module: Any, name: str, output_gradient: Tensor, *args: Any, **kwargs: Any) -> Any:
        """One parameter's gradient, per position: see `record`.

        Args:
            module: The module.
            name: Local name of the parameter.
            output_gradient: [B, ...], of the shape of the module's output.
            *args: What the module's forward was called with.
            **kwargs: Likewise.

        Returns:
            For a vector a tensor [B, ..., *shape]; for a matrix its factors (left [B, ..., n0], right [B, ..., n1]).
        """
        raise NotImplementedError(f"{type(self).__name__}.gradient")

    def forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """The instrumented forward: the module's own, with its parameters detached, then one `record` for each.

        Args:
            module: The module.
            *args: What it was called with.
            **kwargs: Likewise.

        Returns:
            What its own forward returns.

        Raises:
            UnsupportedModuleError: It does not return a tensor.
        """
        carried = instrumentation(module)
        with detached_parameters(module, carried.trackers):
            output = carried.original_class.forward(module, *args, **kwargs)
        if not isinstance(output, Tensor):
            raise UnsupportedModuleError(
                f"module {carried.name!r}: its forward returns a {type(output).__name__}, and {type(self).__name__} "
                "needs one tensor; write the rule's forward"
            )
        # Not the arguments themselves: a formula that held them would keep activations that a checkpoint gave up.
        count, keywords = len(args), list(kwargs)
        for name in carried.trackers:

            def gradient(output_gradient: Tensor, *saved: Any, name: str = name) -> Any:
                positional, named = saved[:count], dict(zip(keywords, saved[count:], strict=True))
                return self.gradient(module, name, output_gradient, *positional, **named)

            output = record(module, name, output, gradient, *args, *kwargs.values())
        return output

    def instrumented_class(self, module: nn.Module) -> type[nn.Module]:
        """The class that takes the place of the module's own: a subclass of it, made once."""
        original, rule = type(module), self

        def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            """Same values as the original class."""
            if torch.compiler.is_compiling():
                note_tracing()
            return rule.forward(self, *args, **kwargs)

        def reduce(self: nn.Module, protocol: object) -> NoReturn:
            # A copy would share the projection's key and be guarded by nothing.
            raise UnsupportedModuleError("an attached model cannot be copied or pickled: call detach() first")

        if original not in self._classes:
            members = {"forward": forward, "__reduce_ex__": reduce, "__module__": __name__, INSTRUMENTED: True}
            self._classes[original] = type(f"Instrumented{original.__name__}", (original,), members)
        return self._classes[original]


def restore_class(module: nn.Module, original: type[nn.Module]) -> None:
    """Take the instrumented class out again, also from under a class that an engine has made of it since.

    Args:
        module: An instrumented module.
        original: What it was.
    """
    current = type(module)
    if INSTRUMENTED in current.__dict__:
        module.__class__ = original
        return
    # `fully_shard` makes a subclass of the class it finds.
    bases = tuple(original if INSTRUMENTED in base.__dict__ else base for base in current.__bases__)
    members = {name: value for name, value in vars(current).items() if name not in {"__dict__", "__weakref__"}}
    module.__class__ = type(f"FSDP{original.__name__}", bases, members)


@contextmanager
def detached_parameters(module: nn.Module, names: Mapping[str, Any]) -> Iterator[None]:
    """Inside, the module's forward finds its parameters detached: their gradients come by `record` instead.

    Args:
        module: The module.
        names: Local names.
    """
    with replaced_parameters(module, {name: parameter_in_use(module, name).detach() for name in names}):  # type: ignore[union-attr]
        yield


@contextmanager
def replaced_parameters(module: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Inside, the module's forward finds other tensors in the place of its parameters.

    Args:
        module: The module.
        tensors: Local name -> tensor.
    """
    # An instance attribute comes before what nn.Module looks up among its parameters. An engine may have set one too.
    before = {name: module.__dict__[name] for name in tensors if name in module.__dict__}
    module.__dict__.update(tensors)
    try:
        yield
    finally:
        for name in tensors:
            del module.__dict__[name]
        module.__dict__.update(before)
