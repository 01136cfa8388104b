"""Logical batches as Lightning wants them: one item of the train loader is one whole logical batch."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import lightning.pytorch as pl
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate

from dprc_lightning.config import PerformanceConfig
from dprc_lightning.dropout import secret_dropout
from dprc_lightning.errors import ConfigurationError, DatasetError
from dprc_lightning.keys import Domain, RunSecret
from dprc_lightning.run import PrivateRun
from dprc_lightning.sampling import PoissonBatchSampler, split_batch

Collate = Callable[[list[Any]], Any]


class SizedDataset(Protocol):
    """A map-style data set."""

    def __len__(self) -> int:
        """Number of records."""

    def __getitem__(self, index: int, /) -> Any:
        """One record."""


class LogicalBatch:
    """One Poisson batch, cut into micro-batches. Private: its size and its records are nobody's business.

    Not a dataclass: Lightning would look into it and convert what it finds, all micro-batches at once.

    Args:
        sequence: The ledger's number of the step that it is for.
        micro_batches: Collated micro-batches; none if no record was drawn, and then the step is noise alone.
        counts: Records of each.
    """

    def __init__(self, sequence: int, micro_batches: Sequence[Any], counts: Sequence[int]) -> None:
        self.sequence = sequence
        self.micro_batches = micro_batches
        self.counts = counts


class LogicalBatches(Dataset[LogicalBatch]):
    """Sequence number -> logical batch. A data set, so that a DataLoader's workers can prepare batches ahead.

    Args:
        dataset: The records.
        collate: A list of records -> what `per_sample_loss` takes.
        sampler: Which records belong to which number.
        performance: How to cut.
        secret: Its augmentation stream is under the data set's random draws, for each sequence number anew.
    """

    def __init__(
        self,
        dataset: SizedDataset,
        collate: Collate,
        sampler: PoissonBatchSampler,
        performance: PerformanceConfig,
        secret: RunSecret,
    ) -> None:
        self._dataset = dataset
        self._secret = secret
        self._collate = collate
        self._sampler = sampler
        self._performance = performance

    def __getitem__(self, sequence: int) -> LogicalBatch:
        indices = self._sampler.batch(sequence)
        max_tokens = self._performance.max_tokens
        lengths = None if max_tokens is None else record_lengths(self._dataset, indices.tolist())
        parts = split_batch(
            indices,
            physical_batch_size=self._performance.physical_batch_size,
            max_tokens=max_tokens,
            lengths=lengths,
        )
        with secret_dropout(self._secret.subkey(Domain.AUGMENTATION, sequence)):
            collated = [self._collate([self._dataset[i] for i in part.tolist()]) for part in parts]
        return LogicalBatch(sequence, collated, [len(part) for part in parts])


def record_lengths(dataset: SizedDataset, indices: Sequence[int]) -> list[int]:
    """Token counts of some records.

    Args:
        dataset: Its ``lengths``, if it has any, or each record's ``length`` or ``input_ids``.
        indices: Which records.

    Returns:
        One count per index.

    Raises:
        DatasetError: The data set tells no lengths.
    """
    known = getattr(dataset, "lengths", None)
    if known is not None:
        return [int(known[i]) for i in indices]
    found = []
    for index in indices:
        record = dataset[index]
        if isinstance(record, dict) and "length" in record:
            found.append(int(record["length"]))
        elif isinstance(record, dict) and "input_ids" in record:
            found.append(len(record["input_ids"]))
        else:
            raise DatasetError(
                "performance.max_tokens: the training set tells no record lengths; give it an attribute lengths, or "
                "records with a key length or input_ids; or set performance.physical_batch_size instead"
            )
    return found


class _SequenceSampler(Sampler[int]):
    """The numbers of the next epoch's steps, starting at the ledger's next one."""

    def __init__(self, run: PrivateRun) -> None:
        self._run = run

    def __iter__(self) -> Iterator[int]:
        first = self._run.next_sequence
        yield from range(first, first + min(len(self), self._run.steps_left))

    def __len__(self) -> int:
        return self._run.resolved.steps_per_epoch


class DPRCDataModule(pl.LightningDataModule):
    """Write `train_dataset` and, where the default does not fit, `collate_fn`; the library builds the Poisson loader.

    One record of `train_dataset` is the unit of privacy: one document, say. If a person has several, the guarantee is
    for each of them, not for the person.

    Attributes:
        eval_batch_size: Records per batch in validation, test and prediction.
    """

    eval_batch_size: int = 64

    def train_dataset(self) -> SizedDataset:
        """The private records, map-style. Their number is declared public.

        Raises:
            ConfigurationError: Not written.
        """
        raise ConfigurationError([f"{type(self).__name__}.train_dataset: not written; return a map-style data set"])

    def val_dataset(self) -> SizedDataset | None:
        """Records for `validate`, not protected; None for no validation."""
        return None

    def test_dataset(self) -> SizedDataset | None:
        """Records for `test`, not protected; None for no test."""
        return None

    def report_facts(self) -> dict[str, Any]:
        """What the report says of the data: public facts only."""
        return {}

    def collate_fn(self, records: list[Any]) -> Any:
        """Make a batch of records.

        Args:
            records: At least one.

        Returns:
            What `DPRCModule.per_sample_loss` takes.
        """
        return default_collate(records)

    def train_dataloader(self) -> DataLoader:
        """One item per logical step; an epoch has ceil(1 / sample_rate) of them.

        Returns:
            The loader.

        Raises:
            ConfigurationError: The module is no DPRCModule.
        """
        module: Any = self.trainer.lightning_module if self.trainer else None
        run = getattr(module, "private_run", None)
        if not isinstance(run, PrivateRun):
            raise ConfigurationError([
                "DPRCDataModule: its train loader works with a DPRCModule under trainer.fit only"
            ])
        performance: PerformanceConfig = module.performance
        batches = LogicalBatches(self.train_dataset(), self.collate_fn, run.sampler(), performance, run.secret)
        workers = performance.num_workers
        return DataLoader(
            batches,
            batch_size=None,
            sampler=_SequenceSampler(run),
            num_workers=workers,
            # The sampler holds the sampling key and refuses to be pickled; a forked worker inherits it.
            multiprocessing_context="fork" if workers else None,
        )

    def val_dataloader(self) -> DataLoader | list:
        """The validation loader; none if there is no validation set."""
        return self._eval_loader(self.val_dataset())

    def test_dataloader(self) -> DataLoader | list:
        """The test loader; none if there is no test set."""
        return self._eval_loader(self.test_dataset())

    def predict_dataloader(self) -> DataLoader | list:
        """Predictions are made for the test set."""
        return self._eval_loader(self.test_dataset())

    def _eval_loader(self, dataset: SizedDataset | None) -> DataLoader | list:
        if dataset is None:
            return []
        return DataLoader(dataset, batch_size=self.eval_batch_size, collate_fn=self.collate_fn)  # type: ignore[arg-type]
