"""`performance.memory`: the flags that are picked, against every set tried and against real steps; and what is said."""

import json
from dataclasses import replace

import lightning.pytorch as pl
import pytest
import torch
from llama_module import LlamaData, LlamaModule, real_peak
from torch import nn
from toy import ToyData, ToyModule, privacy, trainer

from dprc_lightning import PerformanceConfig, attach, preflight
from dprc_lightning.activation_checkpointing import ActivationCheckpointing
from dprc_lightning.bench.module_step import meta_twin
from dprc_lightning.errors import ConfigurationError
from dprc_lightning.plan.pick import Device, memory_of, pick
from dprc_lightning.strategies import PrivateDDPStrategy

ALL = [
    {},
    {"mlp_chunk": 512},
    {"checkpointing": True},
    {"checkpointing": True, "mlp_chunk": 512},
    {"checkpointing": True, "mlp_chunk": 512, "offload_checkpoints": True},
]
GIB = 2**30


def llama(settings=None, **options):
    given = {"physical_batch_size": 2, "memory": 1.0} | (settings or {})
    return LlamaModule(privacy(estimator="auto", sketch_dim=4), PerformanceConfig(**given), **options)


def exact_llama(settings=None, **options):
    """Sketches take seconds to account."""
    module = llama(settings, **options)
    module.privacy = replace(module.privacy, estimator="exact")
    return module


def gpu(limit):
    return Device(1.0, limit, is_host=False)


@pytest.fixture(scope="module")
def every():
    """All sets of flags, none of which fits."""
    return pick(llama(), gpu(1))


class TestThePick:
    def test_each_set_is_as_large_as_on_real_tensors(self, every):
        assert [row.flags for row in every.rows] == ALL
        for row in every.rows:
            peak, host = real_peak(llama(), row.flags, 2)
            assert row.peak_bytes == pytest.approx(peak, rel=0.02), row.flags
            assert row.host_bytes == host
        assert len({row.peak_bytes for row in every.rows}) == len(ALL)
        assert every.rows[-1].host_bytes == 2 * 2 * 600 * 32 * 4, "records, layers, tokens, width, bytes"

    def test_at_every_limit_it_is_the_cheapest_that_fits(self, every):
        totals = [row.total_bytes for row in every.rows]
        for limit in [totals[0], totals[1] - 1, totals[2], totals[3], totals[4] - 1]:
            # Brute force: of all sets that fit the one with the fewest FLOPs, and then the fewest flags.
            fitting = [row for row in every.rows if row.peak_bytes + row.optimizer_bytes <= limit]
            found = pick(llama(), gpu(limit))
            assert found.fits == bool(fitting)
            if fitting:
                best = min(fitting, key=lambda row: (round(row.flops_ratio, 6), len(row.flags)))
                assert found.flags == best.flags
                assert real_peak(llama(), found.flags, 2)[0] + best.optimizer_bytes <= limit * 1.001

    def test_what_comes_on_top_of_the_step(self, every):
        numel = sum(p.numel() for p in llama().parameters())
        assert {row.optimizer_bytes for row in every.rows} == {2 * 4 * numel}
        buckets = pick(llama(), gpu(GIB), buckets=True).rows[0]
        assert buckets.optimizer_bytes == 3 * 4 * numel and buckets.peak_bytes == every.rows[0].peak_bytes
        short = pick(llama(tokens=2), gpu(GIB)).rows[0]
        assert short.update_bytes == 3 * 4 * numel
        assert short.total_bytes == max(short.peak_bytes, short.update_bytes) + short.optimizer_bytes

    def test_a_padding_mask(self):
        module = llama(masked=True)
        (row,) = pick(module, gpu(GIB)).rows
        assert row.peak_bytes == pytest.approx(real_peak(module, {}, 2)[0], rel=0.02)

    @pytest.mark.parametrize("flags", ALL[:4:3])
    def test_bfloat16_parameters(self, flags):
        module = llama()
        rows = pick(module, gpu(1), precision="bf16-true").rows
        assert {p.dtype for p in module.parameters()} == {torch.float32}, "the module is as it was"
        assert all(b.optimizer_bytes == 2 * 2 * sum(p.numel() for p in module.parameters()) for b in rows)
        (row,) = [row for row in rows if row.flags == flags]
        assert row.peak_bytes == pytest.approx(real_peak(module.to(torch.bfloat16), flags, 2)[0], rel=0.02)

    def test_mixed_precision_is_an_upper_estimate(self):
        module = llama(tokens=40)
        (row,) = pick(module, gpu(GIB), precision="bf16-mixed").rows
        with torch.autocast("cpu", torch.bfloat16):
            assert row.peak_bytes > real_peak(module, {}, 2)[0]

    def test_tokens_bound_a_micro_batch_too(self, every):
        # 1200 tokens are two of the longest records, or 32 of 37 tokens.
        found = pick(llama({"physical_batch_size": 32, "max_tokens": 1200}), gpu(GIB))
        assert (found.records, found.tokens) == (2, 600)
        assert found.rows[0].peak_bytes >= every.rows[0].peak_bytes
        short = pick(llama({"physical_batch_size": 32}, tokens=37), gpu(GIB))
        assert found.rows[0].peak_bytes == max(every.rows[0].peak_bytes, short.rows[0].peak_bytes)
        one = pick(llama({"physical_batch_size": 1, "max_tokens": 10}), gpu(GIB))
        assert (one.records, one.tokens) == (1, 600), "a longer record gets a micro-batch of its own"

    def test_projections_that_are_not_kept(self):
        settings = {"projection_memory": 0.0}
        module = llama(settings)
        module.privacy = replace(module.privacy, estimator="hutchinson", sketch_dim=64)
        (row,) = pick(module, gpu(GIB)).rows
        kept = llama()
        kept.privacy = module.privacy
        assert row.peak_bytes < pick(kept, gpu(GIB)).rows[0].peak_bytes
        assert row.peak_bytes == pytest.approx(real_peak(module, {}, 2)[0], rel=0.02)


