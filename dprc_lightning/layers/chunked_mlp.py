"""The MLP of a transformer's layer, some tokens at a time: between the passes it keeps its input, and nothing else.

An MLP treats each token by itself, so its forward may run on pieces. What its layers would save for their backward, a
few times the MLP's own width for every token, is made anew in the backward, for one piece at a time.

As a linear layer, it takes two autograd Functions (`dprc_lightning.layers.linear`): `_Save` saves and computes nothing,
`_Apply` computes and saves nothing. So a checkpoint's recomputation ends before the MLP, and what is made anew here is
what it would have made anew: no more products than without pieces. Without checkpointing each backward costs the
MLP's forward once more, less its last product.
"""

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from dprc_lightning.errors import InvalidArgumentError
from dprc_lightning.layers.instrumentation import ATTRIBUTE, active, instrumentation, parameter_in_use
from dprc_lightning.layers.linear import linear_output
from dprc_lightning.layers.parts import Parts
from dprc_lightning.layers.rule import LayerRule, replaced_parameters
from dprc_lightning.layers.tracker import ParameterTracker
from dprc_lightning.layers.tracking import PassState
from dprc_lightning.sketch import BLOCK_ROWS

FORMS: tuple[tuple[frozenset[str], str, str], ...] = (
    # Children; the first of those that take the input; the one that gives the output.
    (frozenset({"gate_proj", "up_proj", "down_proj", "act_fn"}), "gate_proj", "down_proj"),
    (frozenset({"gate_up_proj", "down_proj", "activation_fn"}), "gate_up_proj", "down_proj"),
    (frozenset({"c_fc", "c_proj", "act"}), "c_fc", "c_proj"),
    (frozenset({"dense_h_to_4h", "dense_4h_to_h", "act"}), "dense_h_to_4h", "dense_4h_to_h"),
)
"""The MLPs that are known by the names of their children: Llama, Qwen, Mistral, Gemma; Phi-3; GPT-2; GPT-NeoX."""

_OPTIONAL = frozenset({"dropout"})


@dataclass(frozen=True)
class MLP:
    """One MLP of a model.

    Attributes:
        owners: Every parameter inside, frozen ones too: the module that owns it, and its local name.
        last: The layer whose product nobody needs when the forward is made anew; None if its class is not known.
        transposed: Whether its weight is [in_features, out_features].
    """

    owners: tuple[tuple[nn.Module, str], ...]
    last: nn.Module | None
    transposed: bool


class ChunkedMLPRule(LayerRule):
    """An MLP whose forward runs some tokens at a time, and once more in each backward.

    Guarantee: a record's norm and clipped gradient are those of the MLP as a whole (`Parts`): pieces are cut along the
    tokens of a record alone, at multiples of `BLOCK_ROWS`, so that the sums over tokens round as they always do
    (`dprc_lightning.layers.tracker.rounding_share`).

    Args:
        chunk: Tokens of each record in one piece, a multiple of `BLOCK_ROWS`.
    """

    def __init__(self, chunk: int) -> None:
        super().__init__()
        if isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1 or chunk % BLOCK_ROWS:
            raise InvalidArgumentError("mlp_chunk", chunk, f"expected a multiple of {BLOCK_ROWS} tokens, or None")
        self._chunk = chunk
        self._mlps: dict[nn.Module, MLP] = {}

    def find(self, model: nn.Module) -> dict[str, nn.Module]:
        """The MLPs of a model.

        Args:
            model: The whole model.

        Returns:
            Name -> module.

        Raises:
            InvalidArgumentError: There is none, or one of them cannot run in pieces: all reasons together.
        """
        found: dict[str, nn.Module] = {}
        problems = []
        for name, module in model.named_modules():
            form = _form(module)
            if form is None:
                continue
            found[name] = module
            self._mlps[module] = _describe(module, form[2])
            problem = _dropout_problem(name, module) or _mixing_problem(name, module, form[1])
            problems += [problem] if problem else []
        if not found:
            forms = ", ".join("/".join(sorted(children)) for children, _, _ in FORMS)
            problems = [f"the model has no MLP of a known form (children {forms}); leave it out"]
        if problems:
            raise InvalidArgumentError("mlp_chunk", self._chunk, "; ".join(problems))
        return found

    def forward(self, module: Any, *args: Any, **kwargs: Any) -> Any:
        """Same values as the original, up to the rounding of products of other shapes.

        Args:
            module: The MLP.
            *args: Its one input, [B, T, ..., d]; an input without an axis for tokens goes to the original at once.
            **kwargs: Or there.

        Returns:
            [B, T, ..., d].

        Raises:
            InvalidArgumentError: Dropout was turned on inside since.
        """
        carried = instrumentation(module)
        inputs = [*args, *kwargs.values()]
        if len(inputs) != 1 or not isinstance(inputs[0], Tensor) or inputs[0].ndim < 3:
            return carried.original_class.forward(module, *args, **kwargs)
        x = inputs[0]
        problem = _dropout_problem(carried.name, module) if module.training else None
        if problem:
            raise InvalidArgumentError("mlp_chunk", self._chunk, problem)
        run = _Run(carried.state, module, carried.original_class, self._mlps[module], self._chunk)
        if torch.is_grad_enabled():
            run.meet_parameters()
        if not torch.is_grad_enabled() or not (run.used or x.requires_grad):
            return run.forward(x)
        # The norm pass goes where anchors are: not into an MLP without anything to train, unless something is below it.
        anchor = carried.state.anchor(x.device) if run.used else None
        token = _Save.apply(x, anchor, run, *(parameter_in_use(owner, name) for owner, name in run.mlp.owners))
        return _Apply.apply(token, x.detach(), run)


