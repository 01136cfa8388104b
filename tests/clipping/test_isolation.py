"""Both ways to find what makes one record's gradient depend on another one: changed records, and rows of the layers."""

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from architectures import CAUSAL, ENCODERS, case
from cases import make
from torch import Tensor, nn
from transformers import BatchEncoding

from dprc_lightning import attach
from dprc_lightning.clipping.isolation import check_isolation
from dprc_lightning.errors import ConfigurationError, IsolationError, UnclippedGradientError


def model_and(batch_losses):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    # What is tested here is the perturbation alone.
    handle = attach(model, "hutchinson", 3, unused="zero", check_isolation=False)
    handle.begin_step()
    return lambda batch: batch_losses(model, batch), handle


def check(batch_losses, batch):
    losses_of, handle = model_and(batch_losses)
    return check_isolation(losses_of, handle.norms, batch)


def records():
    torch.manual_seed(1)
    return {"x": torch.randn(5, 4), "y": torch.randint(0, 3, (5,))}


def per_record(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


MIXING = {
    "mean over the batch": lambda m, b: per_record(m, b).mean().expand(5),
    "normalised by the batch": lambda m, b: per_record(m, {**b, "x": (b["x"] - b["x"].mean(0)) / b["x"].std(0)}),
    "a balancing loss": lambda m, b: per_record(m, b) + 0.01 * m(b["x"]).softmax(-1).mean(0).square().sum(),
    "negatives from the batch": lambda m, b: F.cross_entropy(
        m(b["x"]) @ m(b["x"] + 0.1).T, torch.arange(5), reduction="none"
    ),
    "weighted by the batch": lambda m, b: per_record(m, b) / b["y"].float().mean().detach(),
    "the next record's": lambda m, b: per_record(m, b).roll(1),
    "divided by the batch's size": lambda m, b: per_record(m, b) / len(b["y"]),
    "the batch's largest": lambda m, b: per_record(m, b) / b["x"].abs().max(),
}


@pytest.mark.parametrize("losses", MIXING.values(), ids=list(MIXING))
def test_what_mixes_records_is_found(losses):
    with pytest.raises(IsolationError, match=r"moved when ANOTHER record|another record's row"):
        check(losses, records())


def test_a_loss_that_stays_while_the_gradients_mix():
    """The value is the record's own; what flows back is scaled by the batch."""

    def losses(model, batch):
        own = per_record(model, batch)
        scaled = own * batch["x"].mean()
        return own.detach() + scaled - scaled.detach()

    with pytest.raises(IsolationError, match="the gradient norm of"):
        check(losses, records())


def test_a_number_of_losses_that_depends_on_the_records():
    batch = records()
    batch["x"][-1] = 5.0

    def losses(model, batch):
        return per_record(model, batch)[: 4 + int(batch["x"][-1, 0] == 5.0)]

    with pytest.raises(IsolationError, match="number of losses changed from 5 to 4"):
        check(losses, batch)


class Named(NamedTuple):
    x: Tensor
    y: Tensor


@dataclass
class Fields:
    x: Tensor
    y: Tensor
    name: str = "kept"


@pytest.mark.parametrize("kind", [dict, tuple, list, Named, Fields, BatchEncoding])
def test_kinds_of_batches(kind):
    data = records()

    def losses(model, batch):
        if kind is Fields:
            assert batch.name == "kept"
        if kind in (tuple, list):
            x, y = batch
        else:
            x, y = (batch["x"], batch["y"]) if hasattr(batch, "keys") else (batch.x, batch.y)
        return per_record(model, {"x": x, "y": y})

    batch = kind(**data) if kind in (Named, Fields) else kind(data if hasattr(kind, "keys") else data.values())
    before = {name: value.clone() for name, value in data.items()}
    assert check(losses, batch)
    assert all(torch.equal(data[name], value) for name, value in before.items()), "the batch is not changed"


def test_nothing_to_try():
    assert not check(per_record, {name: value[:1] for name, value in records().items()})
    same = {name: value[:1].expand(5, *value.shape[1:]) for name, value in records().items()}
    assert not check(per_record, same)


def test_a_batch_that_shows_no_records():
    class Opaque:
        pass

    batch = Opaque()
    batch.data = records()
    with pytest.raises(ConfigurationError, match=r"privacy\.check_isolation.*Opaque"):
        check(lambda m, b: per_record(m, b.data), batch)


def test_dropout_and_the_generator():
    """Both runs draw the same masks, and the step afterwards draws as if there had been no check."""
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    assert check(lambda m, b: per_record(m, {**b, "x": F.dropout(b["x"], 0.5)}), records())
    torch.manual_seed(3)
    losses_of, handle = model_and(lambda m, b: per_record(m, {**b, "x": F.dropout(b["x"], 0.5)}))
    torch.manual_seed(3)
    check_isolation(losses_of, handle.norms, records())
    torch.manual_seed(3)
    state = torch.get_rng_state()
    check_isolation(losses_of, handle.norms, {name: value for name, value in records().items()})
    torch.set_rng_state(state)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("name", CAUSAL + ENCODERS)
def test_real_architectures_pass(name, half):
    built = case(name, "eager")
    model, batch = make(built)
    handle = attach(model, "hutchinson", 4, unused="zero")
    handle.begin_step()

    def losses_of(batch):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
            return built.losses(model, batch)

    assert check_isolation(losses_of, handle.norms, batch, half_precision=half)


class Unbatched(nn.Module):
    """Rows that are not records: [T] positions from an offset, a sort, one row for all, a loop over records."""

    def __init__(self, way):
        super().__init__()
        self.words, self.places, self.head = nn.Embedding(20, 6), nn.Embedding(20, 6), nn.Linear(6, 3)
        self.way = way

    def forward(self, ids):
        h = self.words(ids)
        if self.way == "positions":
            h = h + self.places(torch.arange(ids.shape[1]) + 2)
        if self.way == "one row for all":
            return h.mean(1) @ self.places(torch.arange(4).unsqueeze(0))[0].T
        if self.way == "sorted":
            order = ids[:, 0].argsort()
            return self.head(torch.tanh(h[order].mean(1)))[order.argsort()]
        if self.way == "loop":
            return torch.stack([self.head(torch.tanh(row)).mean(0) for row in h])
        if self.way == "sequence first":
            return self.head(torch.tanh(h.transpose(0, 1))).mean(0)
        return self.head(torch.tanh(h)).mean(1)


ROWS = {
    "positions": "places.weight",
    "one row for all": "places.weight",
    "sorted": "head",
    "loop": "head",
    "sequence first": "head",
}


class TestRows:
    @pytest.mark.parametrize(("way", "named"), ROWS.items())
    def test_rows_that_are_not_records(self, way, named):
        """As many tokens as records, so that nothing else tells."""
        torch.manual_seed(0)
        model = Unbatched(way)
        handle = attach(model, "exact", unused="zero")
        handle._isolation_left = 20  # each finds it with a probability of one half or more
        ids = torch.stack([torch.randperm(20)[:4] for _ in range(4)])
        ids[:, 0] = torch.tensor([9, 7, 5, 3])
        with pytest.raises(IsolationError, match=rf"'{named}"):
            for _ in range(20):
                handle.norms(model(ids).square().sum(1))

    def test_rows_that_are(self):
        model = Unbatched("none")
        handle = attach(model, "exact", unused="zero")
        for records in (4, 1, 4, 3, 2, 5, 4):
            ids = torch.randint(0, 20, (records, 4))
            handle.norms(model(ids).square().sum(1))
        # Three at first, then only where the tokens are as many as the records, once.
        assert handle._isolated == {4, 3}

    def test_sizes_that_meet_by_chance_are_looked_at(self):
        model = Unbatched("sequence first")
        handle = attach(model, "exact", unused="zero", check_isolation=True)
        handle._isolation_left = 0
        with pytest.raises(IsolationError):
            handle.norms(model(torch.randint(0, 20, (4, 4))).square().sum(1))

    def test_turned_off(self):
        model = Unbatched("sequence first")
        attach(model, "exact", unused="zero", check_isolation=False).norms(
            model(torch.randint(0, 20, (4, 4))).square().sum(1)
        )

    @pytest.mark.parametrize("way", ["a part was attached", "a list hides it"])
    def test_parameters_that_the_handle_does_not_know(self, way):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        whole = model
        if way == "a list hides it":
            hidden = [model[0]]
            whole = lambda x: model[1](hidden[0](x))  # noqa: E731
        handle = attach(model[1], "exact")
        with pytest.raises(UnclippedGradientError, match=r"2 parameter\(s\) outside of the attached model"):
            handle.norms(whole(torch.randn(3, 4)).square().sum(1))

    def test_a_bad_record_is_another_matter(self):
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
        handle = attach(model, "exact", on_nonfinite="drop")
        x = torch.randn(4, 4)
        x[0], x[2] = float("inf"), float("nan")
        handle.clipped_backward(model(x).square().sum(1), max_grad_norm=1.0)
        assert handle.dropped == 2

    @pytest.mark.parametrize("name", CAUSAL + ENCODERS)
    def test_as_many_tokens_as_records(self, name):
        built = case(name, "eager")
        model, batch = make(built)
        batch = {key: value[:, :5] if value.ndim == 2 else value for key, value in batch.items()}
        attach(model, "exact", unused="zero").norms(built.losses(model, batch))
