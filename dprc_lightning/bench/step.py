"""FLOPs, peak live memory and CPU seconds of one training step, as ratios to the non-private step."""

import math
import os
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from dprc_lightning.bench.memory import LiveMemory
from dprc_lightning.clipping import attach, causal_lm_loss

NON_PRIVATE = "non-private"


@dataclass(frozen=True)
class StepShape:
    """A small Llama and its batch.

    Attributes:
        tokens: T.
        records: B.
        hidden: Width.
        intermediate: Width inside the MLP.
        layers: Decoder layers.
        heads: Attention heads.
        kv_heads: Key and value heads.
        vocabulary: Vocabulary.
        tied: Whether embedding and head share their weight.
        checkpointing: Whether activations are recomputed (non-reentrant).
    """

    tokens: int = 512
    records: int = 4
    hidden: int = 256
    intermediate: int = 1024
    layers: int = 4
    heads: int = 8
    kv_heads: int = 4
    vocabulary: int = 4096
    tied: bool = False
    checkpointing: bool = False

    def build(self) -> nn.Module:
        """The model, with random weights, float32."""
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        model = LlamaForCausalLM(
            LlamaConfig(
                hidden_size=self.hidden,
                intermediate_size=self.intermediate,
                num_hidden_layers=self.layers,
                num_attention_heads=self.heads,
                num_key_value_heads=self.kv_heads,
                vocab_size=self.vocabulary,
                max_position_embeddings=max(self.tokens, 2048),
                tie_word_embeddings=self.tied,
                use_cache=False,
            )
        )
        if self.checkpointing:
            model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
            model.train()
        return model


def flop_counter() -> FlopCounterMode:
    """A counter of matrix products. PyTorch's own takes those that are added in place (``addmm_``) for nothing."""
    in_place = (torch.ops.aten.addmm_, torch.ops.aten.baddbmm_)
    counter = FlopCounterMode(display=False, custom_mapping=dict.fromkeys(in_place, _added_product))
    # Its own one follows modules by hooks on their gradients, and raises where a backward runs inside a backward.
    counter.mod_tracker = _NoModules()  # type: ignore[assignment]
    return counter


class _NoModules(nullcontext[None]):
    """In the place of a counter's module tracker: what it counts is not told by module."""

    parents = frozenset({"Global"})


def _added_product(_sum: list[int], left: list[int], right: list[int], **_: Any) -> int:
    return 2 * math.prod(left) * right[-1]


def measure_step(
    shape: StepShape, sketch_dims: list[int], rounds: int, progress: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Run each kind of step in turn, `rounds` times over.

    Args:
        shape: Model and batch.
        sketch_dims: k of each hutchinson step; 0 stands for exact norms.
        rounds: How often each kind is timed, after the two untimed steps that count memory and FLOPs.
        progress: Called with what is about to be done.

    Returns:
        Rows with FLOPs, peak bytes, CPU seconds (minimum and median) and their ratios to the non-private row, and the
        setting. FLOPs are those of matrix products; attention by scaled_dot_product_attention is not counted on a CPU.
        Peak bytes are the most that is live at one time in one step: parameters, buffers, token ids, activations,
        gradients and temporaries, of a private step also P, the sketches and all else that the handle keeps; no
        optimizer, and no gradients when the step begins. See `LiveMemory` for what it cannot see.
    """
    ids = torch.randint(0, shape.vocabulary, (shape.records, shape.tokens), generator=torch.Generator().manual_seed(0))
    models = {NON_PRIVATE: shape.build()}
    steps = {NON_PRIVATE: _non_private(models[NON_PRIVATE], ids)}
    for k in sketch_dims:
        name = f"hutchinson k={k}" if k else "exact"
        models[name] = shape.build()
        steps[name] = _private(models[name], ids, k)
    peaks = {}
    for name, step in steps.items():
        progress(f"counting memory of {name}")
        # The first step of each: what the handle makes once and keeps is made inside.
        with LiveMemory() as live:
            live.add([ids, *models[name].parameters(), *models[name].buffers()])
            step()
        peaks[name] = live.peak
    flops = {}
    for name, step in steps.items():
        progress(f"counting FLOPs of {name}")
        with flop_counter() as counter:
            step()
        flops[name] = counter.get_total_flops()
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for i in range(rounds):
        progress(f"round {i + 1} of {rounds}")
        for name, step in steps.items():
            started = time.process_time()
            step()
            seconds[name].append(time.process_time() - started)
    rows = [
        {
            "step": name,
            "flops": flops[name],
            "flops_ratio": flops[name] / flops[NON_PRIVATE],
            "peak_bytes": peaks[name],
            "peak_ratio": peaks[name] / peaks[NON_PRIVATE],
            "cpu_seconds_min": min(seconds[name]),
            "cpu_seconds_median": statistics.median(seconds[name]),
            "cpu_ratio": statistics.median(a / b for a, b in zip(seconds[name], seconds[NON_PRIVATE], strict=True)),
        }
        for name in steps
    ]
    machine = {"threads": torch.get_num_threads(), "cores": os.cpu_count(), "torch": torch.__version__}
    return {"shape": shape.__dict__, "rounds": rounds, "machine": machine, "rows": rows}


def _losses(model: nn.Module, ids: Tensor) -> Tensor:
    return causal_lm_loss(model(input_ids=ids).logits, ids)


def _non_private(model: nn.Module, ids: Tensor) -> Callable[[], None]:
    def step() -> None:
        _losses(model, ids).sum().backward()
        model.zero_grad()

    return step


def _private(model: nn.Module, ids: Tensor, sketch_dim: int) -> Callable[[], None]:
    # The checks of the first micro-batches are no part of a step.
    handle = attach(model, "hutchinson" if sketch_dim else "exact", sketch_dim or 1, check_isolation=False)

    def step() -> None:
        handle.begin_step()
        handle.clipped_backward(_losses(model, ids), max_grad_norm=1.0)
        model.zero_grad()

    return step
