"""A device that is not the CPU, on a machine that has none: its tensors keep their numbers in the host's memory.

What works on a CPU alone by accident (a mask made without `device=`, a CPU tensor among the operands) fails here as it
does on a GPU, and what is computed can be compared with the CPU's. torch's FakeTensorMode cannot do it: where torch is
built without CUDA it has neither a copy from the host to a fake GPU nor a backward there.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map


class _Module(backend_registration._DummyBackendModule):
    """What torch asks of `torch.other`."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


# torch keeps no reference to these: once they are collected it ends the process.
_KEPT = _Module(), backend_registration._DummyPrivateUse1Hook(), backend_registration._DummyDeviceGuard()
backend_registration._setup_privateuseone_for_python_backend("other", *_KEPT)
DEVICE = torch.device("other", 0)

_CROSSING = {torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default}


class OnDevice(Tensor):
    """A tensor of the device. `inner` has its numbers, on the CPU."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "OnDevice":
        strides, offset = inner.stride(), inner.storage_offset()
        out: OnDevice = Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=strides, storage_offset=offset, dtype=inner.dtype, device=DEVICE
        )
        out.inner = inner
        return out

    def tolist(self) -> Any:
        return self.inner.tolist()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"OnDevice({self.inner})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _EveryOp(TorchDispatchMode):
    """Factories and copies to the device have no operand there."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


@contextmanager
def other_device() -> Iterator[torch.device]:
    """Let tensors be made on the device."""
    lift, swap = torch._C._only_lift_cpu_tensors(), torch.__future__.get_swap_module_params_on_conversion()
    # `torch.tensor(values, device=...)` is made on the CPU and copied, so that the mode sees it.
    torch._C._set_only_lift_cpu_tensors(True)
    # `module.to` keeps its parameters the same objects, as it does for CUDA.
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        # The mode is of this thread: the backward must run in it too.
        with _EveryOp(), torch.autograd.set_multithreading_enabled(False):
            yield DEVICE
    finally:
        torch._C._set_only_lift_cpu_tensors(lift)
        torch.__future__.set_swap_module_params_on_conversion(swap)


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    operands = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    here = any(isinstance(operand, OnDevice) for operand in operands)
    if here and func not in _CROSSING:
        for operand in operands:
            # CUDA takes a CPU scalar among the operands too.
            if not isinstance(operand, OnDevice) and operand.dim() > 0:
                raise RuntimeError(f"{func}: an operand of shape {list(operand.shape)} is on {operand.device}")
    wanted = kwargs.get("device")
    if wanted is not None:
        here = torch.device(wanted).type == DEVICE.type
        kwargs = kwargs | {"device": torch.device("cpu") if here else wanted}
    elif func is torch.ops.aten.copy_.default:
        here = isinstance(args[0], OnDevice)
    owners = {id(operand.inner): operand for operand in operands if isinstance(operand, OnDevice)}
    out = func(*tree_map(_inner, args), **tree_map(_inner, kwargs))
    if not here:
        return out
    return tree_map(lambda x: (owners[id(x)] if id(x) in owners else OnDevice(x)) if isinstance(x, Tensor) else x, out)


def _inner(value: Any) -> Any:
    return value.inner if isinstance(value, OnDevice) else value
