"""A small Llama as a DPRCModule with its data, and the live memory of a real step of it."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.data import TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

from dprc_lightning import DPRCDataModule, DPRCModule, PerformanceConfig, PrivacyConfig, attach
from dprc_lightning.activation_checkpointing import ActivationCheckpointing
from dprc_lightning.bench.memory import LiveMemory
from dprc_lightning.clipping import causal_lm_loss


class LlamaModule(DPRCModule):
    def __init__(
        self,
        privacy: PrivacyConfig,
        performance: PerformanceConfig = PerformanceConfig(),  # noqa: B008
        tokens: int = 600,
        masked: bool = False,
        tied: bool = True,
    ) -> None:
        super().__init__(privacy, performance)
        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=32, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=96, tie_word_embeddings=tied, use_cache=False, max_position_embeddings=2048,
        )  # fmt: skip
        self.llama = LlamaForCausalLM(config).train()
        self.tokens, self.masked = tokens, masked

    def per_sample_loss(self, batch: list[Tensor]) -> Tensor:
        ids = batch[0]
        inputs = {"attention_mask": batch[1]} if self.masked else {}
        return causal_lm_loss(self.llama(input_ids=ids, **inputs).logits, ids)

    def largest_batch(self, records: int) -> Any:
        ids = torch.zeros(records, self.tokens, dtype=torch.int64)
        return [ids, torch.ones_like(ids)]

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class LlamaData(DPRCDataModule):
    def __init__(self, tokens: int = 600, records: int = 12) -> None:
        super().__init__()
        ids = torch.randint(0, 96, (records, tokens), generator=torch.Generator().manual_seed(1))
        self.records = TensorDataset(ids, torch.ones_like(ids))

    def train_dataset(self) -> TensorDataset:
        return self.records


def real_peak(module: LlamaModule, flags: dict[str, Any], records: int) -> tuple[int, int]:
    """Two micro-batches of one step on real tensors: peaks of live memory, on the device and the host."""
    added = dict(flags)
    checkpointing = ActivationCheckpointing(module) if added.pop("checkpointing", False) else None
    handle = attach(module, **(module.attach_settings() | added | {"check_isolation": False}))
    ids = torch.randint(0, 96, (records, module.tokens), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[0, -3:] = 0
    handle.begin_step()
    with LiveMemory() as live:
        live.add([ids, mask, *module.parameters(), *module.buffers()])
        for _ in range(2):
            handle.clipped_backward(module.per_sample_loss([ids, mask]), max_grad_norm=1.0)
    handle.detach()
    if checkpointing is not None:
        checkpointing.remove()
    module.zero_grad()
    return live.peak, live.host_peak
