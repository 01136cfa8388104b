"""Settings of the engines that would change what is summed, or step past the noise: refused before any work."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from dprc_lightning.errors import ConfigurationError


def half_parameter_problems(module: nn.Module, precision: Any) -> Iterator[str]:
    """The engines sum gradients in the precision of their parameters.

    Args:
        module: The LightningModule.
        precision: The trainer's.

    Yields:
        One line, if a parameter that trains is in half precision, or will be.
    """
    named = module.named_parameters()
    half = [(name, p.dtype) for name, p in named if p.requires_grad and p.dtype in {torch.bfloat16, torch.float16}]
    if half:
        setting = f"parameter {half[0][0]!r} is {str(half[0][1]).removeprefix('torch.')}"
    elif str(precision) in {
        "bf16-true",
        "16-true",
        "16-mixed",
        "transformer-engine",
        "transformer-engine-float16",
    }:
        setting = f"trainer.precision={precision}"
    else:
        return
    yield (
        f"{setting}: gradients would be summed in half precision, which is not covered; keep trainable parameters in "
        "float32 and set trainer.precision=bf16-mixed"
    )


def deepspeed_problems(config: Mapping[str, Any], stage: int) -> Iterator[str]:
    """What a DeepSpeed configuration may not say.

    Args:
        config: DeepSpeed's settings.
        stage: The stage that the strategy's alias promises.

    Yields:
        One line each: the setting, its value, the remedy.
    """
    zero = config.get("zero_optimization") or {}
    if zero.get("stage") != stage:
        yield f"zero_optimization.stage={zero.get('stage')}: this is stage {stage}; set both alike"
    for name in ("optimizer", "scheduler"):
        if config.get(name):
            yield f"{name}={config[name]}: DeepSpeed's own would step past the noise; write configure_optimizers"
    if config.get("gradient_clipping"):
        yield (
            f"gradient_clipping={config['gradient_clipping']}: it would clip the sum, not the records; "
            "set privacy.max_grad_norm"
        )
    if (config.get("fp16") or {}).get("enabled"):
        yield "fp16.enabled=True: loss scaling is not accounted; set trainer.precision=bf16-mixed"
    for name in ("bf16", "torch_autocast"):
        if (config.get(name) or {}).get("enabled"):
            yield f"{name}.enabled=True: gradients would be summed in half precision; set trainer.precision=bf16-mixed"
    if config.get("communication_data_type", "fp32") not in {"fp32", None}:
        yield f"communication_data_type={config['communication_data_type']}: gradients must be summed in fp32"
    accumulated = (config.get("data_types") or {}).get("grad_accum_dtype", "fp32")
    if accumulated not in {"fp32", None}:
        yield f"data_types.grad_accum_dtype={accumulated}: gradients must be summed in fp32; leave it out"
    for name in ("sparse_gradients", "compression_training"):
        if config.get(name):
            yield f"{name}={config[name]}: it changes what is summed; leave it out"
    for name in ("zero_quantized_gradients", "zero_quantized_weights", "zenflow", "use_muon"):
        if zero.get(name):
            yield f"zero_optimization.{name}={zero[name]}: it changes what is summed or stepped; leave it out"
    for name in ("offload_optimizer", "offload_param"):
        offload = zero.get(name) or {}
        if offload.get("device") == "nvme":
            yield f"zero_optimization.{name}.device=nvme: gradients in files are not noised; use cpu"
        if offload.get("ratio", 1.0) != 1.0:
            yield (
                f"zero_optimization.{name}.ratio={offload['ratio']}: an optimizer of DeepSpeed's own would step a part "
                "past the noise; leave it out"
            )
        if offload.get("super_offload"):
            yield f"zero_optimization.{name}.super_offload=True: it steps past the noise; leave it out"
    for name in ("mics_shard_size", "zero_hpz_partition_size"):
        if zero.get(name, 0) > 1:
            yield f"zero_optimization.{name}={zero[name]}: copies of a shard would not share its noise; leave it out"
    for name in ("tensorboard", "wandb", "csv_monitor", "comet"):
        if (config.get(name) or {}).get("enabled"):
            yield f"{name}.enabled=True: it logs figures of records without noise; use the trainer's loggers"
    if config.get("managed_gradient_accumulation", True) is not True:
        yield "managed_gradient_accumulation=False: it changes what is summed; leave it out"


def refuse_optimizer(optimizer: Optimizer, strategy: str) -> None:
    """DeepSpeed's own optimizers step outside of `torch.optim.Optimizer.step`, where the noise is added.

    Args:
        optimizer: As `configure_optimizers` returned it.
        strategy: The strategy's alias.

    Raises:
        ConfigurationError: It is one of them.
    """
    kind = type(optimizer)
    if kind.__module__.startswith("deepspeed.") or not isinstance(optimizer, Optimizer):
        raise ConfigurationError([
            f"strategy {strategy}, configure_optimizers: {kind.__name__} steps past the noise hook; use one of torch's "
            "(for offloading set zero_force_ds_cpu_optimizer=False, which is the default here)"
        ])
