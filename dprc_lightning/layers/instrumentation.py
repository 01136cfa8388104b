"""What `attach` leaves in a module, and what its instrumented forward asks of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dprc_lightning.layers.tracker import ParameterTracker
from dprc_lightning.layers.tracking import PassState, Shown


@dataclass(frozen=True)
class Instrumentation:
    """What an instrumented module carries, in its ``__dict__`` and so outside of its state dict.

    Attributes:
        state: The model's pass state.
        name: The module's name in the model.
        rule: How it is instrumented.
        trackers: Local parameter name (``weight``) -> tracker, for the trainable ones.
        original_class: To go back to.
    """

    state: PassState
    name: str
    rule: Any
    trackers: Mapping[str, ParameterTracker]
    original_class: type[nn.Module]


ATTRIBUTE = "_dprc_instrumentation"


def instrumentation(module: nn.Module) -> Instrumentation:
    """What `attach` left in a module.

    Args:
        module: An instrumented module.

    Returns:
        The pass state, name and trackers.
    """
    carried: Instrumentation = module.__dict__[ATTRIBUTE]
    return carried


def parameter_in_use(module: nn.Module, name: str) -> Tensor | None:
    """What a module takes for its parameter now.

    Args:
        module: Any module.
        name: Local name of the parameter.

    Returns:
        The parameter; or the tensor that an engine, which has taken it out, has set as a plain attribute.
    """
    parameter = module._parameters.get(name)
    return module.__dict__.get(name) if parameter is None else parameter


def active(module: nn.Module, name: str) -> tuple[PassState, ParameterTracker] | None:
    """Whether this forward must go through an autograd Function for one of the module's parameters.

    Args:
        module: An instrumented module.
        name: Local name of the parameter.

    Returns:
        The pass state and the tracker, or None where the parameter is frozen or no graph is being built.

    Raises:
        UnsupportedModuleError: The module's parameter is not the one that was attached.
    """
    carried = instrumentation(module)
    tracker = carried.trackers.get(name)
    if tracker is None or not tracker.parameter.requires_grad or not torch.is_grad_enabled():
        return None
    if carried.state.parts is not None:
        # A part made anew inside of a backward, of the weights that the forward was counted and checked with.
        return carried.state, tracker
    current = parameter_in_use(module, name)
    expected = tracker.parameter if carried.state.shown is Shown.ITSELF else tracker.stand_in
    if current is not expected:
        carried.state.meet(tracker, current)
    carried.state.count_use(tracker)
    return carried.state, tracker