class TestWhatTheUserSet:
    def test_a_model_that_checkpoints_starts_there(self, every):
        module = llama()
        module.llama.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
        rows = pick(module, gpu(1)).rows
        added = [{}, {"mlp_chunk": 512}, {"mlp_chunk": 512, "offload_checkpoints": True}]
        assert [row.flags for row in rows] == added
        assert [row.peak_bytes for row in rows] == [row.peak_bytes for row in every.rows[2:]]

    def test_a_chunk_stays(self, every):
        rows = pick(llama({"mlp_chunk": 512}), gpu(1)).rows
        assert [row.flags for row in rows] == [
            {}, {"checkpointing": True}, {"checkpointing": True, "offload_checkpoints": True},
        ]  # fmt: skip
        assert [row.peak_bytes for row in rows[:2]] == [every.rows[1].peak_bytes, every.rows[3].peak_bytes]

    def test_offloading_needs_checkpoints(self):
        rows = pick(llama({"offload_checkpoints": True}), gpu(1)).rows
        assert [row.flags for row in rows] == ALL[2:4]
        assert all(row.host_bytes for row in rows)

    def test_on_the_host_there_is_nothing_to_offload_to(self, every):
        rows = pick(llama(), Device(1.0, 1, is_host=True)).rows
        assert [row.flags for row in rows] == ALL[:4]
        moved = pick(llama({"offload_checkpoints": True}), Device(1.0, 1, is_host=True)).rows
        assert moved[1].peak_bytes == every.rows[4].peak_bytes + every.rows[4].host_bytes

    def test_a_model_in_evaluation_mode_does_not_checkpoint(self):
        module = llama(tokens=64)
        module.llama.eval()
        assert [row.flags for row in pick(module, gpu(1)).rows] == [{}]

    def test_a_flag_that_has_no_use_is_left_out(self):
        module = llama()
        module.privacy = replace(module.privacy, estimator="hutchpp")
        rows = pick(module, gpu(1)).rows
        assert [row.flags for row in rows] == [{}, ALL[2], {"checkpointing": True, "offload_checkpoints": True}]
        with pytest.raises(ConfigurationError, match=r"performance.mlp_chunk=512: parameter .* estimator=hutchpp"):
            module.performance = replace(module.performance, mlp_chunk=512)
            pick(module, gpu(1))

    def test_a_model_of_other_parts(self):
        module = ToyModule(privacy(), PerformanceConfig(physical_batch_size=3, memory=1.0))
        module.largest_batch = lambda records: [torch.zeros(records, 3), torch.zeros(records, dtype=torch.int64)]
        found = pick(module, gpu(GIB))
        assert [row.flags for row in found.rows] == [{}]
        assert "no flag added: a step of 3 records takes" in found.said()