def runs_in_pieces(module: nn.Module) -> bool:
    """Whether a module is an MLP that an attached model runs some tokens at a time."""
    carried = module.__dict__.get(ATTRIBUTE)
    return carried is not None and isinstance(carried.rule, ChunkedMLPRule)


@dataclass(eq=False)
class _Run:
    """One forward of an MLP, and what its backwards need of it.

    Attributes:
        state: The pass.
        module: The MLP.
        original: Its class.
        mlp: What is known of it.
        chunk: Tokens of a piece.
        used: By place among the MLP's parameters, those that train; the first place of each.
        box: The output gradient, between the two nodes of one backward.
        slots: See `Parts`.
        autocast: What to make the forward anew under: whether autocast is on, and its dtype.
    """

    state: PassState
    module: nn.Module
    original: type[nn.Module]
    mlp: MLP
    chunk: int
    used: dict[int, ParameterTracker] = field(default_factory=dict)
    box: list[Tensor] = field(default_factory=list)
    slots: dict[str, SimpleNamespace] = field(default_factory=dict)
    autocast: tuple[bool, torch.dtype] | None = None

    def meet_parameters(self) -> None:
        """Count one use of each parameter that trains: the pieces are no further ones."""
        for place, (owner, name) in enumerate(self.mlp.owners):
            tracker = owner.__dict__[ATTRIBUTE].trackers.get(name) if ATTRIBUTE in owner.__dict__ else None
            if tracker is None or any(tracker is known for known in self.used.values()):
                continue
            if active(owner, name) is not None:
                self.used[place] = tracker

    def pieces(self, x: Tensor) -> Iterator[slice]:
        """One at least, so that an empty micro-batch goes where all go."""
        for start in range(0, max(x.shape[1], 1), self.chunk):
            yield slice(start, start + self.chunk)

    def forward(self, x: Tensor) -> Tensor:
        """The MLP's own forward, in pieces."""
        kind = x.device.type
        self.autocast = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        output: Tensor | None = None
        for piece in self.pieces(x):
            part = self.original.forward(self.module, x[:, piece].contiguous())
            if output is None:
                output = part.new_empty(*x.shape[:2], *part.shape[2:])
            output[:, piece] = part
        assert output is not None
        return output

    def backward(self, x: Tensor, parameters: list[Tensor], output_gradient: Tensor, needs_x: bool) -> list[Any]:
        """Make the forward anew piece by piece, and take each piece's backward at once.

        Args:
            x: The input.
            parameters: Of the MLP, in the order of its owners; none that a gradient could accumulate in.
            output_gradient: Of the whole output.
            needs_x: Whether the input's gradient is wanted.

        Returns:
            The gradient of the input, or None; then one of each parameter, or None.
        """
        grad_x = torch.empty_like(x) if needs_x else None
        parts = Parts(self.state, self.slots)
        with self.state.collecting(parts), self._with(parameters):
            for piece in self.pieces(x):
                with torch.enable_grad():
                    part = x[:, piece].detach().contiguous().requires_grad_(needs_x)
                    output = self._anew(part)
                if not output.requires_grad:
                    continue
                inputs = [part] if needs_x else []
                if self.used:
                    inputs.append(self.state.anchor(x.device))
                gradients = torch.autograd.grad(output, inputs, output_gradient[:, piece], allow_unused=True)
                if grad_x is not None:
                    grad_x[:, piece] = 0.0 if gradients[0] is None else gradients[0]
        found = [parts.finish(self.used[i]) if i in self.used else None for i in range(len(parameters))]
        return [grad_x, *found]

    def _anew(self, x: Tensor) -> Tensor:
        assert self.autocast is not None
        enabled, dtype = self.autocast
        with torch.autocast(x.device.type, dtype=dtype, enabled=enabled):
            output: Tensor = self.original.forward(self.module, x)
        return output

    @contextmanager
    def _with(self, parameters: list[Tensor]) -> Iterator[None]:
        """Inside, the MLP finds the parameters that its forward had, and leaves its last product out.

        An engine may have sharded its own again; and no reduction may fire before the last piece.
        """
        by_owner: dict[nn.Module, dict[str, Tensor]] = {}
        for (owner, name), parameter in zip(self.mlp.owners, parameters, strict=True):
            by_owner.setdefault(owner, {})[name] = parameter.detach()
        with ExitStack() as stack:
            for owner, tensors in by_owner.items():
                stack.enter_context(replaced_parameters(owner, tensors))
            last = self.mlp.last
            if last is not None:
                # An instance attribute comes before the class's own.
                last.__dict__["forward"] = partial(linear_output, last, transposed=self.mlp.transposed, product=False)
                stack.callback(last.__dict__.pop, "forward")
            yield


