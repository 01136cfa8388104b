"""Strategies that add calibrated noise to the reduced gradient, each engine in a file of its own."""

from dprc_lightning.strategies.ddp import PrivateDDPStrategy
from dprc_lightning.strategies.deepspeed import PrivateDeepSpeedStrategy
from dprc_lightning.strategies.fsdp import PrivateFSDPStrategy
from dprc_lightning.strategies.fsdp2 import PrivateFSDP2Strategy
from dprc_lightning.strategies.noise_hook import NoiseHook
from dprc_lightning.strategies.private import PrivateStrategy
from dprc_lightning.strategies.single import PrivateSingleDeviceStrategy

__all__ = [
    "NoiseHook",
    "PrivateDDPStrategy",
    "PrivateDeepSpeedStrategy",
    "PrivateFSDP2Strategy",
    "PrivateFSDPStrategy",
    "PrivateSingleDeviceStrategy",
    "PrivateStrategy",
]
