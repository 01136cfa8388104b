"""Which modules an engine that shards takes as a unit: each decoder layer, and what is left together at the root."""

from collections.abc import Sequence

from torch import nn

from dprc_lightning.errors import ConfigurationError
from dprc_lightning.layers.chunked_mlp import runs_in_pieces


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
    # An instrumented or sharded class is a subclass of the original one.
    found = [
        module
        for module in root.modules()
        if module is not root and any(cls.__name__ in names for cls in type(module).__mro__)
    ]
    if wrap is not None and not found:
        raise ConfigurationError([
            f"strategy {strategy}, wrap={list(wrap)}: no module of {type(root).__name__} is of such a class"
        ])
    for mlp in root.modules():
        inside = [module for module in mlp.modules() if module is not mlp] if runs_in_pieces(mlp) else []
        if any(module is layer for module in inside for layer in found):
            raise ConfigurationError([
                f"strategy {strategy}, wrap={list(names)}: a unit inside of an MLP that runs some tokens at a time "
                "(performance.mlp_chunk) would be gathered once for each piece, on some ranks more often than on "
                "others; wrap the MLP or the layer around it, or leave performance.mlp_chunk out"
            ])
    return [layer for layer in found[::-1] if any(True for _ in layer.parameters())]
