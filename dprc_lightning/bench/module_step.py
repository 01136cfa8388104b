"""A step of an arbitrary module on the meta device: its twin without numbers, and one step of it."""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn

from dprc_lightning.activation_checkpointing import ActivationCheckpointing
from dprc_lightning.bench.meta import META
from dprc_lightning.bench.simulate import MetaStep, run_on_meta
from dprc_lightning.clipping import attach
from dprc_lightning.errors import LossShapeError

_TRUE_DTYPES = {"bf16-true": torch.bfloat16, "64-true": torch.float64}


@dataclass(frozen=True)
class ModuleStep:
    """One private step of a module.

    Attributes:
        module: As it is before it is attached; not changed. Its parameters have numbers, or stand-ins for them.
        loss: Name of its method that turns a micro-batch into losses [B].
        batch: A micro-batch, anywhere.
        settings: For `dprc_lightning.clipping.attach`.
        checkpointing: Whether activation checkpointing is turned on first, see `ActivationCheckpointing`.
        records: How many the batch was to have.
        precision: The trainer's. ``bf16-mixed`` runs in float32, for the meta device has no autocast: see `simulate`.
    """

    module: nn.Module
    loss: str
    batch: Any
    settings: Mapping[str, Any]
    checkpointing: bool = False
    records: int | None = None
    precision: str = "32-true"

    def simulate(self) -> dict[str, Any]:
        """Run it on the meta device, as a later micro-batch of a logical step: gradients are there already.

        Under ``bf16-mixed`` activations count in float32, and a bfloat16 copy of every parameter comes on top: more
        than a step takes.

        Returns:
            As `run_on_meta`.
        """
        dtype = _TRUE_DTYPES.get(self.precision)
        model: Any = meta_twin(self.module, dtype)
        if self.checkpointing:
            ActivationCheckpointing(model)
        batch = _on_meta(self.batch, dtype)

        def losses() -> Tensor:
            found: Tensor = getattr(model, self.loss)(batch)
            if self.records is not None and tuple(found.shape) != (self.records,):
                raise LossShapeError(
                    f"{self.loss} gave losses of shape {tuple(found.shape)} for a batch of records={self.records}; one "
                    "loss for each record is needed"
                )
            return found

        settings = {**self.settings, "check_isolation": False}
        with _default_dtype(dtype):
            found = run_on_meta(
                MetaStep(
                    model=model,
                    tried=self.module,
                    inputs=tensors_of(batch),
                    losses=losses,
                    prepare=lambda projections: attach(model, **settings, projections=projections),
                    projection=settings.get("projection", "gaussian"),
                    sketch_dim=settings.get("sketch_dim", 32),
                    vocabulary=_most_ids(model),
                    later=True,
                )
            )
        if self.precision == "bf16-mixed":
            found["peak_bytes"] += sum(2 * p.numel() for p in model.parameters() if p.dtype is torch.float32)
        return found


def meta_twin(module: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """A copy of a module whose tensors lie on the meta device: nothing of their size is made.

    Args:
        module: Any; a LightningModule leaves its trainer behind. Not attached.
        dtype: Of its floating-point parameters and buffers; None for their own.

    Returns:
        The copy; tied parameters are tied.
    """
    memo: dict[int, Any] = {}
    for part in module.modules():
        # Tensors that are kept as plain attributes too: they would meet meta tensors in a forward.
        for tensor in (*part._parameters.values(), *part._buffers.values(), *vars(part).values()):
            if isinstance(tensor, Tensor) and id(tensor) not in memo:
                memo[id(tensor)] = _empty(tensor, dtype)
    made: Any = copy.deepcopy(module, memo)
    if hasattr(made, "_device"):
        # What a LightningModule says of itself.
        made._device = META
    return made


def _empty(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    # Not empty_like: a stand-in is one number of memory, and looks so.
    wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
    found = torch.empty(tensor.shape, dtype=wanted, device=META)
    return nn.Parameter(found, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else found


def _on_meta(batch: Any, dtype: torch.dtype | None) -> Any:
    def convert(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor

    return apply_to_collection(move_data_to_device(batch, META), Tensor, convert)


def tensors_of(batch: Any) -> list[Tensor]:
    """All tensors of a batch.

    Args:
        batch: Tensors, alone or in mappings, sequences and dataclasses.

    Returns:
        In order.
    """
    found: list[Tensor] = []
    apply_to_collection(batch, Tensor, found.append)
    return found


def _most_ids(model: nn.Module) -> int:
    return max((m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding)), default=2**62)


@contextmanager
def _default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    """As Lightning's precision plugins set it around a step."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype or before)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def shortened(batch: Any, tokens: int, to: int) -> Any:
    """A batch whose records have fewer tokens.

    Args:
        batch: On the meta device or elsewhere.
        tokens: Length of the second dimension of all that goes by tokens.
        to: What it becomes.

    Returns:
        The batch.
    """

    def cut(tensor: Tensor) -> Tensor:
        return tensor[:, :to].clone() if tensor.ndim >= 2 and tensor.shape[1] == tokens else tensor

    return apply_to_collection(batch, Tensor, cut)


def tokens_of(batch: Any) -> int:
    """T of a batch.

    Args:
        batch: As `tensors_of`.

    Returns:
        The longest second dimension of ids [B, T] and embeddings [B, T, d]; 0 if it has neither.
    """
    by_tokens = [t for t in tensors_of(batch) if t.ndim == (3 if t.is_floating_point() else 2)]
    return max((t.shape[1] for t in by_tokens), default=0)
