"""A step on torch's meta device as it would run on a CPU: tensors have shapes and sizes, no numbers and no memory."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dprc_lightning.bench.step import flop_counter
from dprc_lightning.offload import copies_to_host

META = torch.device("meta")


def put(model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Put fresh tensors in the place of all parameters and buffers; tied ones stay tied.

    Args:
        model: Changed in place.
        device: Where they lie; anywhere but on the meta device the parameters are random.
        dtype: Of the parameters; buffers keep theirs.
    """
    generator = torch.Generator().manual_seed(0)
    made: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in made:
                value = torch.empty(parameter.shape, dtype=dtype, device=device)
                if not value.is_meta:
                    value = value.normal_(0.0, 0.02, generator=generator) if value.ndim > 1 else value.fill_(1.0)
                # The original is kept too, so that its id is not given to another.
                made[id(parameter)] = parameter, nn.Parameter(value, requires_grad=parameter.requires_grad)
            module._parameters[name] = made[id(parameter)][1]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=device).copy_(buffer)


@contextmanager
def without_numbers(vocabulary: int) -> Iterator[None]:
    """Inside, a step runs on the meta device as it would on a CPU.

    Args:
        vocabulary: How many distinct ids a batch may hold; it is taken to hold as many as it can.

    Yields:
        Nothing.
    """
    of_cpu = torch.nn.functional.scaled_dot_product_attention

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        # With dropout torch takes the formula on a CPU too.
        if not query.is_meta or dropout_p > 0.0:
            return of_cpu(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        if attn_mask is not None and attn_mask.dtype is torch.bool:
            # As torch does on a CPU: zeros, and -inf where nothing is to be seen.
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype)
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return flash(query, key, value, 0.0, is_causal, attn_mask=attn_mask, scale=scale)[0]

    from transformers import masking_utils

    unique, tolist = torch.unique, torch.Tensor.tolist
    no_mask_needed = masking_utils._ignore_causal_mask_sdpa

    def no_padding(padding_mask: Tensor | None, *args: Any, **kwargs: Any) -> bool:
        # Whether a record is padded is in the numbers: one may be, and a mask of tokens by tokens is made for it.
        return not (padding_mask is not None and padding_mask.is_meta) and no_mask_needed(padding_mask, *args, **kwargs)

    def distinct(ids: Tensor, return_inverse: bool = False) -> Any:
        if not ids.is_meta:
            return unique(ids, return_inverse=return_inverse)
        found = ids.new_empty(min(ids.numel(), vocabulary))
        return (found, torch.empty_like(ids)) if return_inverse else found

    def ones(values: Tensor) -> Any:
        return tolist(torch.ones(values.shape, device="cpu")) if values.is_meta else tolist(values)

    with (
        replaced(torch, "unique", distinct),
        # The gradients of the losses, which a head that is made in blocks asks for, are ones.
        replaced(torch.Tensor, "tolist", ones),
        # Whether several records lie in one row is in the numbers of the positions; they do not.
        replaced(masking_utils, "find_packed_sequence_indices", lambda position_ids: None),
        replaced(masking_utils, "_ignore_causal_mask_sdpa", no_padding),
        replaced(torch.nn.functional, "scaled_dot_product_attention", attention),
        # The meta device has no autocast, not even one that is off.
        replaced(torch, "autocast", _as_on_cpu(torch.autocast)),
        replaced(torch, "is_autocast_enabled", _as_on_cpu(torch.is_autocast_enabled)),
        replaced(torch, "get_autocast_dtype", _as_on_cpu(torch.get_autocast_dtype)),
    ):
        yield


def _as_on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    def of_device(device_type: str, *args: Any, **kwargs: Any) -> Any:
        return function("cpu" if device_type == "meta" else device_type, *args, **kwargs)

    return of_device


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Inside, an attribute is another.

    Args:
        owner: A module, class or object.
        name: Of the attribute.
        value: What it is inside.

    Yields:
        Nothing.
    """
    own, before = name in vars(owner), getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


class Operations(TorchDispatchMode):
    """Counts FLOPs, and keeps offloaded checkpoints on the meta device: they would take real memory.

    FLOPs as `flop_counter`, which runs what it does not know in smaller operations: that takes time, and it holds
    tensors longer than a step does.
    """

    def __init__(self) -> None:
        super().__init__()
        self._known = flop_counter().flop_registry
        self.products = self.attention = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Run one operation and count it."""
        kwargs = kwargs or {}
        if copies_to_host() and kwargs.get("device") == torch.device("cpu"):
            kwargs = {**kwargs, "device": META}
        result = func(*args, **kwargs)
        packet = func._overloadpacket  # type: ignore[attr-defined]
        if packet in _ATTENTION:
            products, place, causal = _ATTENTION[packet]
            query, key = args[place : place + 2]
            causal = (args[causal] if len(args) > causal else kwargs.get("is_causal", False)) is True
            whole = 2 * products * query.shape[:-1].numel() * key.shape[-2] * query.shape[-1]
            self.attention += whole // 2 if causal else whole
        elif packet in self._known:
            self.products += self._known[packet](*args, **kwargs, out_val=result)
        return result


_ATTENTION = {
    # Products, place of the query, place of is_causal.
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: (2, 0, 4),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (5, 1, 7),
}
