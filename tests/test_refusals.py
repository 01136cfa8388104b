"""What an engine may not be told, and what it may not do: each by a line that names the setting and the remedy."""

import os
import subprocess
import sys
import time
import types

import pytest
import torch
from cases import tiny_llama
from torch import nn
from toy import ToyData, ToyModule, ZeroNoise, privacy, trainer

from dprc_lightning import preflight
from dprc_lightning.cli import main
from dprc_lightning.errors import ConfigurationError, UnclippedGradientError
from dprc_lightning.lightning_cli import DPRCCLI, SaveRunConfig
from dprc_lightning.strategies import (
    NoiseHook,
    PrivateDDPStrategy,
    PrivateDeepSpeedStrategy,
    PrivateFSDP2Strategy,
    PrivateFSDPStrategy,
    deepspeed_op,
)
from dprc_lightning.strategies.refusals import (
    deepspeed_problems,
    half_parameter_problems,
    refuse_engine,
    refuse_optimizer,
)
from dprc_lightning.strategies.wrapping import check_ties, layers_to_wrap, roots_to_wrap

GOOD = {"zero_optimization": {"stage": 2}}

REFUSED = [
    ({"optimizer": {"type": "Adam"}}, "optimizer={'type': 'Adam'}", "write configure_optimizers"),
    ({"scheduler": {"type": "WarmupLR"}}, "scheduler={'type': 'WarmupLR'}", "write configure_optimizers"),
    ({"gradient_clipping": 1.0}, "gradient_clipping=1.0", "set privacy.max_grad_norm"),
    ({"fp16": {"enabled": True}}, "fp16.enabled=True", "set trainer.precision=bf16-mixed"),
    ({"bf16": {"enabled": True}}, "bf16.enabled=True", "set trainer.precision=bf16-mixed"),
    ({"torch_autocast": {"enabled": True}}, "torch_autocast.enabled=True", "set trainer.precision=bf16-mixed"),
    ({"communication_data_type": "bf16"}, "communication_data_type=bf16", "summed in fp32"),
    ({"data_types": {"grad_accum_dtype": "bf16"}}, "data_types.grad_accum_dtype=bf16", "leave it out"),
    ({"sparse_gradients": True}, "sparse_gradients=True", "leave it out"),
    ({"gradient_allreduce_op": "sum"}, "gradient_allreduce_op='sum'", "leave it out"),
    ({"sequence_parallel_size": 2}, "sequence_parallel_size=2", "leave it out"),
    ({"tensor_parallel": {"autotp_size": 2}}, "tensor_parallel={'autotp_size': 2}", "leave it out"),
    ({"bfloat16": {"enabled": True}}, "bfloat16={'enabled': True}", "leave it out"),
    ({"gradient_predivide_factor": 2.0}, "gradient_predivide_factor=2.0", "leave it out"),
    ({"gradient_accumulation_steps": 2}, "gradient_accumulation_steps=2", "performance.physical_batch_size"),
    ({"zero_allow_untested_optimizer": False}, "zero_allow_untested_optimizer=False", "leave it out"),
    ({"zero_force_ds_cpu_optimizer": True}, "zero_force_ds_cpu_optimizer=True", "leave it out"),
    ({"zero_optimization": {"stage": 2, "contigous": True}}, "zero_optimization.contigous=True", "leave it out"),
    ({"zero_optimization": True}, "zero_optimization=True", "expected its settings"),
    (
        {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}},
        "offload_parameters=True",
        "stage 3 alone does it",
    ),
    ({"compression_training": {"x": 1}}, "compression_training={'x': 1}", "leave it out"),
    *(
        ({"zero_optimization": {"stage": 2, name: True}}, f"zero_optimization.{name}=True", "leave it out")
        for name in ("zero_quantized_gradients", "zero_quantized_weights", "zenflow", "use_muon")
    ),
    *(
        (
            {"zero_optimization": {"stage": 2, name: {"device": "nvme"}}},
            f"zero_optimization.{name}.device=nvme",
            "use cpu",
        )
        for name in ("offload_optimizer", "offload_param")
    ),
    ({"zero_optimization": {"stage": 1}}, "zero_optimization.stage=1", "this is stage 2; set both alike"),
    ({"zero_optimization": None}, "zero_optimization.stage=None", "this is stage 2; set both alike"),
]


