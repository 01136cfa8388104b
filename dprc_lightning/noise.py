"""Gaussian noise: the noise of the mechanism (secret, never repeatable) and Gaussian matrices from a key (repeatable).

Why the mechanism's noise does not come from torch's generators: on the CPU that is a Mersenne Twister seeded with 32
bits, and on a coordinate whose clipped gradients are zero the released sum *is* the raw noise. A few such coordinates
give the state of the generator, and with it all the noise of the step. Here the bits come from ChaCha20 under a key
that the operating system gave this very process.
"""

import math
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

import numpy as np
import torch
from torch import Tensor

from dprc_lightning.errors import InvalidArgumentError, SecretError
from dprc_lightning.keys import KEY_BYTES, KeyStream, derive
from dprc_lightning.shards import local_part

# Elements drawn at once: bounds the extra memory to about 40 MiB, however large the gradient is. A constant, because
# replicas that share a stream must cut it in the same places.
CHUNK = 2**20

_63_BITS = 2**63 - 1
# Pairs per piece of `gaussian`: fixed, so that the values do not depend on anything but the key; it fits the L2 cache.
_BLOCK_PAIRS = 2**15
# Eight bytes for the radius and four for the angle of each pair.
_PIECE_BYTES = 12 * _BLOCK_PAIRS

GAUSSIAN_PIECE = 2 * _BLOCK_PAIRS
"""Entries that `fill_gaussian` makes at once."""


class NoiseStream:
    """Secret Gaussian noise: ChaCha20 bits through Box-Muller in float64.

    Guarantee: without the key the draws are computationally indistinguishable from independent N(0, 1) draws cut off at
    9.4 standard deviations (probability 2^-64 per pair) and rounded to float64. The key is replaced by fresh key stream
    before each chunk, so the state of a process never tells the noise it drew before. No two processes share a stream
    by accident: after a fork a fresh stream is keyed anew and a shared one refuses to draw. A snapshot of a whole
    virtual machine, resumed twice, is beyond what a process can see: do not snapshot a running training.

    What remains: floating-point numbers are a lattice, and a released sum may lie where only one of two neighbouring
    inputs can put it (Mironov 2012). `add_gaussian_noise` forms the sum in float64 and rounds it once, so the lattice
    of the sampler lies 2^29 times finer than the released float32 value; that makes the known attack impractical, it
    is not a proof. The proof is about real numbers.

    The draws are made on the CPU, whatever the gradient's device, and copied there in chunks.

    Make one by `fresh` (the default), or by the constructor where replicas must draw the same noise: rank 0 draws
    ``os.urandom(32)``, broadcasts it, and nobody stores it.

    Args:
        key: 32 bytes, secret, used for nothing else.

    Raises:
        InvalidArgumentError: If the key has another length.

    Attributes:
        is_test: True if the stream came from `for_testing`: whatever is released with it is NOT PRIVATE.
    """

    def __init__(self, key: bytes) -> None:
        derive(key)  # refuses a wrong length
        self._key: bytes | None = key
        self._own = False
        self._lock = threading.Lock()
        self._test_key: bytes | None = None
        self.is_test = False
        _streams.add(self)

    @classmethod
    def fresh(cls) -> "NoiseStream":
        """Return a stream keyed by the operating system, for this process alone.

        Returns:
            The stream.
        """
        stream = cls(os.urandom(KEY_BYTES))
        stream._own = True
        return stream

    @classmethod
    def for_testing(cls, seed: int) -> "NoiseStream":
        """Return a known stream. Tests only: whatever is released with it is NOT PRIVATE.

        Args:
            seed: Any integer.

        Returns:
            A stream with ``is_test`` set.
        """
        stream = cls(derive(bytes(KEY_BYTES), "noise for testing", seed))
        stream.is_test = True
        stream._test_key = stream._key
        return stream

    def for_shard(self, index: int) -> "NoiseStream":
        """A test's stream for one shard: ranks that hold different elements must not draw the same noise.

        Args:
            index: Which shard.

        Returns:
            A known stream; of a stream that is none of `for_testing`, itself.
        """
        if self._test_key is None:
            return self
        stream = NoiseStream(derive(self._test_key, "shard", index))
        stream.is_test = True
        stream._test_key = stream._key
        return stream

    def begin_step(self, sequence: int) -> None:
        """Tell the number of the step whose noise comes next. It changes nothing but a test's stream.

        A test's stream then depends on that number alone, so that a resumed run can be compared with one that was not
        interrupted. Real noise never depends on it: it could be drawn again.

        Args:
            sequence: The ledger's sequence number.
        """
        if self._test_key is not None:
            self._key = derive(self._test_key, sequence)

    def normal(self, n: int) -> Tensor:
        """Draw n independent N(0, 1) values.

        Args:
            n: How many.

        Returns:
            A CPU tensor of dtype float64 and shape [n].
        """
        pairs = (n + 1) // 2
        words = self._words(2 * pairs)
        # 63 bits in (0, 1): the smallest radius argument is 2^-64, and +0.5 keeps the logarithm finite.
        radius = (words[:pairs] & _63_BITS).double().add_(0.5).mul_(2.0**-63).log_().mul_(-2).sqrt_()
        angle = words[pairs:].double().mul_(math.pi * 2.0**-63)
        out = torch.empty(2 * pairs, dtype=torch.float64)
        torch.cos(angle, out=out[:pairs]).mul_(radius)
        torch.sin(angle, out=out[pairs:]).mul_(radius)
        return out[:n]

    def _words(self, n: int) -> Tensor:
        buffer = bytearray(KEY_BYTES + 8 * n)
        # Two threads that read one key would draw the same noise for two gradients: their difference is free of noise.
        with self._lock:
            if self._key is None:
                raise SecretError("a shared noise stream was used after a fork: broadcast a new key in this process")
            KeyStream(self._key).fill(buffer)
            self._key = bytes(buffer[:KEY_BYTES])
        return torch.frombuffer(buffer, dtype=torch.int64, count=n, offset=KEY_BYTES)

    def _after_fork(self) -> None:
        self._lock = threading.Lock()  # another thread of the parent may have held it
        if self._own:
            self._key = os.urandom(KEY_BYTES)
        elif not self.is_test:
            self._key = None

    def __repr__(self) -> str:
        return f"NoiseStream(<{'TEST, NOT PRIVATE' if self.is_test else 'hidden'}>)"

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise SecretError("a noise stream cannot be pickled or copied: the same noise would be drawn twice")


