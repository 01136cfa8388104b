"""A P that is not kept: the same numbers, made at most once where they are used, in the memory of one block."""

import math

import numpy as np
import pytest
import torch
from cases import CASES, make
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from torch import nn
from toy import ToyData, ToyModule, ZeroNoise, privacy, share_secret, trainer

from dprc_lightning import PerformanceConfig, noise
from dprc_lightning.bench.projection import LayerShape, measure_projection
from dprc_lightning.cli import main
from dprc_lightning.clipping import attach
from dprc_lightning.errors import InvalidArgumentError
from dprc_lightning.keys import KeyStream, derive
from dprc_lightning.plan.costs import Batch, norm_costs
from dprc_lightning.sketch import (
    BLOCK_ROWS,
    PROJECTIONS,
    ROWS_PER_BLOCK,
    Factors,
    StreamedMatrix,
    hutchinson,
    not_kept,
    sketch,
)
from dprc_lightning.sketch.blocks import rows_at_once

CPU = torch.device("cpu")
KEY = bytes(range(32))
KINDS = sorted(PROJECTIONS)
MIB = 2**20


def matrix(kind, rows, k, *, kept, index=0, name="w"):
    source = PROJECTIONS[kind](KEY, k)
    source.begin_step(index)
    source.stream([] if kept else [name])
    found = source.matrix(name, rows, CPU)
    assert isinstance(found, StreamedMatrix) is not kept
    return found


def whole(found):
    if isinstance(found, torch.Tensor):
        return found
    starts = range(0, found.shape[0], found.block_rows)
    return torch.cat([found.rows(start, min(start + found.block_rows, found.shape[0])) for start in starts])


def reference(kind, rows, k, index=0, name="w"):
    """P from whole key streams, float64: by the stored format alone, and by none of the library's generators."""
    label = {"gaussian": "P", "rademacher": "P rademacher"}[kind]
    blocks = []
    for block, start in enumerate(range(0, rows, 4096)):
        stream = Cipher(ChaCha20(derive(KEY, label, index, name, block), bytes(16)), mode=None).encryptor()
        count = min(4096, rows - start)
        if kind == "rademacher":
            width = math.ceil(k / 8)
            bits = np.frombuffer(stream.update(bytes(count * width)), np.uint8).reshape(count, width)
            blocks.append(2.0 * np.unpackbits(bits, axis=1, bitorder="little")[:, :k] - 1)
            continue
        entries = []
        left = math.ceil(count * k / 2)
        while left > 0:
            n = min(left, 2**15)
            words = np.frombuffer(stream.update(bytes(8 * (n + math.ceil(n / 2)))), "<u8")
            radius = np.sqrt(-2 * np.log(((words[:n] >> np.uint64(1)).astype(np.float64) + 0.5) * 2.0**-63))
            angle = words[n:].view("<i4")[:n].astype(np.float64) * math.pi * 2.0**-31
            entries += [radius * np.cos(angle), radius * np.sin(angle)]
            left -= n
        blocks.append(np.concatenate(entries)[: count * k].reshape(count, k))
    return torch.from_numpy(np.concatenate(blocks) / math.sqrt(k))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "k"), [(1, 1), (5, 3), (4096, 8), (4099, 7), (8195, 33), (700, 1030), (37, 70001)])
class TestTheSameNumbers:
    def test_row_blocks(self, kind, rows, k):
        streamed, kept = matrix(kind, rows, k, kept=False), matrix(kind, rows, k, kept=True)
        made = whole(streamed)
        assert made.dtype is torch.float32 and streamed.shape == (rows, k) and streamed.nbytes == 0
        assert torch.equal(made, whole(kept))
        assert torch.allclose(made.double(), reference(kind, rows, k), rtol=0, atol=4e-6 / math.sqrt(k))
        assert torch.equal(whole(streamed), made), "asked again"

    def test_ids_in_any_order_and_repeated(self, kind, rows, k):
        streamed, expected = matrix(kind, rows, k, kept=False), whole(matrix(kind, rows, k, kept=True))
        generator = torch.Generator().manual_seed(rows)
        ids = torch.randint(0, rows, (3, 2, 7), generator=generator)
        ids[0, 0, :2] = torch.tensor([rows - 1, 0])
        for asked in (ids, ids.flip(0), ids[0, 0, 0], ids[:0], torch.full((2, 600), rows - 1)):
            found = streamed.gather(asked)
            assert found.shape == (*asked.shape, k) and torch.equal(found, expected[asked])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("one_hot", [False, True])