class TestDeepSpeedSettings:
    @pytest.mark.parametrize(("config", "says", "remedy"), REFUSED)
    def test_each_has_a_line(self, config, says, remedy):
        (line,) = deepspeed_problems(GOOD | config, 2)
        assert line.startswith(says) and remedy in line and "\n" not in line

    def test_all_together(self):
        plain = [config for config, _, _ in REFUSED if "zero_optimization" not in config]
        every = {name: value for config in plain for name, value in config.items()}
        assert len(list(deepspeed_problems(GOOD | every, 3))) == len(plain) + 1

    @pytest.mark.parametrize(
        "config",
        [
            {},
            {"gradient_clipping": 0.0},
            {"fp16": {"enabled": False}},
            {"bf16": {"enabled": False}},
            {"communication_data_type": "fp32"},
            {"communication_data_type": None},
            {"data_types": {"grad_accum_dtype": "fp32"}},
            {"tensor_parallel": {"enabled": False}, "autotuning": None, "flops_profiler": {}},
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, "overlap_comm": True}},
        ],
    )
    def test_what_may_be_set(self, config):
        assert list(deepspeed_problems(GOOD | config, 2)) == []

    def test_a_stage_that_there_is_not(self):
        assert list(deepspeed_problems(GOOD, 4)) == ["stage=4: expected 1, 2 or 3"]

    def test_what_became_of_them(self):
        """What no setting of ours says: an environment, a later release, other defaults."""
        made = types.SimpleNamespace(
            dp_world_size=2,
            sequence_parallel_size=1,
            mp_world_size=1,
            gradient_average=True,
            gradient_clipping=lambda: 0.0,
            gradient_accumulation_steps=lambda: 1,
        )
        refuse_engine(made, 2, "dprc_deepspeed_stage_2")
        for name, value in (("gradient_average", False), ("dp_world_size", 1), ("sequence_parallel_size", 2)):
            changed = types.SimpleNamespace(**vars(made) | {name: value})
            with pytest.raises(ConfigurationError, match=f"set to {value}, expected "):
                refuse_engine(changed, 2, "dprc_deepspeed_stage_2")

    def test_before_any_process_is_started(self, tmp_path):
        """With all that is wrong elsewhere."""
        strategy = PrivateDeepSpeedStrategy(
            stage=2, config={"zero_optimization": {"stage": 2}, "gradient_clipping": 1.0, "optimizer": {"type": "Adam"}}
        )
        run = trainer(tmp_path, strategy=strategy, devices=2, gradient_clip_val=1.0)
        found = preflight.problems(run, ToyModule(privacy(unused="zero")), ToyData())
        assert len(found) == 4
        ours = [line for line in found if line.startswith("strategy dprc_deepspeed_stage_2, ")]
        assert len(ours) == 3 and sum("privacy.unused=zero" in line for line in ours) == 1

    def test_its_own_optimizers(self):
        # Found by where they come from: making one would compile it.
        kind = type("DeepSpeedCPUAdam", (torch.optim.Optimizer,), {"__module__": "deepspeed.ops.adam.cpu_adam"})
        optimizer = kind([torch.zeros(1)], {})
        with pytest.raises(ConfigurationError, match="DeepSpeedCPUAdam steps past the noise hook; use one of torch's"):
            refuse_optimizer(optimizer, "dprc_deepspeed_stage_2")

    def test_what_is_no_optimizer(self):
        with pytest.raises(ConfigurationError, match="configure_optimizers: object steps past the noise hook"):
            refuse_optimizer(object(), "dprc_deepspeed_stage_2")
        refuse_optimizer(torch.optim.SGD([torch.zeros(1)], lr=1.0), "dprc_deepspeed_stage_2")