_streams: "weakref.WeakSet[NoiseStream]" = weakref.WeakSet()
_process_stream = NoiseStream.fresh()


def _rekey_after_fork() -> None:
    for stream in list(_streams):
        stream._after_fork()


os.register_at_fork(after_in_child=_rekey_after_fork)


@torch.no_grad()
def add_gaussian_noise(
    parameters: Tensor | Iterable[Tensor], std: float, generator: NoiseStream | torch.Generator | None = None
) -> None:
    """Add N(0, std^2) noise to every gradient, in place.

    Guarantee: each element of each gradient's local part gets its own independent draw, exactly once, whatever the
    gradient holds. So with ``std = noise_multiplier * max_grad_norm`` and gradients that are a sum of contributions of
    norm at most ``max_grad_norm``, this is the Gaussian mechanism (up to floating-point numbers, see `NoiseStream`).
    Nothing is changed if an argument is refused.

    ==================================  ================================================================================
    gradient is None                    becomes zero and is noised: otherwise the output would tell whether any record
                                        reached the parameter. Without ``requires_grad`` the parameter is left alone
    the same parameter twice            noised once
    DTensor                             its local shard is noised, nothing is gathered. A replicated one needs a stream
                                        that its replicas share; a partial one is refused (every rank's noise would add
                                        up)
    float32, float64                    the sum is formed in float64 and rounded once
    bfloat16, float16                   likewise: neither the draw nor the sum is made in the low precision
    float32, of a bfloat16 parameter    likewise, then rounded to bfloat16 for the optimizer: `clipped_backward` leaves
                                        it so, because rounding the sum before the noise is not covered
    sparse                              refused: the pattern of the non-zero rows tells which tokens were in the batch
    ``std == 0``                        missing gradients become zero, nothing is added
    ==================================  ================================================================================

    Args:
        parameters: The parameters whose ``.grad`` is noised. Give each parameter in one call per step only.
        std: Standard deviation of the noise on the gradient as it stands, finite and >= 0. After a division by the
            expected batch size E[B] that is ``noise_multiplier * max_grad_norm / E[B]``.
        generator: Where the noise comes from. None: the stream of this process, keyed by the operating system. A
            `NoiseStream`: for replicas that share one. A ``torch.Generator``: for comparisons only, NOT PRIVATE.

    Raises:
        InvalidArgumentError: If ``std`` is negative or not finite, or a gradient or the generator is of a kind that
            cannot be noised or used.
    """
    if isinstance(std, bool) or not isinstance(std, int | float) or not math.isfinite(std) or std < 0:
        raise InvalidArgumentError("std", std, "a finite number >= 0")
    draw = _source(generator)
    listed = [parameters] if isinstance(parameters, Tensor) else parameters
    unique = list({id(parameter): parameter for parameter in listed}.values())
    chosen = [parameter for parameter in unique if parameter.grad is not None or parameter.requires_grad]
    for parameter in chosen:
        _refuse_unsupported(parameter if parameter.grad is None else parameter.grad)
    for parameter in chosen:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter, dtype=getattr(parameter, "grad_dtype", None))
        if std > 0:
            assert parameter.grad is not None
            _add_noise(local_part(parameter.grad), float(std), draw)
        _round_to_parameter(parameter)


