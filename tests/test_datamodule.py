"""What each rank gets of a logical batch, and the dummies that fill the gaps."""

from collections import UserDict
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from toy import ToyData

from dprc_lightning import DPRCDataModule, PerformanceConfig, PoissonBatchSampler
from dprc_lightning.datamodule import LogicalBatches
from dprc_lightning.errors import ConfigurationError
from dprc_lightning.keys import RunSecret
from dprc_lightning.sampling import Groups

SECRET = RunSecret.for_testing(0)


def batches(rank=0, world_size=1, groups=None, records=40):
    sampler = PoissonBatchSampler(len(groups) if groups else records, sample_rate=0.4, steps=1, key=bytes(32))
    data = ToyData(records).train_dataset()
    performance = PerformanceConfig(physical_batch_size=3)
    return LogicalBatches(data, lambda r: r, sampler, performance, SECRET, groups, rank, world_size)


@pytest.mark.parametrize("groups", [None, Groups([i % 9 for i in range(40)])])
@pytest.mark.parametrize("world_size", [2, 3, 7])
def test_the_ranks_share_out_one_logical_batch(groups, world_size):
    for sequence in range(20):
        whole = batches(groups=groups).records(sequence)
        parts = [batches(rank, world_size, groups).records(sequence) for rank in range(world_size)]
        assert sorted(np.concatenate(parts)) == sorted(whole), "each record on exactly one rank"
        sizes = [len(part) for part in parts]
        assert max(sizes) - min(sizes) <= 1
        batch = batches(1, world_size, groups)[sequence]
        assert sum(batch.counts) == len(parts[1]) and max(batch.counts, default=0) <= 3


@dataclass
class Anything:
    text: str


class Given(DPRCDataModule):
    def __init__(self, record, dummy=None):
        super().__init__()
        self.record, self.dummy = record, dummy

    def train_dataset(self):
        return [self.record, self.record]

    def collate_fn(self, records):
        return records[0]

    def dummy_record(self):
        return self.dummy


def test_a_dummy_has_the_shape_and_nothing_of_the_content():
    record = {
        "input_ids": torch.tensor([[5, 6, 7]]),
        "attention_mask": torch.tensor([[1, 1, 0]]),
        "lengths": torch.tensor([2]),
        "nested": [torch.ones(2, 2), ("private", 3)],
    }
    dummy = Given(UserDict(record)).dummy_batch()
    assert dummy["input_ids"].tolist() == [[0, 0, 0]] and dummy["nested"][0].tolist() == [[0, 0], [0, 0]]
    assert dummy["attention_mask"].tolist() == [[1, 1, 1]] and dummy["lengths"].tolist() == [1]
    assert dummy["nested"][1] == ["", 0]
    assert record["input_ids"].tolist() == [[5, 6, 7]]


def test_what_cannot_be_emptied_needs_a_dummy_of_ones_own():
    with pytest.raises(ConfigurationError, match=r"dummy_record: not written, and a Anything"):
        Given(Anything("private")).dummy_batch()
    assert Given(Anything("private"), Anything("")).dummy_batch().text == ""
