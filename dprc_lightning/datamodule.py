"""Logical batches as Lightning wants them: one item of the train loader is one whole logical batch."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import lightning.pytorch as pl
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler, default_collate

from dprc_lightning.config import PerformanceConfig, PrivacyConfig
from dprc_lightning.dropout import preserved_randomness, secret_dropout
from dprc_lightning.errors import ConfigurationError, DatasetError
from dprc_lightning.fingerprint import fingerprint
from dprc_lightning.keys import Domain, RunSecret
from dprc_lightning.run import PrivateRun
from dprc_lightning.sampling import Groups, PoissonBatchSampler, owners_of, split_batch
from dprc_lightning.timing import StepClock

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
        micro_batches: Collated micro-batches of this rank; none if no record of its was drawn.
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
        groups: Whose the records are, if groups are sampled.
        rank: This process.
        world_size: How many processes share the logical batch.
    """

    def __init__(
        self,
        dataset: SizedDataset,
        collate: Collate,
        sampler: PoissonBatchSampler,
        performance: PerformanceConfig,
        secret: RunSecret,
        groups: Groups | None = None,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self._dataset = dataset
        self._secret = secret
        self._collate = collate
        self._sampler = sampler
        self._performance = performance
        self._groups = groups
        self._rank, self._world_size = rank, world_size

    def records(self, sequence: int) -> np.ndarray:
        """The records of a step that this rank computes.

        Guarantee: every rank draws the same logical batch, and each of its records is on exactly one rank. Which one
        depends on the other records drawn, and changes nothing: the clipped gradients are summed.

        Args:
            sequence: The ledger's number of the step.

        Returns:
            Record indices, int64.
        """
        drawn = self._sampler.batch(sequence)[self._rank :: self._world_size]
        if self._groups is None:
            return drawn
        return self._groups.pick(drawn, self._secret.subkey(Domain.GROUP_RECORD), sequence)

    def __getitem__(self, sequence: int) -> LogicalBatch:
        indices = self.records(sequence)
        max_tokens = self._performance.max_tokens
        lengths = None if max_tokens is None else record_lengths(self._dataset, indices.tolist())
        parts = split_batch(
            indices,
            physical_batch_size=self._performance.physical_batch_size,
            max_tokens=max_tokens,
            lengths=lengths,
        )
        with secret_dropout(self._secret.subkey(Domain.AUGMENTATION, sequence, self._rank)):
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


def _without_content(batch: Any, name: str = "") -> Any:
    """The same shapes without what is in them."""
    if isinstance(batch, torch.Tensor):
        # A mask that is added to scores is neutral at 0, one that selects at 1; a length of 0 may be a division by it.
        ones = name.endswith(("mask", "length", "lengths")) and not batch.is_floating_point()
        return torch.ones_like(batch) if ones else torch.zeros_like(batch)
    if isinstance(batch, Mapping):
        return {key: _without_content(value, str(key)) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        return [_without_content(value) for value in batch]
    if isinstance(batch, str):
        return ""
    if batch is None or isinstance(batch, int | float):
        return None if batch is None else type(batch)(0)
    raise ConfigurationError([
        f"DPRCDataModule.dummy_record: not written, and a {type(batch).__name__} in a batch cannot be emptied; return "
        "a record with nothing real in it, for ranks that have none of their own"
    ])


class _SequenceSampler(Sampler[int]):
    """The numbers of the next epoch's steps, starting at the ledger's next one."""

    def __init__(self, run: PrivateRun) -> None:
        self._run = run

    def __iter__(self) -> Iterator[int]:
        first = self._run.next_sequence
        yield from range(first, first + min(len(self), self._run.steps_left))

    def __len__(self) -> int:
        return self._run.resolved.steps_per_epoch


class TrainLoader:
    """The logical batches of an epoch. No DataLoader itself: Lightning would share out its steps among the ranks.

    Args:
        loader: Makes them.
        clock: Told how long the step had to wait for each.
    """

    def __init__(self, loader: DataLoader, clock: StepClock) -> None:
        self._loader = loader
        self._clock = clock

    def __iter__(self) -> Iterator[LogicalBatch]:
        return self._clock.waiting(self._loader)

    def __len__(self) -> int:
        return len(self._loader)

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the ledger's number tells which batch is next. Lightning takes a loader with it for resumable."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Nothing to load.

        Args:
            state: What `state_dict` returned.
        """


class DPRCDataModule(pl.LightningDataModule):
    """Write `train_dataset` and, where the default does not fit, `collate_fn`; the library builds the Poisson loader.

    One record of `train_dataset` is the unit of privacy: one document, say. If a person has several, the guarantee is
    for each of them, not for the person, unless ``privacy.group_column`` names the column that tells whose it is.

    Attributes:
        eval_batch_size: Records per batch in validation, test and prediction.
    """

    eval_batch_size: int = 64

    _training_set: SizedDataset | None = None
    _groups: Groups | None = None

    @property
    def training_set(self) -> SizedDataset:
        """What `train_dataset` returned, once for each fit: another call might give the records another order."""
        if self._training_set is None:
            self._training_set = self.train_dataset()
        return self._training_set

    def forget_training_set(self) -> None:
        """A fit begins: ask `train_dataset` anew."""
        self._training_set = self._groups = None

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

    def dummy_record(self) -> Any:
        """A record like those of `train_dataset`, with nothing real in it, for ranks that have none of their own.

        Override it where the default does not fit. A dummy has weight 0: it costs a forward and changes nothing.

        Returns:
            A record; None, the default: the shape of the first training record, all zeros, masks and lengths ones.
        """
        return None

    def dummy_batch(self) -> Any:
        """A collated batch of one dummy record.

        Returns:
            What `collate_fn` returns.
        """
        record = self.dummy_record()
        if record is not None:
            return self.collate_fn([record])
        with preserved_randomness():
            return _without_content(self.collate_fn([self.training_set[0]]))

    def num_units(self, privacy: PrivacyConfig) -> int:
        """N: how many units of privacy the training set has.

        Args:
            privacy: Tells what the unit is.

        Returns:
            The number of records, or of groups.
        """
        groups = self.groups(privacy.group_column)
        return len(self.training_set) if groups is None else len(groups)

    def groups(self, column: str | None) -> Groups | None:
        """Whose the training records are.

        Args:
            column: ``privacy.group_column``.

        Returns:
            The groups; None if every record is a unit of its own.

        Raises:
            ConfigurationError: The column has not one value for each record.
        """
        if column is None:
            return None
        if self._groups is None:
            groups, records = Groups(owners_of(self.training_set, column)), len(self.training_set)
            if groups.num_records != records:
                raise ConfigurationError([
                    f"privacy.group_column={column!r}: {groups.num_records} values for {records} training records; "
                    "give one for each, in their order"
                ])
            self._groups = groups
        return self._groups

    def check_same_everywhere(
        self, secret: RunSecret, privacy: PrivacyConfig, all_equal: Callable[[bytes], bool]
    ) -> None:
        """All ranks must number the same records alike: one that has two numbers may be drawn twice.

        Looked at are the number of records, some of them, and whose they are; told to nobody is a key-dependent hash.

        Args:
            secret: The run's.
            privacy: Tells what the unit is.
            all_equal: A collective: have all ranks the same value?

        Raises:
            DatasetError: They do not.
        """
        if not all_equal(fingerprint(self.training_set, self.groups(privacy.group_column), secret)):
            raise DatasetError(
                f"{type(self).__name__}.train_dataset: the ranks have different records, or the same in another order; "
                "make it the same on every rank (seed a split, sort the files)"
            )

    def train_dataloader(self) -> "TrainLoader":
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
        batches = LogicalBatches(
            self.training_set,
            self.collate_fn,
            run.sampler(),
            performance,
            run.secret,
            groups=self.groups(run.resolved.group_column),
            rank=module.global_rank,
            world_size=module.trainer.world_size,
        )
        workers = performance.num_workers
        loader = DataLoader(
            batches,
            batch_size=None,
            sampler=_SequenceSampler(run),
            num_workers=workers,
            # The sampler holds the sampling key and refuses to be pickled; a forked worker inherits it.
            multiprocessing_context="fork" if workers else None,
        )
        return TrainLoader(loader, module.clock)

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
