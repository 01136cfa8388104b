"""Callbacks that a DPRCModule brings along."""

from dprc_lightning.callbacks.privacy import PrivacyReport
from dprc_lightning.callbacks.stop import GracefulStop

__all__ = ["GracefulStop", "PrivacyReport"]
