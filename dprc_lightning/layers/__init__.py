"""Layers that add their per-record gradient norms in a backward pass, one file per kind."""

from dprc_lightning.layers.broadcast import BroadcastRule
from dprc_lightning.layers.fallback import PerRecordRule
from dprc_lightning.layers.instrumentation import ATTRIBUTE, Instrumentation
from dprc_lightning.layers.recording import record
from dprc_lightning.layers.registry import find_rule, register_rule, unregister_rule
from dprc_lightning.layers.rule import LayerRule, restore_class
from dprc_lightning.layers.tracker import ParameterTracker
from dprc_lightning.layers.tracking import Mode, PassState, Shown

__all__ = [
    "ATTRIBUTE",
    "BroadcastRule",
    "Instrumentation",
    "LayerRule",
    "Mode",
    "ParameterTracker",
    "PassState",
    "PerRecordRule",
    "Shown",
    "find_rule",
    "record",
    "register_rule",
    "restore_class",
    "unregister_rule",
]
