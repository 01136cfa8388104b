"""MLPs some tokens at a time: what the guards find in them, and what is refused."""

from types import SimpleNamespace

import pytest
import torch
from mlps import batch, build, llama, losses_of
from peft import LoraConfig, inject_adapter_in_model
from torch import nn
from toy import ToyData, ToyModule, privacy, trainer
from transformers.models.llama.modeling_llama import LlamaMLP

from dprc_lightning import PerformanceConfig
from dprc_lightning.clipping import attach
from dprc_lightning.errors import (
    ConfigurationError,
    InvalidArgumentError,
    IsolationError,
    UnclippedGradientError,
)
from dprc_lightning.strategies import PrivateDeepSpeedStrategy
from dprc_lightning.strategies.wrapping import layers_to_wrap


class TestGuards:
    def test_a_penalty_on_a_weight_is_found(self):
        model = build()
        handle = attach(model, mlp_chunk=512, check_isolation=False)
        losses = losses_of(model, batch())
        losses = losses + model.mlps[0].down_proj.weight.square().sum()
        handle.norms(losses)
        with pytest.raises(UnclippedGradientError, match="mlps.0.down_proj.weight"):
            handle.clipped_backward(losses, max_grad_norm=1.0)

    def test_other_values_in_the_second_pass_are_found(self):
        model = build()
        handle = attach(model, mlp_chunk=512, check_isolation=False)
        data = batch()
        factor = torch.ones((), dtype=torch.float64, requires_grad=True)
        scale = [1.0]
        losses = losses_of(model, data) * factor
        losses.register_hook(lambda gradient: gradient * scale[0])
        handle.norms(losses)
        scale[0] = 2.0
        with pytest.raises(UnclippedGradientError, match="not those of the norm pass"):
            handle.clipped_backward(losses, max_grad_norm=1.0)

    def test_records_that_meet_are_found(self):
        model = build()
        model.requires_grad_(False)
        model.mlps[0].down_proj.requires_grad_(True)
        handle = attach(model, mlp_chunk=512)
        losses = losses_of(model, batch())
        with pytest.raises(IsolationError, match="mlps.0.down_proj.weight"):
            handle.norms(losses + losses.mean())

    def test_a_backward_of_somebody_else_is_refused(self):
        model = build()
        attach(model, mlp_chunk=512)
        with pytest.raises(UnclippedGradientError, match="not clipped"):
            losses_of(model, batch()).sum().backward()

    def test_its_gradient_is_right_all_the_same(self):
        model = build()
        inputs = batch()["x"].requires_grad_()
        (expected,) = torch.autograd.grad(losses_of(model, {"x": inputs}).sum(), inputs)
        attach(model, mlp_chunk=512)
        (found,) = torch.autograd.grad(losses_of(model, {"x": inputs}).sum(), inputs)
        assert torch.allclose(found, expected, rtol=1e-5, atol=1e-6)


class Shifted(LlamaMLP):
    """The same children, and each token sees the one before it."""

    def forward(self, x):
        return super().forward(x + nn.functional.pad(x, (0, 0, 1, 0))[:, :-1])


class TestRefusals:
    def refused(self, model, match, **attachment):
        before = [type(module) for module in model.modules()]
        with pytest.raises(InvalidArgumentError, match=match):
            attach(model, **{"mlp_chunk": 512} | attachment)
        assert [type(module) for module in model.modules()] == before, "not left half attached"

    @pytest.mark.parametrize("chunk", [0, -512, 100, 513])
    def test_sizes(self, chunk):
        self.refused(build(), "mlp_chunk=.*multiple of 512", mlp_chunk=chunk)
        (problem,) = PerformanceConfig(mlp_chunk=chunk).problems()
        assert problem.startswith(f"performance.mlp_chunk={chunk}: ")
        assert PerformanceConfig(mlp_chunk=1024).problems() == []

    def test_no_mlp(self):
        self.refused(nn.Sequential(nn.Linear(2, 2)), "mlp_chunk=512: the model has no MLP of a known form")

    def test_tokens_that_meet(self):
        model = build()
        model.mlps[1] = Shifted(llama())
        self.refused(model, "'mlps.1' does not treat each token by itself")

    def test_dropout(self):
        model = build("gpt2")
        model.mlps[1].dropout.p = 0.1
        self.refused(model, "'mlps.1' has dropout 'dropout' with p=0.1")
        model.mlps[1].dropout.p = 0.0
        attach(model, mlp_chunk=512)
        model.mlps[0].dropout.p = 0.1
        with pytest.raises(InvalidArgumentError, match="'mlps.0' has dropout"):
            model(batch()["x"])
        model.eval()(batch()["x"])

    def test_dropout_of_an_adapter(self):
        model = build()
        inject_adapter_in_model(LoraConfig(r=2, target_modules=["up_proj"], lora_dropout=0.2), model)
        self.refused(model, "dropout 'up_proj.lora_dropout.default' with p=0.2")

    def test_hutchpp(self):
        self.refused(
            build(), "mlp_chunk=512: parameter 'mlps.0.gate_proj.weight' has", estimator="hutchpp", sketch_dim=2
        )

    def test_units_of_fsdp_inside(self):
        model = build()
        attach(model, mlp_chunk=512)
        assert len(layers_to_wrap(model, ["LlamaMLP"], "dprc_fsdp2")) == 2
        with pytest.raises(ConfigurationError, match="inside of an MLP that runs some tokens at a time"):
            layers_to_wrap(model, ["Linear"], "dprc_fsdp2")

    def test_zero_3(self):
        module = ToyModule(privacy(), PerformanceConfig(physical_batch_size=3, mlp_chunk=512))
        run = SimpleNamespace(precision="32-true")
        for stage in (2, 3):
            found = [*PrivateDeepSpeedStrategy(stage=stage).setting_problems(run, module)]
            assert len([line for line in found if line.startswith("performance.mlp_chunk=512")]) == (stage == 3)

    def test_in_the_words_of_the_command_line(self, tmp_path):
        module = ToyModule(privacy(), PerformanceConfig(physical_batch_size=3, mlp_chunk=512))
        with pytest.raises(ConfigurationError, match=r"performance\.mlp_chunk=512: the model has no MLP"):
            trainer(tmp_path).fit(module, datamodule=ToyData())

    def test_a_baseline_has_none(self, tmp_path):
        settings = privacy(baseline_without_privacy=True, noise_multiplier=None)
        module = ToyModule(settings, PerformanceConfig(physical_batch_size=3, mlp_chunk=512))
        with pytest.raises(ConfigurationError, match=r"performance\.mlp_chunk=512: .*baseline_without_privacy"):
            trainer(tmp_path).fit(module, datamodule=ToyData())
