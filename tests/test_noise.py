import copy
import os
import pickle
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from scipy.stats import kstest, norm
from torch import nn

from dprc_lightning.errors import InvalidArgumentError, SecretError
from dprc_lightning.keys import KEY_BYTES, KeyStream, derive
from dprc_lightning.noise import CHUNK, NoiseStream, add_gaussian_noise, gaussian

KEY = derive(bytes(32), "tests of the noise")


def parameter(grad: torch.Tensor) -> nn.Parameter:
    result = nn.Parameter(torch.zeros(grad.shape, dtype=grad.dtype))
    result.grad = grad
    return result


def assert_standard_normal(values: np.ndarray) -> None:
    assert kstest(values, "norm").pvalue > 1e-4
    # KS is blind to the tails, which carry delta.
    for threshold in (2.0, 3.0, 4.0):
        expected = 2 * norm.sf(threshold) * len(values)
        assert abs((abs(values) > threshold).sum() - expected) < 4.5 * np.sqrt(expected)


def test_noise_is_gaussian_with_the_stated_deviation():
    p = parameter(torch.full((500, 600), 10.0))
    add_gaussian_noise([p], 0.25, NoiseStream.for_testing(0))
    assert p.grad.dtype == torch.float32
    assert_standard_normal((p.grad.double().numpy().ravel() - 10) / 0.25)


def test_every_element_has_a_draw_of_its_own_across_chunks():
    # float64, so that a repeated value is a repeated draw.
    first, second = parameter(torch.zeros(CHUNK + 4099).double()), parameter(torch.zeros(3, 5001).double())
    add_gaussian_noise([first, second], 1.0, NoiseStream.for_testing(1))
    noise = torch.cat([first.grad, second.grad.reshape(-1)])
    assert len(noise.unique()) == noise.numel()
    assert len(noise.abs().unique()) == noise.numel()
    edge = noise[CHUNK - 2000 : CHUNK + 2000]
    assert 0.9 < edge.std() < 1.1
    for lag in (1, 2, CHUNK // 2, CHUNK):  # both halves of Box-Muller, neighbouring chunks
        a, b = noise[:-lag], noise[lag:]
        assert abs((a * b).sum()) / len(a) ** 0.5 < 4.5
        assert abs(((a**2 - 1) * (b**2 - 1)).sum()) / (2 * len(a) ** 0.5) < 4.5


def test_a_missing_gradient_is_noised_like_a_zero_one():
    absent, zero, frozen = (nn.Parameter(torch.ones(1000)) for _ in range(3))
    zero.grad = torch.zeros(1000)
    frozen.requires_grad_(False)
    add_gaussian_noise([absent, zero, frozen], 2.0, NoiseStream.for_testing(2))
    assert frozen.grad is None
    for p in (absent, zero):
        assert 1.8 < p.grad.std() < 2.2
    assert not torch.equal(absent.grad, zero.grad)


def test_a_parameter_given_twice_is_noised_once():
    once, twice = parameter(torch.zeros(100)), parameter(torch.zeros(100))
    add_gaussian_noise([once], 1.0, NoiseStream.for_testing(3))
    add_gaussian_noise(iter([twice, twice]), 1.0, NoiseStream.for_testing(3))
    assert torch.equal(once.grad, twice.grad)


def test_a_single_tensor_is_one_parameter():
    listed, single = parameter(torch.zeros(4, 5)), parameter(torch.zeros(4, 5))
    add_gaussian_noise([listed], 1.0, NoiseStream.for_testing(3))
    add_gaussian_noise(single, 1.0, NoiseStream.for_testing(3))
    assert torch.equal(listed.grad, single.grad)


def test_zero_std_adds_nothing():
    p, absent = parameter(torch.randn(50)), nn.Parameter(torch.ones(3))
    before = p.grad.clone()
    add_gaussian_noise([p, absent], 0, NoiseStream.for_testing(4))
    assert torch.equal(p.grad, before) and torch.equal(absent.grad, torch.zeros(3))


@pytest.mark.parametrize("std", [-1.0, float("nan"), float("inf"), True, None, "1", torch.tensor(1.0)])
def test_wrong_std_is_refused(std):
    p = parameter(torch.zeros(3))
    with pytest.raises(InvalidArgumentError, match="std"):
        add_gaussian_noise([p], std)
    assert torch.equal(p.grad, torch.zeros(3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_sum_is_rounded_once(dtype):
    # In bfloat16, 256 + 0.3 z has a step of 2: noise drawn or added in the low precision would give other values.
    grad = torch.linspace(-256, 256, 10_001).to(dtype)
    p = parameter(grad.clone())
    add_gaussian_noise([p], 0.3, torch.Generator().manual_seed(5))
    draws = torch.randn(10_001, generator=torch.Generator().manual_seed(5))
    assert p.grad.dtype == dtype
    assert torch.equal(p.grad, (grad.double() + 0.3 * draws.double()).to(dtype))


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(40, 50).t(),
        lambda: torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last),
        lambda: torch.zeros(40, 50)[:, ::2],
        lambda: torch.zeros(()),
        lambda: torch.zeros(0, 7),
    ],
)
def test_any_layout(make):
    grad = make()
    base = grad if grad._base is None else grad._base
    p = parameter(grad)
    add_gaussian_noise([p], 1.0, NoiseStream.for_testing(6))
    assert p.grad is grad  # in place: engines keep views of their flat buffers
    assert len(grad.unique()) == grad.numel()
    assert (base != 0).sum() == grad.numel()


