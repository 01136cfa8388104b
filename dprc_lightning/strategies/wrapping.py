"""Which modules an engine that shards takes as a unit: each decoder layer, and what is left together at the root."""

from collections import Counter
from collections.abc import Iterator, Sequence

from torch import nn

from dprc_lightning.errors import ConfigurationError
from dprc_lightning.layers.chunked_mlp import runs_in_pieces

_CONTAINERS = frozenset({"ModuleList", "ModuleDict", "Module", "object"})


def roots_to_wrap(module: nn.Module, strategy: str) -> list[nn.Module]:
    """The submodules of a LightningModule that hold parameters: each is a root, called by its own forward.

    Not the LightningModule itself: a step calls `per_sample_loss`, past its forward, and an engine's hooks on it would
    never run.

    Args:
        module: The LightningModule.
        strategy: Its alias, for messages.

    Returns:
        The children.

    Raises:
        ConfigurationError: A parameter of the LightningModule's own, or one that two children share.
    """
    problems = [
        f"strategy {strategy}: parameter {name!r} is the LightningModule's own, which is not sharded; put it into a "
        "submodule with a forward"
        for name, _ in module.named_parameters(recurse=False)
    ]
    roots = [child for child in module.children() if any(True for _ in child.parameters())]
    owner: dict[int, str] = {}
    for name, child in module.named_children():
        for inner, parameter in child.named_parameters():
            if owner.setdefault(id(parameter), name) != name:
                problems.append(
                    f"strategy {strategy}: {owner[id(parameter)]!r} and {name!r} share parameter {inner!r}, which one "
                    "unit must hold; put both into one submodule, and call that"
                )
    if problems:
        raise ConfigurationError(problems)
    return roots


def layers_to_wrap(root: nn.Module, wrap: Sequence[str] | None, strategy: str) -> list[nn.Module]:
    """The layers below a root that are units of their own, inner ones first.

    Never each leaf: a gather of one small matrix at a time is all latency.

    Args:
        root: From `roots_to_wrap`.
        wrap: Class names; default: what Hugging Face models name in `_no_split_modules`.
        strategy: Its alias, for messages.

    Returns:
        The layers; none if nothing tells.

    Raises:
        ConfigurationError: No module has one of the given names, or one lies inside of an MLP that runs in pieces.
    """
    names = set(wrap or ())
    if wrap is None:
        for module in root.modules():
            names.update(getattr(module, "_no_split_modules", None) or ())
    # A container has no forward on which an engine's hooks could hang.
    names -= _CONTAINERS
    # An instrumented or sharded class is a subclass of the original one.
    found = [
        module
        for module in root.modules()
        if module is not root and any(cls.__name__ in names for cls in type(module).__mro__)
    ]
    if wrap is not None and not found:
        raise ConfigurationError([f"strategy {strategy}, {_no_such_class(root, wrap)}"])
    for mlp in root.modules():
        inside = [module for module in mlp.modules() if module is not mlp] if runs_in_pieces(mlp) else []
        if any(module is layer for module in inside for layer in found):
            raise ConfigurationError([
                f"strategy {strategy}, wrap={list(names)}: a unit inside of an MLP that runs some tokens at a time "
                "(performance.mlp_chunk) would be gathered once for each piece, on some ranks more often than on "
                "others; wrap the MLP or the layer around it, or leave performance.mlp_chunk out"
            ])
    return [layer for layer in found[::-1] if any(True for _ in layer.parameters())]


def wrap_problems(module: nn.Module, wrap: Sequence[str] | None) -> Iterator[str]:
    """Whether ``wrap`` names what a module has, as far as that can be seen before the model is made.

    Args:
        module: The LightningModule.
        wrap: Class names, or None.

    Yields:
        One line at most.
    """
    classes = {cls.__name__ for child in module.modules() for cls in type(child).__mro__}
    if wrap is not None and any(True for _ in module.parameters()) and not set(wrap) & (classes - _CONTAINERS):
        yield _no_such_class(module, wrap)


def _no_such_class(root: nn.Module, wrap: Sequence[str]) -> str:
    counts = Counter(type(child).__name__ for child in root.modules() if any(True for _ in child.children()))
    repeated = [name for name, count in counts.items() if count > 1 and name not in _CONTAINERS]
    there = f"such as {', '.join(repeated)}" if repeated else "or leave it out"
    return f"wrap={list(wrap)}: no module with a forward is of such a class; name the class of its layers, {there}"


def check_ties(root: nn.Module, layers: Sequence[nn.Module], strategy: str) -> None:
    """A weight that two modules share must lie in one unit: sharding two would untie it.

    Args:
        root: From `roots_to_wrap`.
        layers: Its units, from `layers_to_wrap`.
        strategy: Its alias, for messages.

    Raises:
        ConfigurationError: One lies in two.
    """
    units = {id(layer) for layer in layers}
    owner: dict[int, tuple[int, str]] = {}

    def look(module: nn.Module, unit: int, path: str) -> None:
        unit = id(module) if id(module) in units else unit
        for local, parameter in module._parameters.items():
            if parameter is None:
                continue
            other, first = owner.setdefault(id(parameter), (unit, f"{path}{local}"))
            if other != unit:
                raise ConfigurationError([
                    f"strategy {strategy}: parameters {first!r} and {path + local!r} are one, in two units; leave one "
                    "of the two classes out of wrap"
                ])
        for local, child in module.named_children():
            look(child, unit, f"{path}{local}.")

    look(root, 0, "")
