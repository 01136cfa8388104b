"""A small model of MLPs with known children, for the tests of running them some tokens at a time."""

import torch
import transformers as hf
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.models.phi3.modeling_phi3 import Phi3MLP

TOKENS = 1100
"""In pieces of 512: two whole ones, and 76."""
WIDTH, INNER = 6, 10


def llama(**changes):
    return hf.LlamaConfig(hidden_size=WIDTH, intermediate_size=INNER, num_attention_heads=2, **changes)


KINDS = {
    "llama": lambda: LlamaMLP(llama()),
    "llama_bias": lambda: LlamaMLP(llama(mlp_bias=True)),
    "gpt2": lambda: GPT2MLP(INNER, hf.GPT2Config(n_embd=WIDTH, n_head=2, resid_pdrop=0.0)),
    "phi3": lambda: Phi3MLP(
        hf.Phi3Config(hidden_size=WIDTH, intermediate_size=INNER, num_attention_heads=2, pad_token_id=0)
    ),
}


class Net(nn.Module):
    """Two MLPs with what is around them in a transformer; the second may be the first one again."""

    def __init__(self, kind="llama", checkpointing=False, tied=False):
        super().__init__()
        self.inp = nn.Linear(4, WIDTH)
        self.mlps = nn.ModuleList([KINDS[kind]() for _ in range(2)])
        if tied:
            self.mlps[1].up_proj.weight = self.mlps[0].up_proj.weight
            self.mlps[1].down_proj.weight = self.mlps[0].down_proj.weight
        self.out = nn.Linear(WIDTH, 3)
        self.checkpointing = checkpointing
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.3)

    def forward(self, x):
        h = self.inp(x)
        for mlp in self.mlps:

            def block(h, mlp=mlp):
                return h + mlp(torch.tanh(h))

            h = checkpoint(block, h, use_reentrant=False) if self.checkpointing else block(h)
        return self.out(h)


def build(*args, seed=0, **kwargs):
    torch.manual_seed(seed)
    return Net(*args, **kwargs)


def batch(records=3, tokens=TOKENS):
    return {"x": torch.randn(records, tokens, 4, generator=torch.Generator().manual_seed(1))}


def losses_of(model, batch):
    return model(batch["x"].to(next(model.parameters()).dtype)).double().sin().sum((1, 2))


def calls_of(monkeypatch, kind=LlamaMLP):
    calls = []
    original = kind.forward
    monkeypatch.setattr(kind, "forward", lambda self, x: (calls.append(x.shape[1]), original(self, x))[1])
    return calls
