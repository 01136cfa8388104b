"""Exact norms and sketches of factors, against whole matrices in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dprc_lightning.sketch import Factors, cheaper_side, sketch, squared_norms


def whole(uses):
    """[B, n0, n1], float64, by einsum."""
    total = 0
    for use in uses:
        left = use.left
        if use.one_hot:
            left = torch.nn.functional.one_hot(left, use.shape[0])
        total = total + torch.einsum("bti,btj->bij", left.double(), use.right.double())
    return total


def make_uses(generator, records, lengths, n0, n1, kinds):
    uses = []
    for length, one_hot in zip(lengths, kinds, strict=True):
        right = torch.randn(records, length, n1, generator=generator)
        if one_hot:
            left = torch.randint(0, n0, (records, length), generator=generator)
        else:
            left = torch.randn(records, length, n0, generator=generator)
        uses.append(Factors(left, right, (n0, n1)))
    return uses


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    records=st.integers(1, 3),
    uses=st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=3),
    n0=st.sampled_from([1, 4, 40]),
    n1=st.sampled_from([1, 5, 30]),
)
def test_exact_norms_of_any_mix_of_uses(seed, records, uses, n0, n1):
    """Both ways occur: short records take Gram matrices, small weights the whole matrix."""
    generator = torch.Generator().manual_seed(seed)
    made = make_uses(generator, records, [u[0] for u in uses], n0, n1, [u[1] for u in uses])
    expected = whole(made).square().sum((1, 2))
    assert torch.allclose(squared_norms(made).double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("one_hot", [False, True])
@pytest.mark.parametrize("side", [0, 1])
def test_a_sketch_is_the_gradient_times_p(one_hot, side):
    if one_hot and side == 1:
        with pytest.raises(AssertionError):
            sketch(Factors(torch.zeros(1, 2, dtype=torch.long), torch.randn(1, 2, 3), (5, 3)), torch.randn(3, 2), 1)
        return
    generator = torch.Generator().manual_seed(0)
    (use,) = make_uses(generator, 2, [6], 5, 3, [one_hot])
    gradient = whole([use])
    projection = torch.randn(5 if side == 0 else 3, 4, generator=generator)
    expected = (gradient.mT if side == 0 else gradient) @ projection.double()
    assert torch.allclose(sketch(use, projection, side).double(), expected, atol=1e-5)


@pytest.mark.parametrize("tied", [False, True])
def test_contributions_that_nearly_cancel_are_not_lost(tied):
    """Terms of size 1e4 whose sum is of size 1: float32 Gram matrices would answer anything from 0 to 10."""
    generator = torch.Generator().manual_seed(0)
    right = torch.randn(1, 1, 50, generator=generator)
    left = 1e3 * torch.randn(1, 1, 60, generator=generator)
    rest = 0.1 * torch.randn(1, 1, 60, generator=generator)
    if tied:
        uses = [Factors(left, right, (60, 50)), Factors(rest - left, right, (60, 50))]
    else:
        uses = [Factors(torch.cat([left, rest - left], 1), torch.cat([right, right], 1), (60, 50))]
    expected = float(whole(uses).norm())
    assert 1 < expected < 20
    assert float(squared_norms(uses).sqrt()) == pytest.approx(expected, rel=1e-3)


def test_the_projection_lies_on_the_longer_axis():
    assert (cheaper_side(10, 3), cheaper_side(3, 10), cheaper_side(4, 4)) == (0, 1, 0)