class _Save(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor | None, run: _Run, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(x, *parameters)
        ctx.run = run
        return x.new_zeros((), dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, _token: Tensor) -> tuple[Tensor | None, ...]:
        # Once: under checkpointing each access could unpack (recompute) again.
        x, *parameters = ctx.saved_tensors
        grad_x, *gradients = ctx.run.backward(x, parameters, ctx.run.box.pop(), ctx.needs_input_grad[0])
        return grad_x, None, None, *gradients


class _Apply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, x: Tensor, run: _Run) -> Tensor:
        ctx.run = run
        return run.forward(x)

    @staticmethod
    def backward(ctx: Any, output_gradient: Tensor) -> tuple[Tensor | None, ...]:
        ctx.run.box.append(output_gradient)
        return output_gradient.new_zeros((), dtype=torch.float32), None, None


def _form(module: nn.Module) -> tuple[frozenset[str], str, str] | None:
    children = {name for name, child in module.named_children() if child is not None}
    owns = any(parameter is not None for parameter in module._parameters.values())
    if owns:
        return None
    return next((form for form in FORMS if form[0] <= children <= form[0] | _OPTIONAL), None)


def _describe(module: nn.Module, last: str) -> MLP:
    owners = tuple(
        (owner, name)
        for owner in module.modules()
        for name, parameter in owner._parameters.items()
        if parameter is not None
    )
    layer = _without_adapters(getattr(module, last))
    kind = _class_of(layer)
    conv1d = kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"
    known = (kind is nn.Linear or conv1d) and "forward" not in layer.__dict__
    return MLP(owners, layer if known else None, conv1d)


def _class_of(module: nn.Module) -> type[nn.Module]:
    carried = module.__dict__.get(ATTRIBUTE)
    return type(module) if carried is None else carried.original_class


def _without_adapters(layer: nn.Module) -> nn.Module:
    """The layer that peft has put a LoRA around; a variant of LoRA may look at the layer's output, and stays whole."""
    while type(layer).__module__ == "peft.tuners.lora.layer" and not getattr(layer, "lora_variant", None):
        layer = layer.base_layer  # type: ignore[assignment]
    return layer


def _dropout_problem(name: str, module: nn.Module) -> str | None:
    for inner, child in module.named_modules():
        if isinstance(child, nn.modules.dropout._DropoutNd) and child.p > 0:
            return (
                f"module {name!r} has dropout {inner!r} with p={child.p}, whose masks would not be drawn again in the "
                "same pieces; set it to 0 in the model's (or the adapter's) configuration, or leave mlp_chunk out"
            )
    return None


def _mixing_problem(name: str, module: nn.Module, first: str) -> str | None:
    """Does it give the same on pieces as on the whole? Names alone do not say so."""
    layer = getattr(module, first)
    while hasattr(layer, "base_layer"):
        layer = layer.base_layer
    weight: Tensor = layer.weight
    # Without values (meta, or torch's FakeTensor) there is nothing to compare.
    if weight.is_meta or type(weight.data).__name__ == "FakeTensor":
        return None
    width = getattr(layer, "in_features", None) or weight.shape[0]
    dtype = weight.dtype if weight.is_floating_point() else torch.float32
    # Of its own generator: what the model draws next must not change.
    x = torch.randn(2, 7, width, generator=torch.Generator().manual_seed(0), dtype=torch.float32)
    x = x.to(weight.device, dtype)
    parts = x, x[:, :3].contiguous(), x[:, 3:].contiguous()
    with torch.no_grad():
        whole, *pieces = (_class_of(module).forward(module, part) for part in parts)
    share = 0.05 if dtype in (torch.bfloat16, torch.float16) else 1e-4
    together = torch.cat(pieces, 1)
    same = whole.shape == together.shape and bool((whole - together).abs().max() <= share * whole.abs().max())
    if same:
        return None
    return f"module {name!r} does not treat each token by itself; leave mlp_chunk out"


def refuse_whole_factors(chunk: int, mlps: Iterable[nn.Module], trackers: Iterable[ParameterTracker]) -> None:
    """Refuse an estimator that needs all tokens of a layer at once.

    Args:
        chunk: Tokens of a piece.
        mlps: Those that are to run in pieces.
        trackers: The parameters that train.

    Raises:
        InvalidArgumentError: The norm of one inside is had by Hutch++.
    """
    inside = {id(parameter) for mlp in mlps for parameter in mlp.parameters()}
    for tracker in trackers:
        if tracker.estimator == "hutchpp" and id(tracker.parameter) in inside:
            raise InvalidArgumentError(
                "mlp_chunk",
                chunk,
                f"parameter {tracker.name!r} has estimator=hutchpp, which needs all its tokens at once; set "
                "estimator=hutchinson, or leave mlp_chunk out",
            )
