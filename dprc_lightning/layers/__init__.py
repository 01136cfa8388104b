"""Layers that add their per-record gradient norms in a backward pass, one file per kind."""

from dprc_lightning.layers.registry import LayerRule, find_rule
from dprc_lightning.layers.tracker import ParameterTracker
from dprc_lightning.layers.tracking import ATTRIBUTE, Instrumentation, Mode, PassState

__all__ = ["ATTRIBUTE", "Instrumentation", "LayerRule", "Mode", "ParameterTracker", "PassState", "find_rule"]