@pytest.mark.parametrize("records", [1, 3])
def test_sketches_are_the_same_however_many_tokens_share_a_block(monkeypatch, kind, one_hot, records):
    rows, k, tokens, other = 8200, 9, 3 * BLOCK_ROWS + 11, 5
    torch.manual_seed(0)
    left = torch.randint(0, rows, (records, tokens)) if one_hot else torch.randn(records, tokens, rows).bfloat16()
    use = Factors(left, torch.randn(records, tokens, other), (rows, other))
    expected = sketch(use, matrix(kind, rows, k, kept=True), 0)
    for bytes_ in (0, 2 * 4 * records * k * BLOCK_ROWS, 2**26):
        monkeypatch.setattr(hutchinson, "_PRODUCT_BYTES", bytes_)
        assert torch.equal(sketch(use, matrix(kind, rows, k, kept=False), 0), expected)
    # The other side too, and a plain product in float64.
    if not one_hot:
        turned = Factors(use.right, use.left, (other, rows))
        streamed = matrix(kind, rows, k, kept=False)
        assert torch.equal(sketch(turned, streamed, 1), expected)
        brute = use.right.double().mT @ (left.double() @ reference(kind, rows, k))
        assert float((expected - brute).abs().max()) < 2e-5 * float(brute.abs().max())
    empty = Factors(left[:, :0], use.right[:, :0], use.shape)
    assert torch.equal(sketch(empty, matrix(kind, rows, k, kept=False), 0), torch.zeros(records, other, k))


