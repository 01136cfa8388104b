"""`privacy.group_column` through a whole run."""

import numpy as np
import pytest
import torch
from toy import ToyData, ToyModule, ZeroNoise, privacy, trainer

from dprc_lightning.accounting import Ledger
from dprc_lightning.errors import ConfigurationError
from dprc_lightning.report import read_report

pytestmark = pytest.mark.filterwarnings("ignore")


class Owned(ToyData):
    """Forty records of eight people, five each, as mappings."""

    def train_dataset(self):
        x, y = self.x, self.y

        class Mappings(torch.utils.data.Dataset):
            def __len__(self):
                return len(x)

            def __getitem__(self, index):
                return {"x": x[index], "y": y[index], "person": f"p{index % 8}", "index": index}

        return Mappings()


class Looks(ToyModule):
    def __init__(self, settings):
        super().__init__(settings)
        self.seen: dict[int, list[int]] = {}

    def per_sample_loss(self, batch):
        if torch.is_grad_enabled():
            self.seen.setdefault(self.sequences[-1], []).extend(batch["index"].tolist())
        return super().per_sample_loss([batch["x"], batch["y"]])

    def training_step(self, batch, batch_idx):
        self.sequences.append(batch.sequence)
        super(ToyModule, self).training_step(batch, batch_idx)


def settings(**changes):
    return privacy(group_column="person", check_isolation=False, steps=40, allow_large_delta=True, **changes)


def test_each_person_takes_part_with_one_record_at_most(tmp_path):
    module = Looks(settings(sample_rate=0.5))
    trainer(tmp_path, ZeroNoise()).fit(module, datamodule=Owned())
    assert len(module.seen) > 30
    sizes = []
    for records in module.seen.values():
        people = [record % 8 for record in records]
        assert len(set(people)) == len(people)
        sizes.append(len(people))
    assert 3 < np.mean(sizes) < 5, "half of the eight people"
    assert len({record for records in module.seen.values() for record in records}) > 30, "every record has its turn"
    mechanism = module.private_run.resolved
    assert (mechanism.num_records, mechanism.expected_batch_size) == (8, 4.0)
    report = read_report(tmp_path)
    assert "person" in report["unit"]
    assert Ledger.open(tmp_path, read_only=True).meta["mechanism"]["group_column"] == "person"


def test_the_same_epsilon_as_for_as_many_records(tmp_path):
    trainer(tmp_path / "groups", ZeroNoise()).fit(Looks(settings()), datamodule=Owned())
    trainer(tmp_path / "records", ZeroNoise()).fit(ToyModule(privacy(steps=40)), datamodule=ToyData(8))
    spent = [Ledger.open(tmp_path / name, read_only=True).spent() for name in ("groups", "records")]
    assert spent[0] == spent[1]


def test_delta_is_held_against_the_number_of_people(tmp_path):
    bad = privacy(group_column="person", delta=0.1, expected_batch_size=9, sample_rate=None)
    with pytest.raises(ConfigurationError) as caught:
        trainer(tmp_path, ZeroNoise()).fit(Looks(bad), datamodule=Owned())
    assert "more than the 8" in str(caught.value)
    trainer(tmp_path, ZeroNoise()).fit(Looks(privacy(group_column="person", delta=0.1)), datamodule=Owned())


def test_one_order_of_the_records_for_the_whole_run(tmp_path):
    """A data module that shuffles would otherwise give the groups one order and the loader another."""

    class Shuffled(Owned):
        def train_dataset(self):
            order = torch.randperm(40)
            return torch.utils.data.Subset(super().train_dataset(), order.tolist())

    module = Looks(settings(sample_rate=0.5))
    trainer(tmp_path, ZeroNoise()).fit(module, datamodule=Shuffled())
    assert all(len({r % 8 for r in records}) == len(records) for records in module.seen.values())


def test_a_value_for_each_record(tmp_path):
    class Short(ToyData):
        def train_dataset(self):
            data = super().train_dataset()
            data.groups = {"person": ["x"] * 39}
            return data

    with pytest.raises(ConfigurationError, match="39 values for 40 training records"):
        trainer(tmp_path, ZeroNoise()).fit(ToyModule(privacy(group_column="person")), datamodule=Short())


def test_no_such_column(tmp_path):
    with pytest.raises(ConfigurationError, match="group_column='author'.*'index', 'person'"):
        trainer(tmp_path, ZeroNoise()).fit(Looks(privacy(group_column="author")), datamodule=Owned())
    with pytest.raises(ConfigurationError, match="no named columns"):
        trainer(tmp_path, ZeroNoise()).fit(ToyModule(privacy(group_column="author")), datamodule=ToyData())
