"""Noise on a shard takes the memory of one chunk, whatever the shard's size."""

import json

import pytest
import torch
from torch import nn

from dprc_lightning import noise
from dprc_lightning.bench.noise import measure_noise
from dprc_lightning.cli import main
from dprc_lightning.noise import CHUNK

# Random words and their buffer, radius, angle and result: five times 8 bytes for each element.
ONE_CHUNK = 5 * 8 * CHUNK


def test_extra_memory_is_that_of_one_chunk_whatever_the_size():
    sizes = [CHUNK // 4, CHUNK, 2 * CHUNK + 3, 8 * CHUNK]
    rows = measure_noise(sizes, rounds=1)["rows"]
    extra = [row["extra_bytes"] for row in rows]
    assert [row["elements"] for row in rows] == sizes
    assert extra[0] < 0.3 * ONE_CHUNK, "less than a chunk takes less"
    # The last gradient alone has 32 MiB: a draw in its whole shape would take 320.
    assert all(bytes_ == pytest.approx(extra[1], rel=0.01) for bytes_ in extra[2:])
    assert 0.5 * ONE_CHUNK < extra[1] < 1.01 * ONE_CHUNK


def test_a_draw_in_the_whole_shape_would_be_seen(monkeypatch):
    monkeypatch.setattr(noise, "CHUNK", 8 * CHUNK)
    (row,) = measure_noise([4 * CHUNK], rounds=1)["rows"]
    assert row["extra_bytes"] > 3.9 * ONE_CHUNK


def test_the_gradient_itself_is_written_in_place():
    parameter = nn.Parameter(torch.zeros(3 * CHUNK))
    parameter.grad = torch.zeros(3 * CHUNK)
    place = parameter.grad.data_ptr()
    noise.add_gaussian_noise(parameter, 1.0)
    assert parameter.grad.data_ptr() == place and bool((parameter.grad != 0).any())


def test_the_command(capsys):
    assert main(["bench", "noise", "--elements", "1000", "5000", "--rounds", "2", "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["chunk"] == CHUNK and [row["elements"] for row in found["rows"]] == [1000, 5000]
    for row in found["rows"]:
        assert row["gradient_bytes"] == 4 * row["elements"]
        assert row["seconds_per_billion"] == pytest.approx(row["cpu_seconds_median"] / row["elements"] * 1e9)
    assert main(["bench", "noise", "--elements", "1000", "--rounds", "1"]) == 0
    assert capsys.readouterr().out.split()[:2] == ["elements", "gradient"]
    assert main(["bench", "noise", "--elements", "0"]) == 2
    assert "--elements=[0]: expected integers >= 1" in capsys.readouterr().err
