"""Callbacks that a DPRCModule brings along."""

from dprc_lightning.callbacks.privacy import PrivacyReport

__all__ = ["PrivacyReport"]
