"""Tiny, randomly initialised models of the architectures that people bring, each with a batch and losses [B]."""

from collections.abc import Callable
from typing import Any

import peft
import torch
import transformers as hf
from cases import Batch, Case, token_batch
from torch import Tensor, nn

from dprc_lightning.clipping import causal_lm_loss, classification_loss

VOCABULARY = 40
_DECODER: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 32,
    "use_cache": False,
}
_ENCODER: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_labels": 3,
}
# Dropout stays off: brute force runs record by record and would draw other masks.
_NO_DROPOUT = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
_BERT_OFF = {"attention_probs_dropout_prob": 0.0, "hidden_dropout_prob": 0.0}

_CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: hf.LlamaConfig(**_DECODER),
    "gpt2": lambda: hf.GPT2Config(
        n_embd=16,
        n_layer=2,
        n_head=4,
        vocab_size=VOCABULARY,
        n_positions=32,
        use_cache=False,
        attn_pdrop=0.0,
        embd_pdrop=0.0,
        resid_pdrop=0.0,
    ),
    "qwen2": lambda: hf.Qwen2Config(**_DECODER),
    "qwen3": lambda: hf.Qwen3Config(**_DECODER, head_dim=8),
    "gemma2": lambda: hf.Gemma2Config(**_DECODER, head_dim=8, query_pre_attn_scalar=8),
    "mistral": lambda: hf.MistralConfig(**_DECODER, sliding_window=7),
    "phi3": lambda: hf.Phi3Config(**_DECODER, pad_token_id=0),
    "gpt_neox": lambda: hf.GPTNeoXConfig(**_DECODER, **_NO_DROPOUT),
    "bert": lambda: hf.BertConfig(**_ENCODER, **_BERT_OFF, vocab_size=VOCABULARY, max_position_embeddings=32),
    "modernbert": lambda: hf.ModernBertConfig(
        **_ENCODER,
        vocab_size=VOCABULARY,
        max_position_embeddings=32,
        pad_token_id=0,
        global_attn_every_n_layers=2,
        local_attention=14,
    ),
    "vit": lambda: hf.ViTConfig(**_ENCODER, **_BERT_OFF, image_size=8, patch_size=4),
}
CAUSAL = ("llama", "gpt2", "qwen2", "qwen3", "gemma2", "mistral", "phi3", "gpt_neox")
ENCODERS = ("bert", "modernbert", "vit")


def build(name: str, attention: str, tied: bool, checkpointing: bool, lora: dict[str, Any] | None) -> nn.Module:
    config = _CONFIGS[name]()
    config._attn_implementation = attention
    config.tie_word_embeddings = tied
    kind = (
        hf.AutoModelForCausalLM
        if name in CAUSAL
        else (hf.AutoModelForImageClassification if name == "vit" else hf.AutoModelForSequenceClassification)
    )
    model = kind.from_config(config, attn_implementation=attention)
    with torch.no_grad():
        for parameter in model.parameters():
            # Norm weights and biases off their initial ones and zeros.
            parameter.add_(torch.randn_like(parameter) * 0.1)
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    if lora is not None:
        model = peft.get_peft_model(model, peft.LoraConfig(r=3, lora_alpha=6, **lora))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
        if checkpointing:
            model.enable_input_require_grads()
    return model.train(checkpointing)


def _tokens() -> Batch:
    return token_batch(VOCABULARY)


def _labelled_tokens() -> Batch:
    batch = token_batch(VOCABULARY)
    del batch["labels"]
    return {**batch, "label": torch.randint(0, 3, (5,))}


def _images() -> Batch:
    return {"pixel_values": torch.randn(5, 3, 8, 8), "label": torch.randint(0, 3, (5,))}


def _losses(model: nn.Module, batch: Batch) -> Tensor:
    inputs = {k: v for k, v in batch.items() if not k.startswith("label")}
    logits = model(**inputs).logits
    if "labels" in batch:
        return causal_lm_loss(logits, batch["labels"])
    return classification_loss(logits, batch["label"])


def case(
    name: str, attention: str = "sdpa", tied: bool = False, checkpointing: bool = False, lora: dict | None = None
) -> Case:
    batch = _tokens if name in CAUSAL else _images if name == "vit" else _labelled_tokens
    return Case(name, lambda: build(name, attention, tied, checkpointing, lora), batch, _losses)