def _round_to_parameter(parameter: Tensor) -> None:
    """Optimizers want a gradient in the parameter's precision; with the noise in it, rounding is post-processing."""
    grad = parameter.grad
    if grad is not None and grad.dtype is not parameter.dtype:
        parameter.grad = None
        parameter.grad_dtype = parameter.dtype
        parameter.grad = grad.to(parameter.dtype)


def gaussian(key: bytes, shape: Sequence[int]) -> Tensor:
    """Return a matrix of iid N(0, 1) entries that the key determines. For projections, not for the mechanism's noise.

    Guarantee: without the key the entries are computationally indistinguishable from independent N(0, 1) draws rounded
    to float32. They depend on the key and the number of entries alone: not on threads, device, rank or earlier calls.
    On another machine they are the same as far as its float32 cosine is (x86 with AVX2 or AVX-512: bit for bit).

    Args:
        key: 32 bytes (another length is refused). Other shapes under the same key share bits: one key, one matrix.
        shape: The shape wanted.

    Returns:
        A CPU tensor of dtype float32.
    """
    count = math.prod(shape)
    out = np.empty(count, dtype=np.float32)
    fill_gaussian(out, key, count, 0)
    return torch.from_numpy(out).reshape(tuple(shape))


def fill_gaussian(out: np.ndarray, key: bytes, count: int, start: int) -> None:
    """Write consecutive entries of ``gaussian(key, [count])``, the same bit for bit, without making the others.

    Entries are made `GAUSSIAN_PIECE` at a time; of a piece that is wanted in part the rest is made and dropped.

    Args:
        out: Float32, one axis; its length says how many entries are wanted.
        key: 32 bytes.
        count: Entries of the whole: the last piece depends on it.
        start: The first entry wanted.
    """
    # NumPy and not torch: one thread, so that no partition of the work can change the last bit.
    first, stop = start // GAUSSIAN_PIECE, start + len(out)
    stream = KeyStream(key, first * _PIECE_BYTES)
    for begin in range(first * GAUSSIAN_PIECE, stop, GAUSSIAN_PIECE):
        n = min(_BLOCK_PAIRS, (count + 1) // 2 - begin // 2)
        if start <= begin and begin + 2 * n <= stop:
            _fill_piece(out[begin - start : begin - start + 2 * n], stream)
        else:
            piece = np.empty(2 * n, dtype=np.float32)
            _fill_piece(piece, stream)
            low, high = max(start, begin), min(stop, begin + 2 * n)
            out[low - start : high - start] = piece[low - begin : high - begin]


def _fill_piece(out: np.ndarray, stream: KeyStream) -> None:
    """Box-Muller on the next words of the stream: first all cosines, then all sines."""
    n = len(out) // 2
    words = stream.uint64(n + (n + 1) // 2)
    radius = (words[:n] >> np.uint64(1)).astype(np.float64)
    radius += 0.5
    radius *= 2.0**-63
    np.log(radius, out=radius)
    radius *= -2.0
    radius32 = np.sqrt(radius, out=radius).astype(np.float32)
    angle = words[n:].astype("<u8", copy=False).view("<i4")[:n].astype(np.float32)
    angle *= np.float32(math.pi * 2.0**-31)
    np.multiply(np.cos(angle), radius32, out=out[:n])
    np.multiply(np.sin(angle), radius32, out=out[n:])


_Draw = Callable[[int], Tensor]


def _source(generator: NoiseStream | torch.Generator | None) -> _Draw:
    if generator is None:
        return _process_stream.normal
    if isinstance(generator, NoiseStream):
        return generator.normal
    if isinstance(generator, torch.Generator):
        return lambda n: torch.randn(n, generator=generator, device=generator.device, dtype=torch.float32)
    raise InvalidArgumentError("generator", generator, "None, a NoiseStream or a torch.Generator")


def _refuse_unsupported(grad: Tensor) -> None:
    what = f"gradient of shape {list(grad.shape)}"
    if grad.layout != torch.strided:
        raise InvalidArgumentError(what, grad.layout, "a dense gradient (for an embedding: sparse=False)")
    if not grad.is_floating_point():
        raise InvalidArgumentError(what, grad.dtype, "a real floating-point gradient")
    if any(placement.is_partial() for placement in getattr(grad, "placements", ())):
        raise InvalidArgumentError(what, "partial DTensor", "reduce it first: every rank's noise would add up")


def _add_noise(grad: Tensor, std: float, draw: _Draw) -> None:
    if not grad.is_contiguous():
        # An expanded gradient stores one number for many elements; copy_ refuses to write to it, as it must.
        dense = grad.contiguous()
        _add_noise(dense, std, draw)
        grad.copy_(dense)
        return
    flat = grad.view(-1)
    dtype = torch.float32 if grad.device.type == "mps" else torch.float64
    for start in range(0, flat.numel(), CHUNK):
        part = flat[start : start + CHUNK]
        noise = draw(part.numel()).to(device=part.device, dtype=dtype)
        part.copy_(noise.mul_(std).add_(part))
        # Before the next chunk is drawn, not after.
        del noise
