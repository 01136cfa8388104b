"""The inputs of activation checkpoints in the host's memory: from the forward to the passes that need them.

A checkpointed model keeps one [B, T, d] tensor for each layer. torch asks its saved-tensor hooks where to put it, once
in the forward, and asks for it again in each recomputation: two passes fetch it twice, and the host's copy stays until
the graph is gone. The hooks are in force only while a checkpoint takes its inputs, so nothing else is moved. What is
computed is the same, bit for bit: a copy rounds nothing.

On a GPU the host's copy is pinned, and copies run in the order of the stream, without waiting for them. On a CPU there
is nothing to gain; there the copies are made all the same, so that what is tested is what runs.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dprc_lightning.errors import InvalidArgumentError

SMALL = 2**16
"""Bytes. A smaller tensor stays where it is: its copy would cost more than its place."""

_FUNCTIONS = ("_gradient_checkpointing_func", "checkpoint_fn")
"""Where a module keeps what checkpoints it: Hugging Face's models and layers; torch's CheckpointWrapper."""

_copying = [0]


def copies_to_host() -> bool:
    """Whether the host's copy of a tensor is being made: what is allocated now is the host's memory."""
    return _copying[0] > 0


@contextmanager
def _host_memory() -> Iterator[None]:
    _copying[0] += 1
    try:
        yield
    finally:
        _copying[0] -= 1


@dataclass(frozen=True)
class _OnHost:
    copy: Tensor
    device: torch.device


class CheckpointOffload:
    """Moves what the checkpoints of a model take as inputs, until `remove`.

    Guarantee: none is touched: every pass computes with the values that the forward had.

    Args:
        model: Its checkpointing is set up already, by Hugging Face's ``activation_checkpointing_enable`` or torch's
            ``checkpoint_wrapper``, and non-reentrant.

    Raises:
        InvalidArgumentError: It does not checkpoint, or in a way that shows no function to wrap.
    """

    def __init__(self, model: nn.Module) -> None:
        self.stored = 0
        """Tensors that were copied to the host."""
        self.fetched = 0
        """How often one was brought back."""
        self._wrapped: list[tuple[nn.Module, str, Callable[..., Any], Callable[..., Any]]] = []
        for module in model.modules():
            for name in _FUNCTIONS:
                function = getattr(module, name, None)
                if not callable(function) or not checkpoints_activations(module):
                    continue
                wrapped = self._wrap(function)
                setattr(module, name, wrapped)
                self._wrapped.append((module, name, function, wrapped))
        if not self._wrapped:
            raise InvalidArgumentError(
                "offload_checkpoints",
                True,
                "the model does not checkpoint its activations (activation_checkpointing_enable, or torch's "
                "checkpoint_wrapper), so there is nothing to move; turn one of them on first, or leave it out",
            )

    def check(self) -> None:
        """Whether anything is checkpointed now: Hugging Face's models do so in training mode alone.

        Raises:
            InvalidArgumentError: Nothing is.
        """
        modules = [module for module, *_ in self._wrapped]
        if not any(module.training or type(module).__name__ == "CheckpointWrapper" for module in modules):
            raise InvalidArgumentError(
                "offload_checkpoints",
                True,
                "the model is in eval mode, in which Hugging Face's checkpoint nothing (from_pretrained leaves it so); "
                "call model.train()",
            )

    def remove(self) -> None:
        """Put back what was there; twice changes nothing."""
        for module, name, function, wrapped in self._wrapped:
            # Somebody may have set up checkpointing anew since.
            if getattr(module, name, None) is wrapped:
                setattr(module, name, function)
        self._wrapped = []

    def _wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def checkpoint(*args: Any, **kwargs: Any) -> Any:
            # Inside the checkpoint torch's own hooks come before these: they see its inputs alone.
            with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
                return function(*args, **kwargs)

        # What is set up is still to be seen: reentrant checkpointing is refused by these.
        checkpoint.keywords = getattr(function, "keywords", {})  # type: ignore[attr-defined]
        return checkpoint

    def _pack(self, tensor: Tensor) -> Tensor | _OnHost:
        if tensor.numel() * tensor.element_size() < SMALL or isinstance(tensor, nn.Parameter):
            return tensor
        with torch.no_grad(), _host_memory():
            pinned = tensor.device.type == "cuda"
            copy = torch.empty_like(tensor, device="cpu", pin_memory=pinned, memory_format=torch.contiguous_format)
            copy.copy_(tensor, non_blocking=pinned)
        self.stored += 1
        return _OnHost(copy, tensor.device)

    def _unpack(self, packed: Tensor | _OnHost) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        self.fetched += 1
        # A fresh one each time, on a CPU too: the host's own is for the passes to come.
        copy = packed.copy
        back = torch.empty_like(copy, device=packed.device)
        return back.copy_(copy, non_blocking=copy.is_pinned())


def checkpoints_activations(module: nn.Module) -> bool:
    """Whether a module says that its activations are made again."""
    # Each part of a Hugging Face model has the function; those that use it say so.
    return bool(getattr(module, "gradient_checkpointing", False)) or type(module).__name__ == "CheckpointWrapper"
