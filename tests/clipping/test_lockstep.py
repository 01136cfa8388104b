"""Where forwards and backwards are collectives, a rank with nothing to look at runs as many as one that looks."""

from contextlib import contextmanager

import pytest
import torch
from torch import nn

from dprc_lightning import attach
from dprc_lightning.clipping.isolation import check_isolation


class Counted:
    """A small model, and how many forwards and backwards it ran."""

    def __init__(self):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
        self.handle = attach(self.model)
        self.asked = []
        self.forwards = self.backwards = 0

    def losses(self, x):
        self.forwards += 1
        return self.model(x).square().sum(1)

    @contextmanager
    def around(self):
        self.backwards += 1
        yield

    def any_rank(self, whether):
        """Another rank always has something to look at."""
        self.asked.append(whether)
        return True

    def norms(self, losses):
        return self.handle.norms(losses, self.around, self.any_rank)


@pytest.mark.parametrize("records", [1, 2, 5])
def test_backwards_do_not_depend_on_the_number_of_records(records):
    counted = Counted()
    x = torch.randn(records, 3)
    for _ in range(5):
        counted.norms(counted.losses(x))
    assert counted.backwards == 5 + 2 * len(counted.asked)
    # Three looks in any case, which all ranks count together; after each norm pass one more may be due.
    assert len(counted.asked) == 2 + 5 and counted.asked[0] is (records >= 2)


@pytest.mark.parametrize("records", [1, 2, 5])
def test_forwards_do_not_depend_on_the_number_of_records(records):
    counted = Counted()
    x = torch.randn(records, 3)
    counted.handle.begin_step(0)
    assert check_isolation(counted.losses, counted.norms, x, any_rank=counted.any_rank)
    assert counted.forwards == 4


def test_an_idle_look_changes_no_norm_and_no_gradient():
    counted, x = Counted(), torch.randn(1, 3)
    losses = counted.losses(x)
    norms = counted.norms(losses)
    plain = Counted()
    expected = plain.handle.norms(plain.losses(x))
    assert torch.equal(norms, expected)
    assert all(p.grad is None for p in counted.model.parameters())
    counted.handle.clipped_backward(losses, max_grad_norm=0.1, norms=norms)


def test_without_such_an_engine_each_rank_looks_for_itself():
    counted = Counted()
    x = torch.randn(1, 3)
    counted.handle.norms(counted.losses(x), counted.around)
    assert counted.backwards == 1
    assert not check_isolation(counted.losses, counted.handle.norms, x)
