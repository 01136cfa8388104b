"""The smallest noise multiplier that meets a privacy target."""

import math
from collections.abc import Callable, Sequence

from dprc_lightning.accounting import _validation
from dprc_lightning.accounting.accountant import Accountant, upper_bounds
from dprc_lightning.accounting.events import StepEvent, validate_delta, validate_steps
from dprc_lightning.accounting.grid import COARSE, FINE, Resolution
from dprc_lightning.accounting.infinite import why_infinite
from dprc_lightning.accounting.privacy_loss import UpperBound
from dprc_lightning.accounting.rademacher import require_enough_columns
from dprc_lightning.accounting.slack import CONVEX_MIN_NOISE_MULTIPLIER
from dprc_lightning.errors import AccountingResourceError, CalibrationError

_SMALLEST, _LARGEST = 0.02, 1e6
_TOLERANCE = 2e-5
"""Relative accuracy of the noise multiplier before certification, which adds at most a few of these steps."""

_LEAST_LEFT = 1e-6
"""Share of epsilon that spent steps must leave: below, the grids' rounding is as large as what is left."""


def _narrow(
    upper: Callable[[float], float], target: float, low: float, high: float, tolerance: float
) -> tuple[float, float]:
    """Returns a narrower bracket, upper(low) > target >= upper(high): secant steps on logarithms.

    Probes fall alternately just above and just below the secant's root, so that both ends of the bracket move; a
    bisection follows wherever two of them together fail to halve it.
    """
    at_low, at_high = upper(low), upper(high)
    side, slow = 1.0, 0
    while high > low * (1 + tolerance):
        width = math.log(high / low)
        position = 0.5
        if slow < 2 and math.isfinite(at_low) and at_high > 0 and at_low > at_high:
            margin = 0.3 * tolerance / width
            position = math.log(at_low / target) / math.log(at_low / at_high) + side * margin
            side = -side
        probe = low * math.exp(min(max(position, 0.02), 0.98) * width)
        value = upper(probe)
        if value > target:
            low, at_low = probe, value
        else:
            high, at_high = probe, value
        slow = slow + 1 if math.log(high / low) > 0.5 * width else 0
    return low, high