def test_an_expanded_gradient_is_not_noised_with_one_draw():
    p = nn.Parameter(torch.zeros(3, 4))
    p.grad = torch.zeros(1, 4).expand(3, 4)
    with pytest.raises(RuntimeError, match="single memory location"):
        add_gaussian_noise([p], 1.0)


def test_refusal_changes_nothing():
    dense, empty = parameter(torch.zeros(3)), nn.Parameter(torch.zeros(2))
    sparse = nn.Embedding(5, 2, sparse=True)
    sparse(torch.tensor([1])).sum().backward()
    whole = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    for wrong, match in ((sparse.weight, "sparse=False"), (whole, "complex64")):
        with pytest.raises(InvalidArgumentError, match=match):
            add_gaussian_noise([dense, empty, wrong], 1.0)
        assert torch.equal(dense.grad, torch.zeros(3)) and empty.grad is None
    with pytest.raises(InvalidArgumentError, match="generator"):
        add_gaussian_noise([dense], 1.0, 42)


def test_dtensor_shard_is_noised_in_place(tmp_path):
    import torch.distributed as dist
    from torch.distributed.tensor import DTensor, Partial, Shard, init_device_mesh

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        p = nn.Parameter(DTensor.from_local(torch.zeros(6, 4), mesh, [Shard(0)]))
        add_gaussian_noise([p], 1.0, NoiseStream.for_testing(7))
        plain = parameter(torch.zeros(6, 4))
        add_gaussian_noise([plain], 1.0, NoiseStream.for_testing(7))
        assert isinstance(p.grad, DTensor) and torch.equal(p.grad.to_local(), plain.grad)
        assert p.grad.to_local().count_nonzero() == 24
        p.grad = DTensor.from_local(torch.zeros(6, 4), mesh, [Partial()])
        with pytest.raises(InvalidArgumentError, match="reduce it first"):
            add_gaussian_noise([p], 1.0)
    finally:
        dist.destroy_process_group()


def test_default_noise_is_not_the_users_seed():
    drawn = []
    for _ in range(2):
        torch.manual_seed(0)
        state = torch.get_rng_state()
        p = parameter(torch.zeros(8))
        add_gaussian_noise([p], 1.0)
        drawn.append(p.grad)
        assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(*drawn)


def test_replicas_that_share_a_key_agree_and_others_do_not():
    shared, fresh = ([NoiseStream(KEY), NoiseStream(KEY)], [NoiseStream.fresh(), NoiseStream.fresh()])
    for streams, agree in ((shared, True), (fresh, False)):
        ranks = [[parameter(torch.zeros(shape)) for shape in ((7,), (3, 3), (0,), (2**10 + 1,))] for _ in streams]
        for stream, rank in zip(streams, ranks, strict=True):
            for _ in range(2):
                add_gaussian_noise(rank, 1.0, stream)
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(*ranks, strict=True) if a.numel()) == agree


def test_key_is_erased_by_each_draw():
    stream, keys = NoiseStream(KEY), []
    for _ in range(5):
        keys.append(stream._key)
        stream.normal(10)
    assert len(set(keys)) == 5


def test_next_key_is_not_part_of_the_noise():
    stream = NoiseStream(KEY)
    words = stream._words(8).numpy().tobytes()
    expected = KeyStream(KEY).bytes(KEY_BYTES + 64)
    assert stream._key == expected[:KEY_BYTES] and words == expected[KEY_BYTES:]


