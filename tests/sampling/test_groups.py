"""Groups as the unit of privacy: one record of each group that was drawn."""

import numpy as np
import pytest
import torch
from datasets import Dataset
from scipy import stats

from dprc_lightning.errors import ConfigurationError
from dprc_lightning.sampling import Groups, owners_of

KEY = bytes(range(32))


def test_every_pick_is_a_record_of_its_group():
    owners = np.random.default_rng(0).integers(0, 50, 400).tolist()
    groups = Groups(owners)
    assert len(groups) == len(set(owners)) and groups.num_records == 400
    numbers = {owner: number for number, owner in enumerate(dict.fromkeys(owners))}
    everyone = np.arange(len(groups))
    for sequence in range(20):
        for group, record in zip(everyone, groups.pick(everyone, KEY, sequence), strict=True):
            assert numbers[owners[record]] == group


def test_picks_are_uniform_and_independent_over_steps():
    groups = Groups(["a"] * 5 + ["b"] + ["c"] * 3)
    picks = np.array([groups.pick(np.arange(3), KEY, s) for s in range(6000)])
    assert stats.chisquare(np.bincount(picks[:, 0], minlength=5)).pvalue > 1e-4
    assert set(picks[:, 1]) == {5}
    assert stats.chisquare(np.bincount(picks[:, 2] - 6, minlength=3)).pvalue > 1e-4
    table = np.zeros((5, 3))
    np.add.at(table, (picks[:, 0], picks[:, 2] - 6), 1)
    assert stats.chi2_contingency(table).pvalue > 1e-4
    table = np.zeros((5, 5))
    np.add.at(table, (picks[:-1, 0], picks[1:, 0]), 1)
    assert stats.chi2_contingency(table).pvalue > 1e-4


def test_a_pick_depends_on_its_group_alone():
    """Whoever else was drawn, and on whichever rank."""
    groups = Groups([i % 40 for i in range(400)])
    everyone = groups.pick(np.arange(40), KEY, 3)
    some = np.array([1, 7, 39])
    assert (groups.pick(some, KEY, 3) == everyone[some]).all()
    assert (groups.pick(some, KEY, 4) != everyone[some]).any()
    assert (groups.pick(some, bytes(32), 3) != everyone[some]).any()
    assert len(groups.pick(np.zeros(0, dtype=np.int64), KEY, 3)) == 0


def test_blocks_of_groups_join(monkeypatch):
    groups = Groups([i % 40 for i in range(400)])
    whole = groups.pick(np.arange(40), KEY, 3)
    monkeypatch.setattr("dprc_lightning.sampling.groups._BLOCK", 7)
    assert (groups.pick(np.arange(40), KEY, 3) == whole).all()


@pytest.mark.parametrize("nobody", [None, float("nan")])
def test_a_record_of_nobody_is_refused(nobody):
    with pytest.raises(ConfigurationError, match="record 2 has no value"):
        Groups(["a", "b", nobody])


@pytest.mark.parametrize(
    "owners",
    [
        [torch.tensor(0), torch.tensor(0), torch.tensor(1)],
        torch.tensor([0, 0, 1]),
        np.array([0, 0, 1]),
        np.array(["x", "x", "y"]),
        Dataset.from_dict({"author": [5, 5, 7]}).with_format("torch")["author"],
        [1.0, 1, 2],
        [b"x", b"x", b"y"],
    ],
    ids=str,
)
def test_owners_are_compared_by_value(owners):
    """Tensors equal nothing but themselves: each record would be a group of its own."""
    groups = Groups(owners)
    assert len(groups) == 2 and groups.numbers().tolist() == [0, 0, 1]


@pytest.mark.parametrize("owner", [object(), [1], np.zeros(2), torch.zeros(2)], ids=lambda o: type(o).__name__)
def test_owners_that_cannot_be_compared_are_refused(owner):
    with pytest.raises(ConfigurationError, match=r"record 1 has a .*use a string or a number"):
        Groups(["a", owner])


class Listed:
    """A map-style data set of mappings."""

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return {"text": "...", "author": "xyx"[index]}


class Beside:
    """A data set whose records do not tell whose they are."""

    groups = {"author": ["x", "y", "x"]}

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return index


@pytest.mark.parametrize("dataset", [Dataset.from_dict({"author": ["x", "y", "x"]}), Listed(), Beside()])
def test_columns_are_found(dataset):
    assert list(owners_of(dataset, "author")) == ["x", "y", "x"]
    with pytest.raises(ConfigurationError, match=r"privacy\.group_column='writer'.*no such column"):
        list(owners_of(dataset, "writer"))
