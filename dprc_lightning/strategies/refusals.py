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


# Every other setting may change what is summed, over which ranks, or what is stepped: DeepSpeed has more with each
# release. Those that are refused by name below have a remedy of their own.
_KNOWN = frozenset({
    "activation_checkpointing", "aio", "bf16", "checkpoint", "comms_logger", "communication_data_type", "comet",
    "compression_training", "csv_monitor", "data_types", "disable_allgather", "dump_state", "fp16",
    "gradient_accumulation_steps", "gradient_clipping", "managed_gradient_accumulation", "memory_breakdown",
    "optimizer", "scheduler", "sparse_gradients", "steps_per_print", "tensorboard", "timers", "torch_autocast",
    "train_micro_batch_size_per_gpu", "wandb", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer",
    "zero_optimization",
})  # fmt: skip
_KNOWN_OF_ZERO = frozenset({
    "allgather_bucket_size", "allgather_partitions", "contiguous_gradients", "cpu_offload", "cpu_offload_params",
    "cpu_offload_use_pin_memory", "elastic_checkpoint", "gather_16bit_weights_on_model_save",
    "ignore_unused_parameters", "load_from_fp32_weights", "log_trace_cache_warnings", "max_live_parameters",
    "max_reuse_distance", "memory_efficient_linear", "mics_shard_size", "model_persistence_threshold",
    "module_granularity_threshold", "offload_optimizer", "offload_param", "overlap_comm",
    "param_persistence_threshold", "pipeline_loading_checkpoint", "prefetch_bucket_size", "reduce_bucket_size",
    "reduce_scatter", "round_robin_gradients", "stage", "stage3_gather_16bit_weights_on_model_save",
    "stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_model_persistence_threshold",
    "stage3_module_granularity_threshold", "stage3_param_persistence_threshold", "stage3_prefetch_bucket_size",
    "sub_group_size", "use_all_reduce_for_fetch_params", "stage3_use_all_reduce_for_fetch_params", "use_muon",
    "zenflow", "zero_hpz_partition_size", "zero_quantized_gradients", "zero_quantized_weights",
})  # fmt: skip


def _unknown(config: Mapping[str, Any], known: frozenset[str], prefix: str = "") -> Iterator[str]:
    for name, value in config.items():
        switched_off = value in (None, {}) or (isinstance(value, Mapping) and value.get("enabled") is False)
        if name not in known and not switched_off:
            yield (
                f"{prefix}{name}={value!r}: it was not checked what this does to the sum of the gradients and to its "
                "update; leave it out"
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
    if not isinstance(zero, Mapping):
        yield f"zero_optimization={zero!r}: expected its settings, such as {{stage: {stage}}}"
        return
    if stage not in {1, 2, 3}:
        yield f"stage={stage}: expected 1, 2 or 3"
        return
    if stage != 3 and (zero.get("offload_param") or {}).get("device") == "cpu":
        yield "offload_parameters=True (zero_optimization.offload_param): stage 3 alone does it; leave it out"
    yield from _unknown(config, _KNOWN)
    yield from _unknown(zero, _KNOWN_OF_ZERO, "zero_optimization.")
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
    if config.get("gradient_accumulation_steps", 1) not in {1, "auto"}:
        yield (
            f"gradient_accumulation_steps={config['gradient_accumulation_steps']}: every logical batch is one "
            "optimizer step; performance.physical_batch_size cuts it into what fits in memory"
        )
    if config.get("zero_allow_untested_optimizer", True) is not True:
        yield "zero_allow_untested_optimizer=False: DeepSpeed would refuse torch's optimizers; leave it out"
    if config.get("zero_force_ds_cpu_optimizer", False) is not False:
        yield "zero_force_ds_cpu_optimizer=True: DeepSpeed's own optimizers step past the noise; leave it out"
    if config.get("managed_gradient_accumulation", True) is not True:
        yield "managed_gradient_accumulation=False: it changes what is summed; leave it out"


def refuse_engine(engine: Any, world_size: int, strategy: str) -> None:
    """What DeepSpeed made of its settings: the sum must go over all ranks, once, and be divided by their number.

    Args:
        engine: As `deepspeed.initialize` returned it.
        world_size: How many processes there are.
        strategy: The strategy's alias.

    Raises:
        ConfigurationError: It does something else.
    """
    sums = {
        "the ranks that it sums over": (engine.dp_world_size, world_size),
        "sequence parallelism": (engine.sequence_parallel_size, 1),
        "tensor parallelism": (engine.mp_world_size, 1),
        "averaging": (engine.gradient_average, True),
        "clipping": (engine.gradient_clipping(), 0.0),
        "steps of accumulation": (engine.gradient_accumulation_steps(), 1),
    }
    problems = [
        f"strategy {strategy}: {what}: DeepSpeed was set to {found}, expected {expected}; leave its settings alone"
        for what, (found, expected) in sums.items()
        if found != expected
    ]
    if problems:
        raise ConfigurationError(problems)


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
