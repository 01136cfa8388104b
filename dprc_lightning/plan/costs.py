"""FLOPs and memory of per-record norms, by the shapes of a model, against those of the whole step."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import nn

from dprc_lightning.clipping import attach
from dprc_lightning.clipping.plan import PlanRow
from dprc_lightning.layers.embedding import EmbeddingRule
from dprc_lightning.layers.registry import find_rule
from dprc_lightning.sketch.hutchinson import tokens_at_once
from dprc_lightning.sketch.hutchpp import BLOCK_COLUMNS, PRODUCTS, flops_per_record

FLOAT32 = 4
FLOAT64 = 8


@dataclass(frozen=True)
class Batch:
    """One micro-batch.

    Attributes:
        records: B.
        tokens: T, of each record.
    """

    records: int
    tokens: int


@dataclass(frozen=True)
class NormCosts:
    """What the norms of one micro-batch cost.

    Attributes:
        sketch_dim: The k that the accountant must be told; None if every norm turns out exact.
        projection_bytes: P, as far as it is kept for a whole logical step.
        norm_bytes: The most that is live for the norms of one micro-batch beside P: the sketch (or the exact norm's
            temporaries) of one parameter at a time, with the block of a P that is not kept and the products that share
            it, and what parameters with several uses keep until the pass is over.
        flops: Of one micro-batch, matrix products alone; drawing P is not in them.
        sketched_parameters: Numbers in the parameters whose norm is estimated.
        exact_parameters: Numbers in those whose norm is exact.
    """

    sketch_dim: int | None
    projection_bytes: int
    norm_bytes: int
    flops: int
    sketched_parameters: int
    exact_parameters: int

    @property
    def memory_bytes(self) -> int:
        """P and the norms together."""
        return self.projection_bytes + self.norm_bytes


def norm_costs(
    model: nn.Module,
    batch: Batch,
    *,
    sketch_dim: int,
    estimator: str,
    projection: str,
    projection_memory: float | None = 1.0,
) -> NormCosts:
    """Costs of the norms for one setting of the clipping: what `ClippingHandle.plan` says, for a micro-batch.

    Args:
        model: The whole model; unchanged in the end.
        batch: Of one micro-batch.
        sketch_dim: k.
        estimator: As for `attach`.
        projection: Likewise.
        projection_memory: Likewise.

    Returns:
        The costs. A convolution counts as if it had one position per token. An exact norm counts by the way that
        `dprc_lightning.sketch.exact` chooses; Gram matrices are float64, and slower than their FLOPs say. The QR
        decompositions of Hutch++ are no products and count for nothing.
    """
    modules = dict(model.named_modules())
    # Where a row's module is the model itself, the row has the name of its type.
    modules[type(model).__name__] = modules[""]
    one_hot = {name for name, module in modules.items() if isinstance(find_rule(module), EmbeddingRule)}
    handle = attach(
        model,
        estimator,  # type: ignore[arg-type]
        sketch_dim,
        projection,  # type: ignore[arg-type]
        check_isolation=False,
        projection_memory=projection_memory,
    )
    try:
        rows = handle.plan()
        accounted = handle.sketch_dim
    finally:
        handle.detach()
    costs = [_row_costs(row, [name in one_hot for name in row.modules], batch) for row in rows]
    return NormCosts(
        sketch_dim=accounted,
        projection_bytes=sum(row.projection_bytes for row in rows),
        norm_bytes=max(
            at_once + _making_bytes(row, batch, sketch_dim) for row, (_, at_once, _) in zip(rows, costs, strict=True)
        )
        + sum(kept for _, _, kept in costs),
        flops=sum(flops for flops, _, _ in costs),
        sketched_parameters=sum(prod(row.shape) for row in rows if row.estimator != "exact"),
        exact_parameters=sum(prod(row.shape) for row in rows if row.estimator == "exact"),
    )


def _making_bytes(row: PlanRow, batch: Batch, sketch_dim: int) -> int:
    """A block of a P that is not kept, and the products of as many tokens as share it."""
    if row.block_bytes == 0:
        return 0
    tokens = min(batch.tokens, tokens_at_once(batch.records, sketch_dim))
    return row.block_bytes + FLOAT32 * batch.records * tokens * sketch_dim


def _row_costs(row: PlanRow, one_hot: list[bool], batch: Batch) -> tuple[int, int, int]:
    """FLOPs, bytes while the parameter is at hand, bytes that wait for its other uses.

    Args:
        row: The parameter.
        one_hot: For each of its uses, whether it is an embedding's.
        batch: The micro-batch.

    Returns:
        The three.
    """
    tokens, records = batch.tokens, batch.records
    n0, n1 = row.shape[0] if row.shape else 1, prod(row.shape[1:])
    several = len(one_hot) > 1
    if row.estimator == "hutchpp":
        return _hutchpp_costs(row, one_hot, batch)
    if row.estimator != "exact" or row.ghost_rows is None:
        # A vector's per-record gradient is a sum, without products; its row says 0.
        flops = row.flops_per_token * len(one_hot)
        if row.estimator != "exact":
            # The projected factor of an embedding is a choice of rows of P.
            flops -= 2 * row.projection_floats * sum(one_hot)
        held = FLOAT32 * records * row.sketch_floats
        return flops * tokens * records, held, held if several else 0
    kept = _kept_factors((n0, n1), one_hot, batch)
    if tokens * len(one_hot) <= row.ghost_rows:
        flops = sum(2 * tokens**2 * (n0 + n1) for _ in _pairs(len(one_hot)))
        # Two ids are compared, not multiplied.
        flops -= sum(2 * tokens**2 * n0 for a, b in _pairs(len(one_hot)) if one_hot[a] or one_hot[b])
        return flops * records, FLOAT64 * (2 * tokens**2 + tokens * (n0 + n1)), kept
    flops = sum(2 * tokens * n0 * n1 for single in one_hot if not single)
    # The sum and one product.
    return flops * records, 2 * FLOAT32 * n0 * n1, kept


def _hutchpp_costs(row: PlanRow, one_hot: list[bool], batch: Batch) -> tuple[int, int, int]:
    """`_row_costs` of Hutch++, which has all uses of a parameter at hand at once."""
    shape = row.shape[0], prod(row.shape[1:])
    contracted, other = shape if row.side == "output" else shape[::-1]
    columns = row.projection_floats // (contracted + other)
    # The products of a one-hot factor are a choice of rows, or a sum of some.
    per_token = row.flops_per_token * len(one_hot) - 2 * PRODUCTS * columns * contracted * sum(one_hot)
    floats = row.sketch_floats
    if all(one_hot):
        # Rows of the ids that may be there, in float64 and in float32.
        present = min(batch.tokens * len(one_hot), contracted)
        floats += min(columns, BLOCK_COLUMNS) * (3 * present - contracted)
    flops = per_token * batch.tokens + flops_per_record(other, columns)
    kept = _kept_factors(shape, one_hot, batch)
    return flops * batch.records, FLOAT32 * floats * batch.records, kept


def _kept_factors(shape: tuple[int, int], one_hot: list[bool], batch: Batch) -> int:
    """Bytes of both factors of each use, but for ids, where a parameter has several."""
    if len(one_hot) == 1:
        return 0
    n0, n1 = shape
    return sum(FLOAT32 * batch.tokens * batch.records * (n1 + (0 if single else n0)) for single in one_hot)


def _pairs(uses: int) -> Iterator[tuple[int, int]]:
    return ((a, b) for a in range(uses) for b in range(a, uses))


def step_flops(model: nn.Module, batch: Batch) -> int:
    """FLOPs of one micro-batch without the norms: forward, norm pass, clipped backward.

    Matrix products: 2 per weight and token in the forward; as many in each of the two backwards for the gradient of a
    layer's input, if something below it trains; as many once more for the gradient of a trainable weight. Attention:
    ``4 * heads * head_dim`` per pair of tokens that see each other, twice that in each backward. Modules are taken to
    run in the order in which they are registered, every weight once per token (so that all experts of a mixture count).

    Args:
        model: The whole model.
        batch: One micro-batch.

    Returns:
        FLOPs, multiplication and addition counted each.
    """
    positions = batch.tokens * batch.records
    order = {id(module): place for place, module in enumerate(model.modules())}
    first = min(order[id(m)] for m in model.modules() if any(_trains(p) for p in m._parameters.values()))
    total = 0
    for module in model.modules():
        if isinstance(find_rule(module) or module, (EmbeddingRule, nn.Embedding)):
            continue
        for parameter in module._parameters.values():
            if parameter is None or parameter.ndim < 2:
                continue
            product = 2 * parameter.numel() * positions
            below_trains = order[id(module)] > first
            total += product * (1 + 2 * below_trains + _trains(parameter))
    return total + _attention_flops(model, batch, order, first)


def _trains(parameter: nn.Parameter | None) -> bool:
    return parameter is not None and parameter.requires_grad


def _attention_flops(model: nn.Module, batch: Batch, order: dict[int, int], first: int) -> int:
    """By formula: attention has no parameters. 0 for a model whose configuration does not tell its heads.

    Args:
        model: The whole model.
        batch: One micro-batch.
        order: The place of each module.
        first: The place of the first that trains.

    Returns:
        FLOPs of the forward and of both backwards.
    """
    config = _attention_config(model)
    if config is None:
        return 0
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    count = config.num_hidden_layers
    causal = any(getattr(module, "is_causal", False) for module in model.modules())
    kinds = getattr(config, "layer_types", None) or [None] * count
    layers = next((m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == count), None)
    total = 0
    for number, kind in enumerate(kinds[:count]):
        window = getattr(config, "sliding_window", None) if kind == "sliding_attention" else None
        forward = 4 * _pairs_seen(batch.tokens, causal, window) * heads * head_dim * batch.records
        last = max(order[id(m)] for m in layers[number].modules()) if layers is not None else first
        total += forward * (1 + 4 * (last >= first))
    return total


def _attention_config(model: nn.Module) -> Any:
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "get_text_config"):
            config = config.get_text_config()
        if hasattr(config, "num_attention_heads") and hasattr(config, "num_hidden_layers"):
            return config
    return None


def _pairs_seen(tokens: int, causal: bool, window: int | None) -> int:
    if not causal:
        return tokens**2
    reach = min(window or tokens, tokens)
    # The first `reach` tokens see all before them, the others as many as the window holds.
    return reach * (reach + 1) // 2 + (tokens - reach) * reach
