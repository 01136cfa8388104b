"""The smallest noise multiplier that meets a privacy target."""

import math
from collections.abc import Callable

from dprc_lightning.accounting import _validation
from dprc_lightning.accounting.accountant import upper_bounds
from dprc_lightning.accounting.events import StepEvent, validate_delta, validate_steps
from dprc_lightning.accounting.grid import COARSE, FINE, Resolution
from dprc_lightning.accounting.slack import CONVEX_MIN_NOISE_MULTIPLIER
from dprc_lightning.errors import AccountingResourceError, CalibrationError

_SMALLEST, _LARGEST = 0.02, 1e6
_TOLERANCE = 2e-5
"""Relative accuracy of the noise multiplier before certification, which adds at most a few of these steps."""


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
) -> float:
    """The smallest noise multiplier whose certified upper epsilon is at most the target.

    Guarantee: `epsilon` of the returned value, as `dprc_lightning.accounting.epsilon` computes it, is at most the
    target; a noise multiplier smaller by a relative 2e-4 does not reach it. The ratio to exact clipping is no constant:
    it must be calibrated for every setting. A value that cannot be used is an InvalidArgumentError that names it.

    Args:
        epsilon: The target > 0.
        delta: In (0, 1).
        sample_rate: q in (0, 1].
        steps: Number of logical steps, >= 1.
        sketch_dim: k >= 1; None: exact clipping.
        projection: Only "gaussian".
        bound: "best", "convex" or "envelope".

    Returns:
        sigma: the standard deviation of the noise on the sum of clipped gradients over the clipping norm.

    Raises:
        CalibrationError: If no noise multiplier in the supported range meets the target, or all do.
    """
    target = _validation.positive_float("epsilon", epsilon)
    delta, steps = validate_delta(delta), validate_steps(steps, minimum=1)
    smallest = CONVEX_MIN_NOISE_MULTIPLIER * (1 + 1e-12) if bound == "convex" and sketch_dim is not None else _SMALLEST

    def upper(sigma: float, resolution: Resolution, certified: bool = False) -> float:
        history = [(StepEvent(sigma, sample_rate, sketch_dim, projection, bound), steps)]
        try:
            bounds = upper_bounds(history, delta, resolution)
            return min(b.epsilon() if certified else b.fast_epsilon(b.composers()) for b in bounds)
        except AccountingResourceError:
            # So much loss that no grid holds it; the search has to go on at larger noise.
            return math.inf

    low, high = _bracket(lambda sigma: upper(sigma, COARSE), target, smallest)
    low, high = _narrow(lambda sigma: upper(sigma, COARSE), target, low, high, 1e-3)
    # The finer bound is smaller: its root lies at or just below the coarse one.
    low = max(smallest, low * 0.997)
    while low > smallest and upper(low, FINE) <= target:
        high, low = low, max(smallest, low * 0.98)
    if upper(low, FINE) > target:
        low, high = _narrow(lambda sigma: upper(sigma, FINE), target, low, high, _TOLERANCE)
    else:
        high = low
    for _ in range(50):
        if upper(high, FINE, certified=True) <= target:
            return high
        high *= 1 + _TOLERANCE
    raise CalibrationError(
        f"epsilon={epsilon!r}: no noise multiplier near {high:.6g} could be certified at delta={delta!r}; "
        "raise epsilon or delta"
    )


def _bracket(upper: Callable[[float], float], target: float, smallest: float) -> tuple[float, float]:
    """Returns a pair of noise multipliers, the first missing the target and the second meeting it.

    Raises:
        CalibrationError: If the supported range holds no such pair.
    """
    high = max(1.0, smallest)
    if upper(high) > target:
        while True:
            low, high = high, 2 * high
            if high > _LARGEST:
                raise CalibrationError(
                    f"epsilon={target!r}: not reached by any noise multiplier up to {_LARGEST:g}; "
                    "raise epsilon or delta"
                )
            if upper(high) <= target:
                return low, high
    while True:
        if high <= smallest:
            raise CalibrationError(
                f"epsilon={target!r}: already met by the smallest supported noise multiplier {smallest:.4g}; "
                "lower epsilon, or use bound='best'"
            )
        low = max(smallest, high / 2)
        if upper(low) > target:
            return low, high
        high = low
