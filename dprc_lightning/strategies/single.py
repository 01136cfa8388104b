"""One process, one device."""

from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy, StrategyRegistry

from dprc_lightning.checkpoint import DurableCheckpointIO
from dprc_lightning.errors import ConfigurationError
from dprc_lightning.noise import NoiseStream
from dprc_lightning.strategies.private import PrivateStrategy


class PrivateSingleDeviceStrategy(PrivateStrategy, SingleDeviceStrategy):
    """Lightning's single-device strategy with the noise hook. Alias: ``dprc_single``.

    Args:
        device: Where to train; by default what the trainer's accelerator offers.
        noise_stream: For tests only. A fixed stream makes the run NOT PRIVATE.
        **kwargs: As for Lightning's strategy.
    """

    strategy_name = "dprc_single"

    def __init__(
        self, device: str | torch.device | None = None, noise_stream: NoiseStream | None = None, **kwargs: Any
    ) -> None:
        kwargs.setdefault("checkpoint_io", DurableCheckpointIO())
        super().__init__(device="cpu" if device is None else device, **kwargs)
        self._device_is_given = device is not None
        self._init_privacy(noise_stream)

    @property
    def parallel_devices(self) -> list[torch.device]:
        """Where Lightning tells a strategy made from its alias which devices the accelerator found."""
        return []

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device]) -> None:
        if len(devices) > 1:
            raise ConfigurationError([
                f"trainer.devices={len(devices)}: strategy dprc_single runs one device; set trainer.strategy=dprc_ddp"
            ])
        if devices and not self._device_is_given:
            self._root_device = devices[0]

    def setup(self, trainer: Trainer) -> None:
        """Instrument, move, make optimizers, hook the noise.

        Args:
            trainer: The trainer.
        """
        with self._private_setup(trainer):
            super().setup(trainer)

    def teardown(self) -> None:
        """Give the model back as it was."""
        self._release()
        super().teardown()


StrategyRegistry.register(
    PrivateSingleDeviceStrategy.strategy_name,
    PrivateSingleDeviceStrategy,
    description="One device, differentially private",
    override=True,
)