class TestPrecision:
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_a_parameter(self, dtype):
        model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1).to(dtype))
        (line,) = half_parameter_problems(model, "32-true")
        assert line.startswith(f"parameter '1.weight' is {str(dtype)[6:]}: ") and "bf16-mixed" in line
        model[1].requires_grad_(False)
        assert list(half_parameter_problems(model, "32-true")) == []

    @pytest.mark.parametrize("precision", ["bf16-true", "16-true", "16-mixed", "transformer-engine"])
    def test_the_trainers(self, precision):
        (line,) = half_parameter_problems(nn.Linear(1, 1), precision)
        assert line.startswith(f"trainer.precision={precision}: ") and "bf16-mixed" in line

    @pytest.mark.parametrize("precision", ["32-true", "64-true", "bf16-mixed"])
    def test_what_may_be_set(self, precision):
        assert list(half_parameter_problems(nn.Linear(1, 1), precision)) == []

    @pytest.mark.parametrize("kind", [PrivateDDPStrategy, PrivateFSDP2Strategy, PrivateFSDPStrategy])
    def test_is_found_before_any_process_is_started(self, tmp_path, kind):
        module = ToyModule(privacy()).bfloat16()
        found = preflight.problems(trainer(tmp_path, strategy=kind(), devices=2), module, ToyData())
        (line,) = found
        assert line.startswith(f"strategy {kind.strategy_name}, parameter 'net.0.weight' is ")

    def test_one_process_has_nothing_to_shard(self, tmp_path):
        run = trainer(tmp_path, strategy=PrivateFSDPStrategy(), devices=1)
        (line,) = preflight.problems(run, ToyModule(privacy()), ToyData())
        assert line.startswith("strategy dprc_fsdp, trainer.devices=1: ") and "dprc_single" in line
        run = trainer(tmp_path, strategy=PrivateFSDPStrategy(), devices=2)
        assert preflight.problems(run, ToyModule(privacy()), ToyData()) == []


class TestRehearsal:
    """Loading an optimizer's state lets it step on zeros; nothing else may step unarmed."""

    def hooked(self, gradient):
        parameter = nn.Parameter(torch.ones(3))
        parameter.grad = gradient
        optimizer = torch.optim.SGD([parameter], lr=1.0)
        hook = NoiseHook(ZeroNoise())
        hook.install([optimizer])
        return parameter, optimizer, hook

    @pytest.mark.parametrize("gradient", [None, torch.zeros(3)])
    def test_nothing_moves(self, gradient):
        parameter, optimizer, hook = self.hooked(gradient)
        with hook.rehearsal():
            optimizer.step()
        assert torch.equal(parameter.data, torch.ones(3))
        with pytest.raises(UnclippedGradientError):
            optimizer.step()

    @pytest.mark.parametrize("value", [1e-30, float("nan"), -1.0])
    def test_a_gradient_is_refused(self, value):
        parameter, optimizer, hook = self.hooked(torch.tensor([0.0, 0.0, value]))
        with hook.rehearsal(), pytest.raises(UnclippedGradientError, match="outside of the library's training_step"):
            optimizer.step()
        assert torch.equal(parameter.data, torch.ones(3))

    def test_it_ends_with_an_error_too(self):
        _, optimizer, hook = self.hooked(torch.zeros(3))
        with pytest.raises(KeyError), hook.rehearsal():
            raise KeyError
        with pytest.raises(UnclippedGradientError):
            optimizer.step()


class Holder(nn.Module):
    """As a LightningModule: its own forward is never called."""

    def __init__(self, **children):
        super().__init__()
        for name, child in children.items():
            setattr(self, name, child)


