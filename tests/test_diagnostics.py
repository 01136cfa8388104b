"""Figures of a step against sums by hand, on one rank and over several."""

import math

import pytest
import torch

from dprc_lightning.diagnostics import PHASES, UNPROTECTED, StepStatistics, count_tokens, is_unprotected

NAN, INF = math.nan, math.inf


def statistics(*batches, private=True):
    found = StepStatistics(private)
    for losses, norms, factors, tokens in batches:
        found.add(*(None if v is None else torch.tensor(v) for v in (losses, norms, factors)), tokens)
    return found


FIRST = ([1.0, 2.0, NAN], [3.0, 0.5, NAN], [0.3, 1.0, 0.0], 30)
SECOND = ([4.0, 5.0], [2.0, INF], [0.5, 0.0], 12)


def test_dropped_records_are_counted_and_left_out():
    assert statistics(FIRST, SECOND).means() == {
        "train/loss": pytest.approx(7 / 3),
        "clip/fraction": pytest.approx(2 / 3),
        "clip/dropped": 2.0,
    }


def test_without_clipping_there_is_the_loss_alone():
    assert statistics(([1.0, 4.0], None, None, None), private=False).means() == {"train/loss": 2.5}


def test_nobody_was_drawn():
    assert statistics().means() == {"train/loss": 0.0, "clip/fraction": 0.0, "clip/dropped": 0.0}


def test_half_precision_losses_are_summed_in_double():
    losses = torch.full((3000,), 1.0, dtype=torch.bfloat16)
    found = StepStatistics(private=False)
    found.add(losses, None, None)
    assert found.means() == {"train/loss": 1.0}


def test_times_have_fixed_names_and_add_up():
    means = statistics(FIRST, SECOND).means(
        times={"forward": 0.5, "data": 0.25, "a phase of one's own": 0.125, "other": 1}
    )
    times = {name: value for name, value in means.items() if name.startswith("time/")}
    assert set(times) == {f"time/{name}" for name in PHASES} | {"time/step"}
    assert times["time/other"] == 1.125 and times["time/data"] == 0.25
    assert times.pop("time/step") == sum(times.values()) == 1.875
    assert means["tokens/s"] == 42 / 1.875


def test_tokens_per_second_are_there_for_text_only():
    without = statistics(([1.0], [1.0], [1.0], None)).means(times={"forward": 1.0})
    assert "tokens/s" not in without and "time/step" in without
    assert "tokens/s" not in statistics(FIRST).means(times={})


def test_ranks_are_one_batch():
    """Three ranks, one of them without records, against one that has everything."""
    times = [{"forward": 1.0, "other": 1.0}, {"forward": 3.0}, {"check_isolation": 1.0}]
    ranks = [statistics(FIRST), statistics(SECOND), statistics()]
    vectors = []

    def keep(vector):
        assert vector.dtype is torch.float64 and vector.ndim == 1 and vector.device.type == "cpu"
        vectors.append(vector)
        return vector

    for rank, own in zip(ranks, times, strict=True):
        rank.means(keep, own)
    assert len(vectors) == 3, "one reduction per rank and step"
    total = torch.stack(vectors).sum(0)
    found = [rank.means(lambda _: total, own) for rank, own in zip(ranks, times, strict=True)]
    assert found[0] == found[1] == found[2], "every rank logs the same"
    assert {name: found[0][name] for name in ("train/loss", "clip/fraction", "clip/dropped")} == statistics(
        FIRST, SECOND
    ).means()
    assert found[0]["time/forward"] == pytest.approx(4 / 3) and found[0]["time/check_isolation"] == pytest.approx(1 / 3)
    assert found[0]["time/step"] == pytest.approx(2.0)
    assert found[0]["tokens/s"] == pytest.approx(42 / 2.0)


def test_every_figure_is_marked():
    means = statistics(FIRST).means(times={"forward": 1.0})
    assert all(is_unprotected(name) for name in means)
    assert not any(is_unprotected(name) for name in ("privacy/epsilon", "val/accuracy", "lr-SGD"))
    unused = [pattern for pattern in UNPROTECTED if not any(is_unprotected(n) and n[:4] == pattern[:4] for n in means)]
    assert not unused


IDS = torch.arange(6).reshape(2, 3)


@pytest.mark.parametrize(
    ("batch", "tokens"),
    [
        ({"input_ids": IDS, "attention_mask": torch.tensor([[1, 1, 0], [1, 0, 0]]), "lengths": torch.tensor([9])}, 3),
        ({"input_ids": IDS, "attention_mask": torch.tensor([[True, True, True], [True, False, False]])}, 4),
        ({"input_ids": IDS, "attention_mask": torch.zeros(2, 1, 3, 3), "lengths": torch.tensor([3, 2])}, 5),
        ({"input_ids": IDS, "lengths": torch.tensor([3, 2])}, 5),
        ({"input_ids": IDS}, 6),
        ({"pixels": torch.zeros(2, 3)}, None),
        ([IDS, torch.zeros(2)], None),
        (IDS, None),
    ],
)
def test_tokens(batch, tokens):
    assert count_tokens(batch) == tokens


def test_tokens_of_a_tokenizers_batch():
    from transformers import BatchEncoding

    assert count_tokens(BatchEncoding({"input_ids": IDS, "attention_mask": torch.ones(2, 3, dtype=torch.long)})) == 6