def calibrate_noise_multiplier(
    *,
    epsilon: float,
    delta: float,
    sample_rate: float,
    steps: int,
    sketch_dim: int | None = None,
    projection: str = "gaussian",
    bound: str = "best",
    spent: Sequence[tuple[StepEvent, int]] = (),
) -> float:
    """The smallest noise multiplier whose certified upper epsilon is at most the target.

    Guarantee: `epsilon` of the returned value, as `dprc_lightning.accounting.epsilon` computes it, is at most the
    target; a noise multiplier smaller by a relative 2e-4 does not reach it. With ``spent`` the same holds for the
    composition of what is spent and of ``steps`` further steps, as `Accountant` computes it: a run that goes on under
    it stays within the target as a whole. That composition presumes that nobody decided to go on, or how far, in the
    light of what the spent steps released. The ratio to exact clipping is no constant: it must be calibrated for every
    setting. A value that cannot be used is an InvalidArgumentError that names it.

    Args:
        epsilon: The target > 0, for everything together.
        delta: In (0, 1).
        sample_rate: q in (0, 1].
        steps: Number of logical steps, >= 1; with ``spent``, of further ones.
        sketch_dim: k >= 1; None: exact clipping.
        projection: "gaussian", or "rademacher", which is not certified.
        bound: "best", "convex" or "envelope".
        spent: Steps that count already, with their number, as a ledger has them.

    Returns:
        sigma: the standard deviation of the noise on the sum of clipped gradients over the clipping norm.

    Raises:
        CalibrationError: If no noise multiplier in the supported range meets the target, or all do, or if the spent
            steps alone reach it.
    """
    target = _validation.positive_float("epsilon", epsilon)
    delta, steps = validate_delta(delta), validate_steps(steps, minimum=1)
    smallest = CONVEX_MIN_NOISE_MULTIPLIER * (1 + 1e-12) if bound == "convex" and sketch_dim is not None else _SMALLEST
    event = StepEvent(1.0, sample_rate, sketch_dim, projection, bound)
    if event.projection == "rademacher" and event.sketch_dim is not None:
        # Where a norm is missed too often no noise helps: said at once, and not after a search.
        require_enough_columns(event.sketch_dim, _LARGEST, event.sample_rate, steps, delta)
    before = Accountant(spent)
    rough, after = COARSE, ""
    if before.steps:
        already = before.upper(delta)
        if already >= target * (1 - _LEAST_LEFT):
            raise CalibrationError(
                f"epsilon={target!r}: {before.steps} spent steps alone cost epsilon {already:.4f} at delta={delta!r}; "
                "no further step fits, raise epsilon or stop here"
            )
        if min(b.fast_epsilon(b.composers()) for b in upper_bounds(before.history, delta, COARSE)) >= target:
            # So little is left that the coarse bound sees nothing of it.
            rough = FINE
        after = f" after {before.steps} spent steps of epsilon {already:.4f}"

    known: dict[tuple[float, Resolution], float] = {}
    kept: list[tuple[float, list[UpperBound]]] = []

    def bounds_for(sigma: float, resolution: Resolution) -> list[UpperBound]:
        event = StepEvent(sigma, sample_rate, sketch_dim, projection, bound)
        return list(upper_bounds(Accountant([*before.history, (event, steps)]).history, delta, resolution))

    def upper(sigma: float, resolution: Resolution) -> float:
        if (sigma, resolution) not in known:
            try:
                bounds = bounds_for(sigma, resolution)
                value = min(b.fast_epsilon(b.composers()) for b in bounds)
            except AccountingResourceError:
                # So much loss that no grid holds it; the search has to go on at larger noise.
                value = math.inf
            if resolution is FINE and value <= target:
                # What is certified in the end is the last that meets the target.
                kept[:] = [(sigma, bounds)]
            known[sigma, resolution] = value
        return known[sigma, resolution]

    def certified(sigma: float) -> float:
        bounds = kept[0][1] if kept and kept[0][0] == sigma else bounds_for(sigma, FINE)
        return min(b.epsilon() for b in bounds)

    def why() -> str:
        event = StepEvent(_LARGEST, sample_rate, sketch_dim, projection, bound)
        return why_infinite(Accountant([*before.history, (event, steps)]).history, delta)

    low, high = _bracket(lambda sigma: upper(sigma, rough), target, smallest, after, why)
    low, high = _narrow(lambda sigma: upper(sigma, rough), target, low, high, 1e-3)
    # The finer bound is smaller: its root lies at or just below the coarse one, and further below where little is left.
    low, factor = max(smallest, low * 0.997), 0.98
    while low > smallest and upper(low, FINE) <= target:
        high, low, factor = low, max(smallest, low * factor), factor**2
    if upper(low, FINE) > target:
        low, high = _narrow(lambda sigma: upper(sigma, FINE), target, low, high, _TOLERANCE)
    else:
        high = low
    for _ in range(50):
        if certified(high) <= target:
            return high
        high *= 1 + _TOLERANCE
    raise CalibrationError(
        f"epsilon={epsilon!r}: no noise multiplier near {high:.6g} could be certified at delta={delta!r}{after}; "
        "raise epsilon or delta"
    )


def _bracket(
    upper: Callable[[float], float], target: float, smallest: float, after: str, why: Callable[[], str]
) -> tuple[float, float]:
    """Returns a pair of noise multipliers, the first missing the target and the second meeting it.

    Raises:
        CalibrationError: If the supported range holds no such pair.
    """
    high = max(1.0, smallest)
    if upper(high) > target:
        if math.isinf(upper(high)) and math.isinf(upper(_LARGEST)):
            raise CalibrationError(f"epsilon={target!r}: no finite epsilon can be certified{after}: {why()}")
        while True:
            low, high = high, 2 * high
            if high > _LARGEST:
                raise CalibrationError(
                    f"epsilon={target!r}: not reached by any noise multiplier up to {_LARGEST:g}{after}; "
                    "raise epsilon or delta"
                )
            if upper(high) <= target:
                return low, high
    while True:
        if high <= smallest:
            raise CalibrationError(
                f"epsilon={target!r}: already met by the smallest supported noise multiplier {smallest:.4g}{after}; "
                "lower epsilon, or use bound='best'"
            )
        low = max(smallest, high / 2)
        if upper(low) > target:
            return low, high
        high = low