class TestWrapping:
    def test_each_child_with_parameters_is_a_root(self):
        holder = Holder(a=nn.Linear(1, 1), loss=nn.CrossEntropyLoss(), b=nn.Sequential(nn.Linear(1, 1)))
        assert roots_to_wrap(holder, "x") == [holder.a, holder.b]

    def test_a_parameter_of_its_own(self):
        holder = Holder(a=nn.Linear(1, 1))
        holder.scale = nn.Parameter(torch.ones(1))
        with pytest.raises(ConfigurationError, match="strategy x: parameter 'scale' is the LightningModule's own"):
            roots_to_wrap(holder, "x")

    def test_two_children_that_share(self):
        holder = Holder(a=nn.Linear(1, 1), b=nn.Linear(1, 1))
        holder.b.weight = holder.a.weight
        with pytest.raises(ConfigurationError, match="'a' and 'b' share parameter 'weight'"):
            roots_to_wrap(holder, "x")

    def test_layers_are_what_the_model_names(self):
        model = tiny_llama(tied=False)
        found = layers_to_wrap(model, None, "x")
        assert found == list(model.model.layers)[::-1] and len(found) == 2

    def test_or_what_the_user_names(self):
        model = tiny_llama(tied=False)
        found = layers_to_wrap(model, ["LlamaMLP"], "x")
        assert found == [layer.mlp for layer in model.model.layers][::-1]
        # Inner ones first: an outer one takes what they have left.
        both = layers_to_wrap(model, ["LlamaMLP", "LlamaDecoderLayer"], "x")
        assert all(both.index(layer.mlp) < both.index(layer) for layer in model.model.layers)
        with pytest.raises(
            ConfigurationError, match=r"strategy x, wrap=\['Nothing'\]: no module with .*such as LlamaDecoder"
        ):
            layers_to_wrap(model, ["Nothing"], "x")

    def test_a_subclass_is_one_too(self):
        model = tiny_llama(tied=False)
        for layer in model.model.layers:
            layer.__class__ = type("Instrumented", (type(layer),), {})
        assert len(layers_to_wrap(model, None, "x")) == 2

    def test_nothing_tells(self):
        assert layers_to_wrap(nn.Sequential(nn.Linear(1, 1)), None, "x") == []
        # What has no parameters is no unit.
        assert layers_to_wrap(nn.Sequential(nn.Linear(1, 1), nn.ReLU()), ["ReLU"], "x") == []


class TestTheOpThatDeepSpeedCompiles:
    @pytest.fixture
    def lock(self, tmp_path, monkeypatch):
        monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
        file = deepspeed_op.lock_file()
        assert file.is_relative_to(tmp_path)
        file.touch()
        return file

    def age(self, file):
        past = time.time() - deepspeed_op.STALE_AFTER - 60
        os.utime(file, (past, past))

    def test_no_lock(self, lock):
        lock.unlink()
        assert deepspeed_op.stale_lock() is None

    def test_a_build_may_be_under_way(self, lock):
        assert deepspeed_op.stale_lock() is None
        deepspeed_op.check_can_start("x", on_cpu=True)

    def test_an_old_one_is_named_in_place_of_waiting_for_it(self, lock):
        self.age(lock)
        with pytest.raises(ConfigurationError) as caught:
            deepspeed_op.check_can_start("dprc_deepspeed_stage_2", on_cpu=True)
        (line,) = caught.value.problems
        assert line.startswith(f"strategy dprc_deepspeed_stage_2, {lock}: ") and line.endswith("delete the file")
        # On a GPU nothing is compiled.
        deepspeed_op.check_can_start("dprc_deepspeed_stage_2", on_cpu=False)

    @pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="the system does not tell who holds a file")
    def test_one_that_a_process_holds_is_not_stale(self, lock):
        self.age(lock)
        with lock.open():
            assert deepspeed_op.stale_lock() is None
        assert deepspeed_op.stale_lock() == lock

    def test_a_tool_is_missing(self, lock, monkeypatch, capsys):
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setattr(deepspeed_op.shutil, "which", lambda tool, path=None: None)
        with pytest.raises(ConfigurationError, match=r"g\+\+ and ninja cannot be found; install g\+\+ and ninja"):
            deepspeed_op.check_can_start("dprc_deepspeed_stage_2", on_cpu=True)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert deepspeed_op.main() == 0
        assert "g++ and ninja cannot be found" in capsys.readouterr().out and lock.exists()


SETTINGS = """
privacy: {noise_multiplier: 1.0, delta: 1.0e-3, sample_rate: 0.25, steps: 4}
model: {class_path: toy.ToyModule}
data: {class_path: toy.ToyData}
trainer: {accelerator: cpu, devices: 2, enable_progress_bar: false, logger: false}
"""


