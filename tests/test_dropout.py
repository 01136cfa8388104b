"""The secret stream under torch's global generators."""

import random

import numpy as np
import pytest
import torch

from dprc_lightning.dropout import secret_dropout
from dprc_lightning.keys import KeyStream

CPU = torch.device("cpu")
KEY = bytes(range(32))


def draws(key, n=3000):
    with secret_dropout(key, CPU):
        return torch.empty(n, dtype=torch.int32).random_()


def test_it_is_a_mersenne_twister_whose_whole_state_comes_from_the_key():
    """NumPy's own Mersenne Twister, given the same 624 words, draws the same numbers."""
    twister = np.random.MT19937()
    words = (KeyStream(KEY).uint64(624) & np.uint64(0xFFFFFFFF)).astype(np.uint32)
    twister.state = {"bit_generator": "MT19937", "state": {"key": words, "pos": 624}}
    expected = twister.random_raw(3000) & 0x7FFFFFFF
    assert np.array_equal(draws(KEY).numpy(), expected.astype(np.int32))


def test_keys_decide_and_the_users_seed_does_not():
    torch.manual_seed(1)
    first = draws(KEY)
    torch.manual_seed(2)
    assert torch.equal(draws(KEY), first)
    assert not torch.equal(draws(bytes(32)), first)


DRAWS = [
    lambda: torch.rand(5).tolist(),
    lambda: np.random.rand(5).tolist(),
    lambda: [random.random() for _ in range(5)],
]


def seed_everything(seed):
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


@pytest.mark.parametrize("draw", DRAWS, ids=["torch", "numpy", "python"])
def test_the_users_own_stream_goes_on_undisturbed(draw):
    seed_everything(3)
    expected = draw()
    seed_everything(3)
    with secret_dropout(KEY, CPU):
        draw()
    assert draw() == expected


@pytest.mark.parametrize("draw", DRAWS, ids=["torch", "numpy", "python"])
def test_every_global_generator_follows_the_key_alone(draw):
    def drawn(seed, key):
        seed_everything(seed)
        with secret_dropout(key, CPU):
            return draw()

    assert drawn(1, KEY) == drawn(2, KEY) != drawn(1, bytes(32))


def test_the_generators_are_independent():
    with secret_dropout(KEY, CPU):
        numpy = np.random.randint(0, 2**32, 2000, dtype=np.uint64).tolist()
        python = [random.getrandbits(32) for _ in range(2000)]
        torchs = torch.empty(2000, dtype=torch.int64).random_(0, 2**32).tolist()
    assert len(set(numpy) & set(python)) <= 2 and len(set(numpy) & set(torchs)) <= 2