class TestHowOften:
    @pytest.fixture
    def made(self, monkeypatch):
        """Which pieces of which key were made: every Gaussian entry comes through here."""
        found, starts = [], {}
        fill, begin = noise._fill_piece, KeyStream.__init__

        def init(self, key, position=0):
            begin(self, key, position)
            starts[self] = (key, position)

        def counted(out, stream):
            key, position = starts[stream]
            found.append((key, position))
            starts[stream] = (key, position + 12 * 2**15)
            fill(out, stream)

        monkeypatch.setattr(KeyStream, "__init__", init)
        monkeypatch.setattr(noise, "_fill_piece", counted)
        return found

    def test_each_piece_once_for_all_tokens(self, made):
        rows, k, tokens = 9000, 64, 4 * BLOCK_ROWS
        use = Factors(torch.randn(1, tokens, rows), torch.randn(1, tokens, 2), (rows, 2))
        sketch(use, matrix("gaussian", rows, k, kept=False), 0)
        # 1024 rows a piece.
        assert len(made) == len(set(made)) == math.ceil(rows / 1024)

    def test_once_for_each_window_where_products_are_large(self, made, monkeypatch):
        rows, k, tokens = 3000, 64, 4 * BLOCK_ROWS
        monkeypatch.setattr(hutchinson, "_PRODUCT_BYTES", 2 * BLOCK_ROWS * 4 * k)
        use = Factors(torch.randn(1, tokens, rows), torch.randn(1, tokens, 2), (rows, 2))
        sketch(use, matrix("gaussian", rows, k, kept=False), 0)
        assert len(made) == 2 * math.ceil(rows / 1024)

    @pytest.mark.parametrize("k", [64, 4096, 2**17])
    def test_ids_make_the_pieces_that_hold_them_once(self, made, k):
        rows = 64 * 4096 // k * 3 + 5
        torch.manual_seed(1)
        ids = torch.randint(0, rows, (2, 9)).repeat(1, 3)
        matrix("gaussian", rows, k, kept=False).gather(ids)
        holding = {
            (int(i) // ROWS_PER_BLOCK, entry // 2**16)
            for i in ids.flatten()
            for entry in range(int(i) % ROWS_PER_BLOCK * k, (int(i) % ROWS_PER_BLOCK + 1) * k, min(k, 2**16))
        }
        assert len(made) == len(set(made)) == len(holding) < rows * k / 2**16

    def test_a_kept_one_once_a_step(self, made):
        source = PROJECTIONS["gaussian"](KEY, 64)
        source.begin_step(0)
        for _ in range(3):
            source.matrix("w", 2000, CPU)
        assert len(made) == 2


class TestMemory:
    @pytest.mark.parametrize("one_hot", [False, True])
    def test_one_block_where_p_would_take_hundreds_of_mib(self, one_hot):
        shape = LayerShape(rows=20000, other=4, tokens=32, one_hot=one_hot)
        kept, made = measure_projection(shape, [4096], rounds=1)["rows"]
        block = 4 * 4096 * rows_at_once(4096)
        assert block == 16 * MIB
        assert made["kept_bytes"] == 0 and made["peak_bytes"] < 1.5 * block
        assert kept["kept_bytes"] == 4 * 4096 * 20000
        # P itself, once: not the blocks that it is put together from beside it.
        assert kept["kept_bytes"] < kept["peak_bytes"] < kept["kept_bytes"] + 10 * MIB

    def test_a_repeated_id_takes_no_copy_of_all(self):
        class Ids(LayerShape):
            def factors(self):
                use = super().factors()
                return Factors(torch.full_like(use.left, 7), use.right, use.shape)

        shape = Ids(rows=5000, other=4, tokens=8 * BLOCK_ROWS, one_hot=True)
        _, made = measure_projection(shape, [512], rounds=1)["rows"]
        # The rows asked for, 8 MiB, one part of them more, and pieces.
        assert made["peak_bytes"] < 8 * MIB + 4 * MIB

    def test_blocks_lie_in_one_key(self):
        for k in (1, 7, 32, 1000, 1024, 1025, 4096, 10**5, 10**8):
            rows = rows_at_once(k)
            assert ROWS_PER_BLOCK % rows == 0 and (rows == 1 or 4 * k * rows <= 16 * MIB)

    def test_the_command(self, capsys):
        flags = ["bench", "projection", "--rows", "300", "--other", "4", "--tokens", "8", "--sketch_dim", "2", "5"]
        assert main([*flags, "--projection", "rademacher", "--format", "json"]) == 0
        assert '"kept_bytes": 300' in capsys.readouterr().out
        assert main([*flags, "--one_hot"]) == 0
        head, *lines = capsys.readouterr().out.splitlines()
        assert head.split()[:2] == ["k", "P"] and [line.split()[0] for line in lines[:4]] == ["2", "2", "5", "5"]
        assert main(["bench", "projection", "--sketch_dim", "0"]) == 2
        assert "--sketch_dim=[0]: expected integers >= 1" in capsys.readouterr().err


class TestWhatIsKept:
    def test_in_the_order_of_the_parameters_while_there_is_room(self):
        sizes = {"a": 5, "b": 7, "c": 2, "d": 4, "e": 1}
        assert not_kept(sizes, None) == frozenset()
        assert not_kept(sizes, 0) == set(sizes)
        assert not_kept(sizes, 8) == {"b", "d"}
        assert not_kept(sizes, 19) == frozenset() and not_kept(sizes, 18) == {"e"}
        # What joins later changes nothing for the others.
        assert not_kept(sizes | {"f": 1}, 8) == {"b", "d", "f"}

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize(
        "case", [c for c in CASES if c.name in ("lm_tied", "llama_checkpointed")], ids=lambda case: case.name
    )
    def test_norms_and_gradients_are_the_same(self, case, kind):
        """With all of P kept, none, and some; two micro-batches a step."""
        results, total = [], 0
        for share in (None, 0.0, 0.6):
            model, batch = make(case)
            limit = None if share is None else share * total / 2**30
            handle = attach(model, "hutchinson", 4, kind, seed=3, projection_memory=limit)
            handle.begin_step()
            norms = []
            for part in (slice(0, 2), slice(2, None)):
                losses = case.losses(model, {name: value[part] for name, value in batch.items()})
                norms.append(handle.norms(losses))
                handle.clipped_backward(losses, max_grad_norm=0.5, norms=norms[-1])
            results.append([torch.cat(norms), *(p.grad for p in model.parameters())])
            rows = [row for row in handle.plan() if row.estimator != "exact"]
            made = [row for row in rows if row.block_bytes]
            assert all((row.projection_bytes == 0) == (row in made) for row in rows)
            used = handle._state.projections._cache
            assert {name for name, p in used.items() if isinstance(p, StreamedMatrix)} == {r.parameter for r in made}
            kept = sum(row.projection_bytes for row in rows)
            if share is None:
                total = kept
                assert made == []
            else:
                assert kept <= share * total
                assert share > 0 or len(made) == len(rows)
        assert 0 < len(made) < len(rows)
        for other in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))

    def test_what_is_unfrozen_later_comes_last(self):
        model = nn.Sequential(nn.Linear(30, 3, bias=False), nn.Linear(3, 40, bias=False))
        model[0].requires_grad_(False)
        # Room for the larger one of the two.
        handle = attach(model, "hutchinson", 2, projection_memory=40 * 2 * 4 / 2**30)
        handle.begin_step()
        model[0].requires_grad_(True)
        handle.begin_step()
        assert {row.parameter: row.projection_bytes for row in handle.plan()} == {"1.weight": 320, "0.weight": 0}

    @pytest.mark.parametrize("value", [-1.0, math.inf, math.nan])
    def test_no_memory_at_all(self, value):
        with pytest.raises(InvalidArgumentError, match=r"^projection_memory=.*: expected finite GiB"):
            attach(nn.Linear(3, 2), projection_memory=value)
        (problem,) = PerformanceConfig(projection_memory=value).problems()
        assert problem.startswith(f"performance.projection_memory={value}: expected finite GiB")
        assert PerformanceConfig(projection_memory=None).problems() == []

    def test_the_plan_counts_a_block_and_what_shares_it(self):
        model = nn.Linear(16, 9000, bias=False)
        settings = {"sketch_dim": 8, "estimator": "hutchinson", "projection": "gaussian"}
        kept = norm_costs(model, Batch(2, 700), **settings)
        made = norm_costs(model, Batch(2, 700), projection_memory=0.0, **settings)
        assert (kept.projection_bytes, made.projection_bytes) == (4 * 8 * 9000, 0)
        assert made.norm_bytes - kept.norm_bytes == 4 * 8 * 4096 + 4 * 2 * 700 * 8
        assert made.flops == kept.flops

    @pytest.mark.filterwarnings("ignore")
    def test_a_run_learns_the_same(self, tmp_path, monkeypatch):
        learned = []
        for memory in (1.0, 0.0):
            folder = tmp_path / str(memory)
            if learned:
                share_secret(monkeypatch, tmp_path / "1.0")
            module = ToyModule(
                privacy(estimator="hutchinson", sketch_dim=4),
                PerformanceConfig(physical_batch_size=3, projection_memory=memory),
            )
            seen = []
            step = module.training_step

            def training_step(batch, index, module=module, step=step, seen=seen):
                step(batch, index)
                seen += module.handle._state.projections._cache.values()

            module.training_step = training_step
            trainer(folder, noise=ZeroNoise()).fit(module, datamodule=ToyData())
            assert seen and all(isinstance(p, StreamedMatrix) is (memory == 0.0) for p in seen)
            learned.append([p.detach().clone() for p in module.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(*learned, strict=True))


def test_a_key_stream_can_be_entered_later():
    stream = KeyStream(KEY).bytes(64 * 50)
    for position in (0, 64, 64 * 33):
        assert KeyStream(KEY, position).bytes(200) == stream[position : position + 200]
    # The counter of the last block, beyond which it would wrap.
    last = KeyStream(KEY, 2**38 - 64)
    assert len(last.bytes(64)) == 64
    for position in (-64, 1, 63, 2**38):
        with pytest.raises(InvalidArgumentError, match=f"^position={position}: "):
            KeyStream(KEY, position)
    with pytest.raises(InvalidArgumentError, match="2\\^38 bytes"):
        last.bytes(1)
