"""Before a model is instrumented: which modules own a trainable parameter, by which rule, and what is refused."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from dprc_lightning.errors import UnclippedGradientError, UnsupportedModuleError
from dprc_lightning.layers import ATTRIBUTE, LayerRule, ParameterTracker, find_rule
from dprc_lightning.layers.normalization import HuggingFaceRMSNormRule
from dprc_lightning.layers.tracker import ParameterEstimator
from dprc_lightning.sketch import cheaper_side

Owners = dict[str, tuple[nn.Module, LayerRule]]


def model_problems(model: nn.Module) -> dict[str, str]:
    """What no rule for a parameter could mend.

    Args:
        model: The whole model.

    Returns:
        Module name -> one line for each module that is compiled, mixes records, keeps statistics of them, or
        checkpoints activations in a way in which no norm pass can run, or only one of another gradient.
    """
    problems: dict[str, str] = {}
    for name, module in model.named_modules():
        where = f"module {name or type(model).__name__!r} ({type(module).__name__})"
        # By name: importing the class would import the whole compiler.
        if type(module).__name__ == "OptimizedModule" or module._compiled_call_impl is not None:
            problems[name] = (
                f"{where}: torch.compile would bake one of the two passes into its graph; train without compilation"
            )
        norm = isinstance(module, nn.modules.batchnorm._NormBase)
        if norm and (isinstance(module, nn.modules.batchnorm._BatchNorm) or module.track_running_stats):
            # Frozen too: it mixes the records of a batch, or releases running statistics without noise.
            problems[name] = (
                f"{where}: it normalises over the records of a batch, or keeps running statistics of them; replace it "
                "by a GroupNorm, LayerNorm or RMSNorm"
            )
        for problem in _checkpointing_problems(module):
            # Every part of a Hugging Face model says so again.
            if not any(problem in known for known in problems.values()):
                problems[name] = f"{where}: {problem}"
    return problems


def _checkpointing_problems(module: nn.Module) -> Iterator[str]:
    """Settings of activation checkpointing that a module shows: Hugging Face's, and torch's CheckpointWrapper."""
    if getattr(module, "gradient_checkpointing", False):
        settings = getattr(getattr(module, "_gradient_checkpointing_func", None), "keywords", {})
        # Hugging Face's own default is non-reentrant, torch's is to be told.
        settings = {"use_reentrant": False, **settings}
        how = "activation_checkpointing_enable(activation_checkpointing_kwargs={!r})"
    elif type(module).__name__ == "CheckpointWrapper":
        settings = getattr(module.checkpoint_fn, "keywords", {})
        how = "checkpoint_wrapper with {!r}"
    else:
        return
    if settings.get("use_reentrant") is True:
        yield f"{how.format(settings)}: reentrant checkpointing cannot run the norm pass; set use_reentrant=False"
    if settings.get("preserve_rng_state") is False:
        yield (
            f"{how.format(settings)}: the norm pass would draw other dropout masks than the clipped backward; set "
            "preserve_rng_state=True"
        )


def trainable(module: nn.Module) -> list[str]:
    """Local names of the trainable parameters that a module owns itself."""
    return [n for n, p in module._parameters.items() if p is not None and p.requires_grad]


def find_owners(model: nn.Module, known: Mapping[int, Any] | None = None) -> Owners:
    """Modules that own a trainable parameter directly, with their rules.

    Args:
        model: The whole model.
        known: By id, the parameters that are instrumented already.

    Returns:
        Module name -> module and rule.

    Raises:
        UnsupportedModuleError: All that cannot be handled, or a module that is attached already.
    """
    owners: Owners = {}
    refused = model_problems(model)
    problems = list(refused.values())
    for name, module in model.named_modules():
        names = [n for n in trainable(module) if not known or id(module._parameters[n]) not in known]
        if not names or name in refused:
            continue
        label = name or type(model).__name__
        if ATTRIBUTE in module.__dict__ and known is None:
            raise UnsupportedModuleError(f"module {label!r} is attached already; call detach() on the first handle")
        original = module.__dict__[ATTRIBUTE].original_class if ATTRIBUTE in module.__dict__ else None
        rule = module.__dict__[ATTRIBUTE].rule if original else find_rule(module)
        where = f"module {label!r} ({(original or type(module)).__name__})"
        freeze = "freeze it (requires_grad=False), or replace the module by a supported one"
        if rule is None:
            listed = f"parameter{'s' * (len(names) > 1)} {', '.join(map(repr, names))}"
            problems.append(
                f"{where}, {listed}: no rule for per-record norms of this module; {freeze}, or register_rule one"
            )
            continue
        reason = None if original else rule.refuse(module)
        if reason is not None:
            problems.append(f"{where}, parameter {names[0]!r}: {reason}")
        problems += [
            f"{where}, parameter {n!r}: {type(rule).__name__} does not cover it, only {', '.join(rule.kinds)}; {freeze}"
            for n in names
            if n not in rule.kinds
        ]
        owners[name] = (module, rule)
    if problems:
        raise UnsupportedModuleError("; ".join(problems))
    return owners


def frozen_norms(model: nn.Module) -> Iterator[tuple[str, nn.Module, LayerRule]]:
    """Hugging Face's RMSNorms of a known form that have nothing to train, and so no owner's class.

    Args:
        model: The whole model, its owners instrumented.

    Yields:
        Name, module and rule.
    """
    for name, module in model.named_modules():
        rule = None if ATTRIBUTE in module.__dict__ else find_rule(module)
        if isinstance(rule, HuggingFaceRMSNormRule) and rule.refuse(module) is None:
            yield name, module, rule


def make_trackers(
    model: nn.Module, owners: Owners, estimator: str, sketch_dim: int, known: Mapping[str, ParameterTracker]
) -> dict[str, ParameterTracker]:
    """One tracker for each trainable parameter of the owners.

    Args:
        model: The whole model.
        owners: As `find_owners` returned them.
        estimator: See `attach`.
        sketch_dim: k.
        known: Trackers that exist already, by parameter name; not changed.

    Returns:
        Parameter name -> tracker, of the new ones.

    Raises:
        UnsupportedModuleError: A parameter that layers of different kinds share, or one in float16.
        UnclippedGradientError: A parameter has a gradient already.
    """
    trackers: dict[str, ParameterTracker] = {}
    names = {id(p): n for n, p in model.named_parameters()}
    for module_name, (module, rule) in owners.items():
        for local in trainable(module):
            parameter = module._parameters[local]
            assert parameter is not None
            name = names[id(parameter)]
            if name in known:
                continue
            if name in trackers and trackers[name].kind != rule.kinds[local]:
                raise UnsupportedModuleError(
                    f"parameter {name!r} is shared by layers of different kinds ({trackers[name].modules[0]!r} and "
                    f"{module_name!r}); give each its own, or freeze it"
                )
            if parameter.dtype not in (torch.float32, torch.float64, torch.bfloat16):
                raise UnsupportedModuleError(
                    f"parameter {name!r} is {parameter.dtype}: small gradients are lost in it without loss scaling, "
                    "which is not accounted; keep trainable parameters in float32 or bfloat16"
                )
            if parameter.grad is not None:
                raise UnclippedGradientError(
                    f"parameter {name!r} has a gradient from before attach(); call model.zero_grad() first"
                )
            if name not in trackers:
                trackers[name] = _make_tracker(name, parameter, rule.kinds[local], estimator, sketch_dim)
            tracker = trackers[name]
            tracker.modules.append(module_name or type(module).__name__)
            if local in rule.sides:
                tracker.side = rule.sides[local]  # type: ignore[assignment]
    return trackers


def _make_tracker(name: str, parameter: nn.Parameter, kind: str, estimator: str, sketch_dim: int) -> ParameterTracker:
    if kind == "vector":
        return ParameterTracker(name, parameter, "vector", "exact", 0)
    n0, n1 = parameter.shape[0], parameter.shape[1:].numel()
    chosen: ParameterEstimator = "exact"
    if estimator == "hutchpp":
        # From k columns on the head is the whole gradient: the exact norm is the same number, had at less cost.
        chosen = "exact" if min(n0, n1) <= sketch_dim else "hutchpp"
    elif estimator == "hutchinson" or (estimator == "auto" and n0 * n1 > sketch_dim * (n0 + n1)):
        chosen = "hutchinson"
    return ParameterTracker(name, parameter, "matrix", chosen, cheaper_side(n0, n1))
