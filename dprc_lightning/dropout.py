"""Torch's global generators, seeded from a secret stream for the length of a logical step.

Dropout draws from them. With a seed that the user knows, masks by batch position would let one more record change the
other records' gradients in a known way, which the accounting does not cover. Masks that are iid over records, from a
secret stream, it does cover.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from dprc_lightning.keys import KeyStream

# Layout of the state of torch's CPU generator: 24 bytes of header (seed; left, seeded; next), then the 624 words of the
# Mersenne Twister, each in 64 bits. `manual_seed` would use only 32 bits of a seed.
_HEADER, _WORDS = 24, 624


@contextmanager
def secret_dropout(key: bytes, device: torch.device) -> Iterator[None]:
    """Seed the CPU's and the device's generator from a key, and put them back afterwards.

    Args:
        key: 32 secret bytes, of this step and rank alone.
        device: Where the model runs.

    Yields:
        Nothing.
    """
    stream = KeyStream(key)
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.set_rng_state(_cpu_state(stream))
        if devices:
            # Philox takes 64 bits.
            torch.cuda.default_generators[device.index or 0].manual_seed(int(stream.uint64(1)[0]) >> 1)
        yield


def _cpu_state(stream: KeyStream) -> torch.Tensor:
    # A freshly seeded state has the right header: the next draw begins by mixing all words.
    state = torch.Generator().manual_seed(0).get_state().numpy().copy()
    words = state[_HEADER : _HEADER + 8 * _WORDS].view(np.uint64)
    words[:] = stream.uint64(_WORDS) & np.uint64(0xFFFFFFFF)
    return torch.from_numpy(state)
