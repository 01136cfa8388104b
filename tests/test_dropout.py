"""The secret stream under torch's global generators."""

import numpy as np
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


def test_the_users_own_stream_goes_on_undisturbed():
    torch.manual_seed(3)
    expected = torch.rand(5)
    torch.manual_seed(3)
    with secret_dropout(KEY, CPU):
        torch.rand(100)
    assert torch.equal(torch.rand(5), expected)