class TestRefusals:
    def problems(self, folder, module, **changes):
        return preflight.problems(trainer(folder, **changes), module, ToyData())

    def toy(self, performance, **changes):
        return ToyModule(privacy(**changes), performance)

    def test_without_a_largest_batch(self, tmp_path):
        settings = PerformanceConfig(memory="auto")
        (line,) = self.problems(tmp_path, self.toy(settings))
        assert line.startswith("performance.memory=auto: ToyModule.largest_batch is not written; return")
        with pytest.raises(ConfigurationError, match="ToyModule.largest_batch: not written; return"):
            self.toy(settings).largest_batch(2)

    @pytest.mark.parametrize("strategy", ["dprc_fsdp", "dprc_fsdp2"])
    def test_engines_that_share_the_model(self, tmp_path, strategy):
        found = self.problems(tmp_path, llama(), strategy=strategy)
        assert any(f"performance.memory=1.0: a step of one device with the whole model is simulated, and "
                   f"trainer.strategy={strategy} shares it" in line for line in found)  # fmt: skip

    def test_ddp_may(self, tmp_path):
        strategy = PrivateDDPStrategy(process_group_backend="gloo")
        assert not [line for line in self.problems(tmp_path, llama(), strategy=strategy) if "memory" in line]

    def test_a_baseline(self, tmp_path):
        module = self.toy(PerformanceConfig(memory=2.0), baseline_without_privacy=True, noise_multiplier=None)
        (line,) = self.problems(tmp_path, module)
        assert line.startswith("performance.memory=2.0: it belongs to the layers of a private run")

    @pytest.mark.parametrize("memory", [0.0, -1.0, float("inf"), float("nan"), True, "all"])
    def test_values(self, memory):
        (line,) = PerformanceConfig(memory=memory).problems()
        assert line.startswith(f"performance.memory={memory}: expected finite GiB > 0, auto, or null")

    def test_tokens_alone_bound_no_number_of_records(self):
        (line,) = PerformanceConfig(memory=1.0, physical_batch_size=None, max_tokens=64).problems()
        assert "performance.max_tokens=64 alone allows as many records of one token" in line

    def test_a_largest_batch_of_another_size(self):
        class Wrong(LlamaModule):
            def largest_batch(self, records):
                return super().largest_batch(1)

        module = Wrong(privacy(estimator="auto", sketch_dim=4), PerformanceConfig(physical_batch_size=2, memory=1.0))
        with pytest.raises(ConfigurationError, match=r"Wrong.largest_batch: .* shape \(1,\) for a batch of records=2"):
            pick(module, gpu(GIB))

    def test_eval_mode_is_told_where_nothing_fits(self):
        module = llama()
        assert "call train()" not in pick(module, gpu(1)).problem()
        module.eval()
        assert "call train() on the model, which can then checkpoint" in pick(module, gpu(1)).problem()

    def test_nothing_fits(self, tmp_path):
        module = llama({"memory": 1e-4}, tokens=64)
        with pytest.raises(ConfigurationError) as caught:
            trainer(tmp_path).fit(module, LlamaData(64))
        said = str(caught.value)
        assert said.startswith("performance.memory=0.0001: nothing fits; the least is 0.00")
        assert "for a step of 2 x 64 tokens with Adam (simulated), with activation checkpointing; lower" in said
        assert "\n" not in said and not list(tmp_path.glob("**/ledger.jsonl"))
        assert module.handle is None and not module.llama.is_activation_checkpointing

    def test_a_loss_that_looks_at_numbers(self):
        class Looks(LlamaModule):
            def per_sample_loss(self, batch):
                assert int(batch[0].max()) >= 0
                return super().per_sample_loss(batch)

        module = Looks(privacy(), PerformanceConfig(memory=1.0), tokens=64)
        with pytest.raises(ConfigurationError, match=r"performance.memory=1.0: Looks.per_sample_loss does not run .*"):
            pick(module, gpu(GIB))


