"""A small private regression under Lightning, and a noise stream of zeros to see what lies below the noise."""

import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dprc_lightning import DPRCDataModule, DPRCModule, PerformanceConfig, PrivacyConfig
from dprc_lightning.keys import RunSecret
from dprc_lightning.noise import NoiseStream
from dprc_lightning.strategies import PrivateSingleDeviceStrategy


class ZeroNoise(NoiseStream):
    """No noise at all: what remains is the clipped average."""

    def __init__(self) -> None:
        super().__init__(bytes(32))
        self.is_test = True
        self.drawn = 0

    def normal(self, n: int) -> Tensor:
        self.drawn += n
        return torch.zeros(n, dtype=torch.float64)


def share_secret(monkeypatch: Any, source: Path) -> None:
    """Let the next run draw what another one drew: no run does by itself, whatever lies in its folder."""
    key = (source / "secret.key").read_bytes()

    def create(cls: type[RunSecret], folder: Path) -> RunSecret:
        path = Path(folder) / "secret.key"
        path.write_bytes(key)
        path.chmod(0o600)
        return cls.load(folder)

    monkeypatch.setattr(RunSecret, "create", classmethod(create))


class ToyModule(DPRCModule):
    def __init__(self, privacy: PrivacyConfig, performance: PerformanceConfig | None = None, width: int = 4) -> None:
        super().__init__(privacy, performance or PerformanceConfig(physical_batch_size=3))
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 2))
        self.sequences: list[int] = []
        self.batch_sizes: list[int] = []
        self.fail_at: int | None = None

    def per_sample_loss(self, batch: list[Tensor]) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.net(x) * 5, y, reduction="none")

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.sequences.append(batch.sequence)
        self.batch_sizes.append(sum(len(m[0]) for m in batch.micro_batches))
        super().training_step(batch, batch_idx)
        if self.fail_at is not None and len(self.sequences) == self.fail_at:
            raise RuntimeError("the machine was switched off")

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        x, y = batch
        self.log("val/accuracy", (self.net(x).argmax(-1) == y).float().mean())

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        x, y = batch
        self.log("test/accuracy", (self.net(x).argmax(-1) == y).float().mean())


class SlowToEnd(ToyModule):
    """Rank 0 has more to do at the end than the others, and more than the five seconds between two looks at them."""

    def on_fit_end(self) -> None:
        if self.global_rank == 0:
            time.sleep(7)


class ToyData(DPRCDataModule):
    def __init__(self, records: int = 40) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(records, 3, generator=generator)
        self.y = (self.x[:, 0] > 0).long()

    def train_dataset(self) -> TensorDataset:
        return TensorDataset(self.x, self.y)

    def val_dataset(self) -> TensorDataset:
        return TensorDataset(self.x, self.y)

    test_dataset = val_dataset


def privacy(**changes: Any) -> PrivacyConfig:
    settings: dict[str, Any] = {
        "noise_multiplier": 1.0,
        "delta": 1e-3,
        "sample_rate": 0.25,
        "steps": 4,
        "max_grad_norm": 0.5,
        "estimator": "exact",
    }
    return PrivacyConfig(**(settings | changes))


def trainer(folder: Path, noise: NoiseStream | None = None, **changes: Any) -> pl.Trainer:
    settings: dict[str, Any] = {
        "default_root_dir": folder,
        "accelerator": "cpu",
        "strategy": PrivateSingleDeviceStrategy(noise_stream=noise),
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "limit_val_batches": 0,
        "enable_checkpointing": False,
    }
    return pl.Trainer(**(settings | changes))


def checkpointing(folder: Path) -> dict[str, Any]:
    every = ModelCheckpoint(folder / "checkpoints", save_top_k=-1, every_n_train_steps=1, filename="{step}")
    return {"callbacks": [every], "enable_checkpointing": True}
