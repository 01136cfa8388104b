"""The global generators of torch, NumPy and Python, seeded from a secret stream for the length of a logical step.

Dropout draws from torch's, augmentations in a data set or a loss from any of them. With a seed that the user knows,
masks by batch position would let one more record change the other records' gradients in a known way, which the
accounting does not cover. Draws that are iid over records, from a secret stream, it does cover.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from dprc_lightning.keys import KeyStream

# Layout of the state of torch's CPU generator: 24 bytes of header (seed; left, seeded; next), then the 624 words of the
# Mersenne Twister, each in 64 bits. `manual_seed` would use only 32 bits of a seed.
_HEADER, _WORDS = 24, 624


@contextmanager
def preserved_randomness(device: torch.device | str = "cpu") -> Iterator[None]:
    """Put the global generators back afterwards.

    Args:
        device: Where the model runs.

    Yields:
        Nothing.
    """
    devices = [torch.device(device)] if torch.device(device).type == "cuda" else []
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


@contextmanager
def secret_dropout(key: bytes, device: torch.device | str = "cpu") -> Iterator[None]:
    """Seed the generators of torch (CPU and device), NumPy and Python from a key, and put them back afterwards.

    Args:
        key: 32 secret bytes, of this step and rank alone.
        device: Where the model runs.

    Yields:
        Nothing.
    """
    stream = KeyStream(key)
    device = torch.device(device)
    with preserved_randomness(device):
        torch.set_rng_state(_cpu_state(stream))
        if device.type == "cuda":
            # Philox takes 64 bits.
            torch.cuda.default_generators[device.index or 0].manual_seed(int(stream.uint64(1)[0]) >> 1)
        np.random.set_state(("MT19937", _words(stream).astype(np.uint32), _WORDS, 0, 0.0))
        random.setstate((3, (*_words(stream).tolist(), _WORDS), None))
        yield


def _words(stream: KeyStream) -> np.ndarray:
    return stream.uint64(_WORDS) & np.uint64(0xFFFFFFFF)


def _cpu_state(stream: KeyStream) -> torch.Tensor:
    # A freshly seeded state has the right header: the next draw begins by mixing all words.
    state = torch.Generator().manual_seed(0).get_state().numpy().copy()
    words = state[_HEADER : _HEADER + 8 * _WORDS].view(np.uint64)
    words[:] = _words(stream)
    return torch.from_numpy(state)