class TestTheRun:
    def test_it_trains_with_what_was_picked_and_says_so(self, tmp_path, capsys):
        module = exact_llama(tokens=600)
        rows = pick(module, Device(1.0, 1, is_host=True)).rows
        limit = rows[3].total_bytes
        assert limit < rows[2].total_bytes
        module.performance = replace(module.performance, memory=limit / GIB)
        before = [(name, type(m), dict(vars(m))) for name, m in module.llama.named_modules()]
        during = []

        class Look(pl.Callback):
            def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
                during.append((module.llama.is_activation_checkpointing, sorted(module.handle.chunked_mlps)))

        trainer(tmp_path, callbacks=[Look()]).fit(module, LlamaData(600))
        mlps = [f"llama.model.layers.{i}.mlp" for i in range(2)]
        assert during == [(True, mlps)] * 4
        flags = "activation checkpointing, mlp_chunk=512: a step of 2 x 600 tokens takes"
        assert flags in capsys.readouterr().out
        (file,) = tmp_path.glob("**/report.json")
        report = json.loads(file.read_text())
        assert report["memory"]["flags"] == {"checkpointing": True, "mlp_chunk": 512}
        assert report["memory"]["total_bytes"] == limit
        assert flags in file.with_suffix(".md").read_text()
        # Given back as it was, and free to be picked for again.
        after = [(name, type(m), dict(vars(m))) for name, m in module.llama.named_modules()]
        assert [(n, t, sorted(v)) for n, t, v in after] == [(n, t, sorted(v)) for n, t, v in before]
        assert not module.llama.is_activation_checkpointing

    def test_without_it_nothing_is_turned_on(self, tmp_path):
        module = exact_llama({"memory": None}, tokens=32)
        trainer(tmp_path).fit(module, LlamaData(32))
        (file,) = tmp_path.glob("**/report.json")
        assert module.memory_pick is None and json.loads(file.read_text())["memory"] is None

    def test_a_second_fit_picks_again(self, tmp_path):
        module = exact_llama(tokens=32)
        trainer(tmp_path / "a").fit(module, LlamaData(32))
        assert module.memory_pick.flags == {}
        module.performance = replace(module.performance, memory=None)
        trainer(tmp_path / "b").fit(module, LlamaData(32))
        assert module.memory_pick is None


class TestCheckpointing:
    def test_it_is_undone(self):
        module = llama(tokens=8)
        before = {name: dict(vars(m)) for name, m in module.named_modules()}
        turned_on = ActivationCheckpointing(module)
        assert module.llama.is_activation_checkpointing
        turned_on.remove()
        turned_on.remove()
        after = {name: dict(vars(m)) for name, m in module.named_modules()}
        assert {n: sorted(v) for n, v in after.items()} == {n: sorted(v) for n, v in before.items()}
        assert not module.llama.is_activation_checkpointing

    def test_the_gradients_are_the_same_bit_for_bit(self):
        found = []
        for turned_on in (False, True):
            module = llama(tokens=40)
            if turned_on:
                ActivationCheckpointing(module)
            handle = attach(module, "hutchinson", 4, seed=0, check_isolation=False)
            ids = torch.randint(0, 96, (3, 40), generator=torch.Generator().manual_seed(0))
            handle.begin_step()
            handle.clipped_backward(module.per_sample_loss([ids]), max_grad_norm=0.5)
            found.append([p.grad for p in module.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))

    def test_what_was_set_up_before_stays(self):
        module = llama(tokens=8)
        module.llama.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
        ActivationCheckpointing(module).remove()
        assert module.llama.is_activation_checkpointing


class TestTheTwin:
    def test_it_has_no_numbers_and_the_same_ties(self):
        module = llama(tokens=8)
        module.table = torch.ones(3)
        module.register_buffer("kept", torch.ones(2, 2))
        module.llama.model.embed_tokens.weight.requires_grad_(False)
        twin = meta_twin(module)
        assert twin.llama.lm_head.weight is twin.llama.model.embed_tokens.weight
        assert twin.table.is_meta and twin.kept.is_meta and twin.device == torch.device("meta")
        ours = [(n, p.shape, p.dtype, p.requires_grad) for n, p in module.named_parameters()]
        assert [(n, p.shape, p.dtype, p.requires_grad) for n, p in twin.named_parameters()] == ours
        assert all(p.is_meta for p in twin.parameters()) and not any(p.is_meta for p in module.parameters())

    def test_a_trainer_is_left_behind(self, tmp_path):
        module = llama(tokens=8)
        module.trainer = trainer(tmp_path)
        assert meta_twin(module)._trainer is None and module.trainer is not None

    def test_integers_keep_their_kind(self):
        module = nn.Module()
        module.register_buffer("count", torch.zeros(2, dtype=torch.int64))
        module.register_buffer("scale", torch.zeros(2))
        twin = meta_twin(module, torch.bfloat16)
        assert (twin.count.dtype, twin.scale.dtype) == (torch.int64, torch.bfloat16)


def test_auto_is_nine_tenths():
    whole = memory_of(torch.device("cpu"))
    assert 2**28 < whole < 2**50
    device = Device.of("auto", torch.device("cpu"))
    assert device.limit_bytes == int(0.9 * whole) and device.is_host
    assert Device.of("auto", torch.device("cpu"), sharing=4).limit_bytes == int(0.9 * whole) // 4
    assert Device.of(2.5, torch.device("cuda"), sharing=4) == Device(2.5, int(2.5 * GIB), is_host=False)
