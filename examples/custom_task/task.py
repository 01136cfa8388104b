"""Which of four motifs hides in a DNA sequence: a small convolutional network, and data to train it on."""

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from dprc_lightning import DPRCDataModule, DPRCModule, PerformanceConfig, PrivacyConfig

MOTIFS = torch.tensor([[0, 1, 2, 3, 3, 2], [2, 2, 0, 3, 1, 1], [3, 0, 3, 0, 1, 2], [1, 3, 1, 2, 0, 0]])


class MotifNet(DPRCModule):
    """The library makes the private training step; what is left is a loss per record and an optimizer."""

    def __init__(self, privacy: PrivacyConfig, performance: PerformanceConfig, width: int = 32, lr: float = 0.02):
        super().__init__(privacy, performance)
        self.lr = lr
        self.bases = nn.Embedding(4, 8)
        self.detector = nn.Conv1d(8, width, kernel_size=6)
        self.head = nn.Linear(width, len(MOTIFS))

    def forward(self, sequences: Tensor) -> Tensor:
        """Scores of the motifs: the best match over all places counts."""
        return self.head(self.detector(self.bases(sequences).transpose(1, 2)).relu().amax(-1))

    def per_sample_loss(self, batch: list[Tensor]) -> Tensor:
        """Losses [B] of a batch (sequences, labels), each of its own sequence alone: no batch norm."""
        return nn.functional.cross_entropy(self(batch[0]), batch[1], reduction="none")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """One optimizer; the noise is in the gradients before it sees them."""
        return torch.optim.Adam(self.parameters(), lr=self.lr)

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Accuracy on sequences that are not protected."""
        self.log("val/accuracy", (self(batch[0]).argmax(-1) == batch[1]).float().mean(), sync_dist=True)


class MotifData(DPRCDataModule):
    """Map-style data sets; the library draws the Poisson batches and builds the loaders."""

    def __init__(self, records: int = 2000, length: int = 24) -> None:
        super().__init__()
        self.records, self.length = records, length

    def train_dataset(self) -> TensorDataset:
        """The private records: one sequence is one unit of privacy."""
        return self._draw(self.records, seed=1)

    def val_dataset(self) -> TensorDataset:
        """Sequences for validation."""
        return self._draw(1000, seed=2)

    def _draw(self, n: int, seed: int) -> TensorDataset:
        generator = torch.Generator().manual_seed(seed)
        sequences = torch.randint(4, (n, self.length), generator=generator)
        labels = torch.randint(len(MOTIFS), (n,), generator=generator)
        places = torch.randint(self.length - MOTIFS.shape[1] + 1, (n, 1), generator=generator)
        return TensorDataset(sequences.scatter(1, places + torch.arange(MOTIFS.shape[1]), MOTIFS[labels]), labels)
