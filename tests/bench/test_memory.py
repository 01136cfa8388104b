"""Live bytes: known allocations, the allocator's own count, and the private step against plain checkpointing."""

import gc

import pytest
import torch
from cases import lm_losses, tiny_llama, token_batch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

from dprc_lightning import attach
from dprc_lightning.bench.memory import LiveMemory
from dprc_lightning.bench.step import StepShape, flop_counter, measure_step
from dprc_lightning.cli import main

FLOAT = 4


class TestKnownAllocations:
    def test_what_is_made_inside_counts_until_it_is_dropped(self):
        with LiveMemory() as live:
            assert (live.current, live.peak) == (0, 0)
            a = torch.zeros(10)
            assert live.current == 10 * FLOAT
            b = torch.zeros(3, dtype=torch.int64)
            assert live.current == 10 * FLOAT + 24
            del a
            assert (live.current, live.peak) == (24, 64)
        del b
        assert (live.current, live.peak) == (0, 64), "what dies after the context leaves too"

    def test_what_is_made_outside_counts_once_it_is_added(self):
        x, y = torch.zeros(8), torch.zeros(4)
        with LiveMemory() as live:
            x.add_(1)
            live.add([x, x[2:], y])
            live.add([y.detach()])
            assert live.current == 12 * FLOAT
            x.mul_(2)
            assert (live.current, live.peak) == (12 * FLOAT, 12 * FLOAT)

    def test_a_shared_storage_counts_once_and_whole(self):
        with LiveMemory() as live:
            whole = torch.zeros(4, 6)
            parts = [whole.view(24), whole[1], whole.T, whole.detach(), *whole.unbind(0)]
            assert live.current == 24 * FLOAT
            del whole
            while len(parts) > 1:
                parts.pop()
                assert live.current == 24 * FLOAT
            parts.clear()
            assert live.current == 0

    def test_peak(self):
        x = torch.zeros(100)
        with LiveMemory() as live:
            live.add([x])
            a = x + 1
            del a
            b = x * 2
            assert (live.current, live.peak) == (200 * FLOAT, 200 * FLOAT)
            c = (b + 1) * 3
            # x, b, the sum and the product; the sum has gone since.
            assert (live.current, live.peak) == (300 * FLOAT, 400 * FLOAT)
        del c

    def test_an_address_that_is_used_again(self):
        with LiveMemory() as live:
            addresses = set()
            for i in range(1, 50):
                made = torch.zeros(1000 + i % 3)
                addresses.add(made.untyped_storage()._cdata)
                assert live.current == made.numel() * FLOAT
                del made
                assert live.current == 0
            assert len(addresses) < 49, "no address was used twice: nothing was tested"

    def test_a_storage_that_grows(self):
        with LiveMemory() as live:
            x = torch.zeros(5)
            x.resize_(50)
            assert live.current == 50 * FLOAT
            del x
            assert live.current == 0

    def test_what_only_the_graph_holds(self):
        x = torch.ones(7, requires_grad=True)
        with LiveMemory() as live:
            live.add([x])
            y = x.exp().sum()
            gc.collect()
            assert live.current == (7 + 7 + 1) * FLOAT
            y.backward()
            # exp's result has gone with the graph's buffers; the gradient is there.
            assert live.current == (7 + 1 + 7) * FLOAT
            x.grad = None
            assert live.current == (7 + 1) * FLOAT

    def test_what_a_function_of_ones_own_saves(self):
        class Half(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.save_for_backward(x * 2)
                return x.sum()

            @staticmethod
            def backward(ctx, g):
                return ctx.saved_tensors[0] * g

        x = torch.ones(9, requires_grad=True)
        with LiveMemory() as live:
            y = Half.apply(x)
            assert live.current == (9 + 1) * FLOAT
            y.backward()
            # Its gradient takes the place of what was saved.
            assert live.current == (1 + 9) * FLOAT

    def test_checkpointing(self):
        x = torch.ones(11, requires_grad=True)

        def block(h):
            return h.exp().exp().exp()

        with LiveMemory() as live:
            plain = block(x)
            # Each exp saves its result.
            assert live.current == 3 * 11 * FLOAT
            del plain
            y = checkpoint(block, x, use_reentrant=False)
            assert live.current == 11 * FLOAT
            y.sum().backward()
            assert live.peak >= 4 * 11 * FLOAT, "the recomputation must be seen"

    def test_frozen_layers_and_micro_batches(self):
        """What torch's MemTracker refuses."""
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        model[0].requires_grad_(False)
        with LiveMemory() as live:
            live.add(model.parameters())
            for _ in range(2):
                model(torch.zeros(3, 4)).sum().backward()
            assert live.current == (2 * 20 + 20) * FLOAT

    def test_fake_tensors(self):
        def run():
            weight = torch.zeros(30, 20, requires_grad=True)
            (torch.zeros(4, 30) @ weight).relu().sum().backward()

        with LiveMemory() as real:
            run()
        with FakeTensorMode(), LiveMemory() as fake:
            run()
        assert real.peak == fake.peak > 2 * 600 * FLOAT


def allocator_peak(run):
    """The most that torch's CPU allocator handed out during a run, beyond what there was before."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        run()
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    current = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        current += event.nbytes()
        peak = max(peak, current)
    return peak


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("private", [False, True])
def test_against_the_allocator(private, checkpointing):
    shape = StepShape(
        tokens=256, records=2, hidden=64, intermediate=128, layers=3, vocabulary=512, checkpointing=checkpointing
    )
    ids = torch.randint(0, 512, (2, 256), generator=torch.Generator().manual_seed(0))

    def first_step():
        model = shape.build()
        handle = attach(model, "hutchinson", 8, seed=0) if private else None

        def step():
            losses = lm_losses(model, {"input_ids": ids, "attention_mask": None, "labels": ids})
            if handle is None:
                losses.sum().backward()
            else:
                handle.clipped_backward(losses, max_grad_norm=1.0)

        return model, step

    model, step = first_step()
    with LiveMemory() as live:
        live.add([*model.parameters(), *model.buffers()])
        before = live.current
        step()
    _, step = first_step()
    allocated = allocator_peak(step)
    assert live.peak - before == pytest.approx(allocated, abs=128 * 1024)
    assert allocated > 20 * 128 * 1024


def after_forward(estimator, *, tied, checkpointing, spoil=None):
    """Live bytes right after a forward, and the handle's number of uses."""
    torch.manual_seed(0)
    model, batch = tiny_llama(tied, checkpointing).train(), token_batch(40)
    handle = attach(model, estimator, 4, seed=0) if estimator else None
    if spoil is not None:
        spoil(model)
    with LiveMemory() as live:
        live.add([*model.parameters(), *model.buffers(), *batch.values()])
        losses = lm_losses(model, batch)
        found = live.current
    del losses
    return found, sum(len(row.modules) for row in handle.plan()) if handle else 0


class TestTheForwardOfAPrivateStep:
    @pytest.mark.parametrize("tied", [False, True])
    @pytest.mark.parametrize("checkpointing", [True, False])
    @pytest.mark.parametrize("estimator", ["hutchinson", "exact"])
    def test_keeps_what_the_plain_model_keeps(self, estimator, tied, checkpointing):
        """But for scalars: 4 bytes for each use of a parameter at most (today one anchor, 4 bytes in all).

        It may keep less: the plain backward of each RMSNorm saves the normalised input [B, T, d] and its scale [B, T].
        """
        plain, _ = after_forward(None, tied=tied, checkpointing=checkpointing)
        private, uses = after_forward(estimator, tied=tied, checkpointing=checkpointing)
        assert uses == 21
        normalised = (1 if checkpointing else 5) * 5 * 9 * (16 + 1) * FLOAT
        assert plain - normalised <= private <= plain + FLOAT * uses

    def test_checkpointing_saves_what_it_should(self):
        whole, _ = after_forward("hutchinson", tied=True, checkpointing=False)
        recomputed, _ = after_forward("hutchinson", tied=True, checkpointing=True)
        assert recomputed < 0.5 * whole

    def test_one_kept_activation_would_be_seen(self):
        """What a library that hooks the inputs of its layers does to a checkpointed model."""
        kept = []

        def spoil(model):
            model.model.layers[0].mlp.down_proj.register_forward_pre_hook(lambda _, args: kept.append(args[0]))

        plain, _ = after_forward(None, tied=True, checkpointing=True)
        clean, uses = after_forward("hutchinson", tied=True, checkpointing=True)
        spoiled, _ = after_forward("hutchinson", tied=True, checkpointing=True, spoil=spoil)
        assert spoiled == clean + 5 * 9 * 24 * FLOAT
        assert spoiled > plain + FLOAT * uses

    @pytest.mark.parametrize("tied", [False, True])
    @pytest.mark.parametrize("estimator", ["hutchinson", "exact"])
    def test_the_norms_are_the_same_with_and_without_checkpointing(self, estimator, tied):
        norms = []
        for checkpointing in (False, True):
            torch.manual_seed(0)
            model, batch = tiny_llama(tied, checkpointing).train(), token_batch(40)
            norms.append(attach(model, estimator, 4, seed=0).norms(lm_losses(model, batch)))
        assert torch.equal(*norms)
        assert norms[0].count_nonzero() == 4, "one of the five records has no label"


class TestBenchStep:
    def rows(self, **options):
        shape = StepShape(tokens=64, records=2, hidden=32, intermediate=64, layers=3, vocabulary=128, **options)
        return {row["step"]: row for row in measure_step(shape, [0, 4], rounds=1)["rows"]}

    @pytest.mark.parametrize("tied", [False, True])
    def test_peaks(self, tied):
        rows = self.rows(tied=tied)
        assert list(rows) == ["non-private", "exact", "hutchinson k=4"]
        base = rows["non-private"]
        model = StepShape(tokens=64, records=2, hidden=32, intermediate=64, layers=3, vocabulary=128, tied=tied).build()
        assert base["peak_bytes"] > 2 * FLOAT * sum(p.numel() for p in model.parameters())
        for row in rows.values():
            assert row["peak_ratio"] == row["peak_bytes"] / base["peak_bytes"]
        # Nothing of the order of a gradient per record.
        assert 0.8 < rows["hutchinson k=4"]["peak_ratio"] < 1.1

    def test_the_table(self, capsys):
        assert main(["bench", "step", "--tokens", "16", "--records", "1", "--rounds", "1", "--sketch_dim", "2"]) == 0
        head, *lines = capsys.readouterr().out.split("\n")
        assert head.split() == "step GFLOP ratio peak MiB ratio CPU s ratio".split()
        base, _, sketched = (line[20:].split() for line in lines[:3])
        assert base[3] == "1.000" and float(base[2]) > 2 * 6.0 * FLOAT * 1e6 / 2**20, (
            "6.0 million weights and their gradients"
        )
        assert float(sketched[2]) / float(base[2]) == pytest.approx(float(sketched[3]), abs=0.01)

    @pytest.mark.parametrize("batch", [(), (3,)])
    def test_products_that_are_added_in_place(self, batch):
        left, right, total = torch.zeros(*batch, 4, 5), torch.zeros(*batch, 5, 6), torch.zeros(*batch, 4, 6)
        with flop_counter() as counter:
            (total.baddbmm_ if batch else total.addmm_)(left, right, beta=0.0, alpha=2.0)
        assert counter.get_total_flops() == 2 * total.numel() * 5
        with flop_counter() as counter:
            left @ right
        assert counter.get_total_flops() == 2 * total.numel() * 5

    def test_no_product_is_lost(self):
        """Forward, dX, dX again and dW, over forward, dX and dW: fewer are not possible with two passes."""
        _, *private = self.rows().values()
        assert all(row["flops_ratio"] > 4 / 3 for row in private)

    def test_checkpointing_shows(self):
        plain, recomputed = self.rows(), self.rows(checkpointing=True)
        for step in plain:
            assert recomputed[step]["peak_bytes"] < 0.8 * plain[step]["peak_bytes"]

    def test_the_figures_repeat(self):
        first, second = self.rows(), self.rows()
        for step in first:
            assert first[step]["peak_bytes"] == second[step]["peak_bytes"]