@pytest.mark.filterwarnings("ignore")
class TestTrustingACheckpoint:
    @pytest.fixture
    def arguments(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        (tmp_path / "x.ckpt").mkdir()
        (tmp_path / "x.ckpt" / "lightning.pt").touch()
        (tmp_path / "settings.yaml").write_text(SETTINGS)
        return ["fit", "--config", "settings.yaml", "--ckpt_path", "x.ckpt", "--trainer.strategy"]

    @pytest.mark.parametrize(
        ("flag", "trusts"),
        [
            (["--trust_checkpoint"], True),
            (["--trust_checkpoint", "true"], True),
            (["--trust_checkpoint=false"], False),
            ([], False),
        ],
    )
    @pytest.mark.parametrize("strategy", ["dprc_fsdp2", "dprc_deepspeed_stage_3"])
    def test_the_flag_reaches_the_strategy_and_is_not_kept(self, arguments, monkeypatch, strategy, flag, trusts):
        seen = []

        def fit(cli, model, **kwargs):
            (keeper,) = [callback for callback in cli.trainer.callbacks if isinstance(callback, SaveRunConfig)]
            seen.append((cli.trainer.strategy.trust_checkpoint, keeper.config.trust_checkpoint))

        monkeypatch.setattr(DPRCCLI, "fit", fit)
        assert main([*arguments, strategy, *flag]) == 0
        # A later resume from the settings that the run keeps must not trust by itself.
        assert seen == [(trusts, False)]

    def test_single_files_need_no_trust(self, arguments, capsys):
        assert main([*arguments, "dprc_ddp", "--trust_checkpoint"]) == 2
        error = capsys.readouterr().err
        assert error.startswith("dprc: error: --trust_checkpoint: ") and error.count("\n") == 1


class TestOptimizersAndLimits:
    def test_one_that_looks_at_the_loss_several_times(self, tmp_path):
        class WithLBFGS(ToyModule):
            def configure_optimizers(self):
                return torch.optim.LBFGS(self.parameters())

        with pytest.raises(ConfigurationError, match="LBFGS wants the loss several times"):
            trainer(tmp_path).fit(WithLBFGS(privacy()), datamodule=ToyData())

    def test_seconds_become_what_lightning_takes(self):
        kinds = (PrivateDDPStrategy, PrivateFSDP2Strategy, PrivateFSDPStrategy, PrivateDeepSpeedStrategy)
        assert [kind(timeout=600)._timeout.total_seconds() for kind in kinds] == [600.0] * 4

    @pytest.mark.parametrize("setting", ["exclude_frozen_parameters", "load_full_weights"])
    def test_checkpoints_that_could_not_be_resumed(self, tmp_path, setting):
        run = trainer(tmp_path, strategy=PrivateDeepSpeedStrategy(stage=2, **{setting: True}), devices=2)
        (line,) = preflight.problems(run, ToyModule(privacy()), ToyData())
        assert f"{setting}=True: " in line

    @pytest.mark.parametrize("replicas", [0, 3])
    def test_copies_that_do_not_fit_the_processes(self, tmp_path, replicas):
        run = trainer(tmp_path, strategy=PrivateFSDP2Strategy(replicas=replicas), devices=2)
        (line,) = preflight.problems(run, ToyModule(privacy()), ToyData())
        assert f"replicas={replicas}: 2 processes are no multiple of it" in line

    def test_a_weight_in_two_units(self):
        model = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Linear(2, 2))
        check_ties(model, [model[0]], "x")
        model[1].weight = model[0][0].weight
        with pytest.raises(ConfigurationError, match=r"'0.0.weight' and '1.weight' are one, in two units"):
            check_ties(model, [model[0]], "x")


def test_the_process_group_ends_before_the_interpreter():
    """Without it gloo's threads abort the process now and then."""
    program = (
        "import atexit, torch.distributed as d\n"
        "atexit.register(lambda: print('left', not d.is_initialized()))\n"
        "import dprc_lightning.strategies.collectives\n"
        "d.init_process_group('gloo', store=d.HashStore(), rank=0, world_size=1)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and done.stdout.strip() == "left True", done.stderr