def test_threads_never_share_a_draw(monkeypatch):
    fill = KeyStream.fill

    def slow(self, buffer):
        fill(self, buffer)
        time.sleep(1e-4)  # lets the other threads in between reading the key and replacing it

    monkeypatch.setattr(KeyStream, "fill", slow)
    stream = NoiseStream.for_testing(8)
    with ThreadPoolExecutor(8) as pool:
        drawn = torch.cat(list(pool.map(stream.normal, [50] * 400)))
    assert len(drawn.unique()) == drawn.numel()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_fork_draws_other_noise():
    fresh, shared, fixed = NoiseStream.fresh(), NoiseStream(KEY), NoiseStream.for_testing(9)

    def draw() -> list[bytes]:
        p = parameter(torch.zeros(8))
        add_gaussian_noise([p], 1.0)
        drawn = [p.grad, fresh.normal(8), fixed.normal(8)]
        return [x.numpy().tobytes() for x in drawn]

    def in_child() -> list[bytes]:
        read, write = os.pipe()
        if (child := os.fork()) == 0:
            try:
                parts = draw()
                try:
                    shared.normal(8)
                except SecretError as error:
                    parts.append(str(error).encode())
                os.write(write, pickle.dumps(parts))
            finally:
                os._exit(0)
        os.close(write)
        with os.fdopen(read, "rb") as stream:
            parts = pickle.load(stream)
        os.waitpid(child, 0)
        return parts

    first, second, parent = in_child(), in_child(), draw()
    for position in (0, 1):
        assert len({first[position], second[position], parent[position]}) == 3
    assert first[2] == second[2] == parent[2]  # what is for tests stays fixed
    assert b"after a fork" in first[3]
    shared.normal(8)


def test_streams_show_themselves_nowhere():
    assert NoiseStream.for_testing(0).is_test and not NoiseStream.fresh().is_test
    assert "NOT PRIVATE" in repr(NoiseStream.for_testing(0))
    assert KEY.hex() not in repr(NoiseStream(KEY)) and str(KEY) not in repr(NoiseStream(KEY))
    for copied in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(SecretError):
            copied(NoiseStream.fresh())
    with pytest.raises(InvalidArgumentError, match="32 bytes"):
        NoiseStream(b"short")


def test_extreme_bits_give_finite_noise(monkeypatch):
    words = torch.tensor([0, -1, 2**63 - 1, -(2**63), 0, -1, 2**63 - 1, -(2**63)])
    monkeypatch.setattr(NoiseStream, "_words", lambda self, n: words)
    drawn = NoiseStream.for_testing(0).normal(8)
    assert drawn.isfinite().all()
    assert drawn.abs().max() == pytest.approx((2 * 64 * np.log(2)) ** 0.5)


def test_gaussian_entries_are_normal():
    matrix = gaussian(KEY, (4096, 80))
    assert matrix.shape == (4096, 80) and matrix.dtype == torch.float32
    assert_standard_normal(matrix.double().numpy().ravel())
    # Columns and rows of a projection must be independent: P^T P / rows is near the identity.
    gram = (matrix.T @ matrix / 4096 - torch.eye(80)).triu(1)
    assert gram.abs().max() < 5.5 / 4096**0.5
    flat = matrix.reshape(-1)
    for lag in (1, 2**15, 2**16, 2**17):  # both halves of Box-Muller, neighbouring blocks
        assert abs((flat[:-lag] * flat[lag:]).sum()) / (flat.numel() - lag) ** 0.5 < 4.5


def test_gaussian_depends_on_the_key_alone():
    shape = (300, 300)
    reference = gaussian(KEY, shape)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        torch.manual_seed(1)
        assert torch.equal(gaussian(KEY, shape), reference)
    finally:
        torch.set_num_threads(threads)
    other = gaussian(derive(KEY, 1), shape)
    assert abs((other * reference).sum()) / 300 < 4.5
    with pytest.raises(InvalidArgumentError, match="32 bytes"):
        gaussian(b"", shape)


@pytest.mark.parametrize("shape", [(1,), (3,), (2**15 + 1,), (5, 0), (), (2**16 + 3,)])
def test_gaussian_shapes(shape):
    assert gaussian(KEY, shape).shape == shape


def test_gaussian_never_changes():
    # Another value means that a resumed run would draw other projections than the uninterrupted one.
    expected = [-0.206370294, 1.51355529, -1.05108595, 1.17688906]
    np.testing.assert_allclose(gaussian(bytes(32), (4,)).numpy(), expected, rtol=1e-6)
