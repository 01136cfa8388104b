"""Differentially private fine-tuning at long context: DP-SGD with randomized clipping on PyTorch Lightning.

The public names are imported lazily, so that ``dprc --help`` and ``dprc calibrate`` start without torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_EXPORTS = {
    "DPRCModule": "dprc_lightning.module",
    "DPRCDataModule": "dprc_lightning.datamodule",
    "PrivacyConfig": "dprc_lightning.config",
    "PerformanceConfig": "dprc_lightning.config",
    "PoissonBatchSampler": "dprc_lightning.sampling",
    "attach": "dprc_lightning.clipping",
    "add_gaussian_noise": "dprc_lightning.noise",
}

if TYPE_CHECKING:
    from dprc_lightning.clipping import attach as attach
    from dprc_lightning.config import PerformanceConfig as PerformanceConfig
    from dprc_lightning.config import PrivacyConfig as PrivacyConfig
    from dprc_lightning.datamodule import DPRCDataModule as DPRCDataModule
    from dprc_lightning.module import DPRCModule as DPRCModule
    from dprc_lightning.noise import add_gaussian_noise as add_gaussian_noise
    from dprc_lightning.sampling import PoissonBatchSampler as PoissonBatchSampler

__all__ = sorted([*_EXPORTS, "__version__"])


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(import_module(_EXPORTS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
