r"""The paper's envelope: the largest probability that a Gaussian sketch under-estimates a squared norm.

Guarantee: let the X_i be independent chi2_k / k and l a point of the simplex with d entries. The supremum over l of
P(sum_i l_i X_i <= t) is attained

* for t <= 1 (and, without bound on d, for t < 1 with exact layers allowed) at a single weight: chi2_k / k;
* for 1 < t < x_+ at one large weight and d - 1 equal ones, (a, b, ..., b);
* for t >= x_+ at equal weights: chi2_{dk} / (dk),

where x_+ lies in [1, 2] and depends on k and d (arXiv 2605.24879). The part t <= 1 in outline: at a maximiser with two
or more weights, stationarity makes the densities g_i at t of the sum with one more exponential of scale l_i equal; size
bias, sum_i l_i g_i(t) = t f(t), makes them smaller than the sum's own density f(t), hence rising at t; unimodality then
contradicts stationarity or the second-order condition. Without a bound on d the supremum for t >= 1 is one: a layer
with an exact norm, or infinitely many small weights, has no variance.
"""

import math
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from dprc_lightning.accounting import _validation
from dprc_lightning.accounting.law import FloatArray, GaussianEnvelopeLaw

_PANELS, _PANEL_NODES = 24, 32
_SCAN = 96
"""Weights tried before the best one is refined: the maximum over a is smooth, its number of humps at most two."""
_TIE = 1e-11
"""Two probabilities closer than this count as equal: the quadrature's own error."""


def envelope_cdf(t: ArrayLike, k: int, d: int | None = None) -> Any:
    """Largest P(n_hat^2 / ||g||^2 <= t) over all gradients.

    For plots and comparisons: the accountant uses the limit without ``d``, which is larger and holds for exact layers
    too; from d = 2048 on the two differ by less than a thousandth of the noise multiplier. With ``d`` and t between 1
    and the crossover the maximum over the large weight is found numerically.

    Args:
        t: Values, any shape; not NaN.
        k: Number of columns of the sketch, >= 1.
        d: Number of eigenvalues a gradient may have, >= 1, when no layer's norm is exact; None: no limit, and exact
            layers are allowed.

    Returns:
        Probabilities, float64, of the shape of ``t``; a float for a scalar.

    Raises:
        InvalidArgumentError: If k or d is no integer >= 1 or t holds a NaN.
    """
    k = _validation.integer("k", k, 1)
    values = _validation.numbers("t", t, "must be a number or an array of numbers, not NaN")
    # From 1e6 on every probability is one.
    clipped = np.clip(values, 0.0, 1e6)
    if d is None:
        out: FloatArray = np.asarray(GaussianEnvelopeLaw(k).cdf(clipped))
        return float(out) if out.ndim == 0 else out
    d = _validation.integer("d", d, 1)
    out = np.asarray(special.gammainc(k / 2, k / 2 * clipped))
    if d > 1:
        out = np.where(clipped >= crossover(k, d), special.gammainc(d * k / 2, d * k / 2 * clipped), out)
        between = (clipped > 1.0) & (clipped < crossover(k, d))
        out[between] = [_largest(float(value), k, d) for value in clipped[between]]
    return float(out) if out.ndim == 0 else out


@lru_cache(maxsize=256)
def crossover(k: int, d: int) -> float:
    """x_+: from here on equal weights are the worst spectrum; by bisection in [1, 2].

    Args:
        k: Number of columns of the sketch, >= 1.
        d: Number of eigenvalues, >= 2.

    Returns:
        x_+, at least 1 + 2 / (dk), below which equal weights are not even a local maximum.
    """
    low, high = 1.0 + 2.0 / (d * k), 2.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        if _largest(middle, k, d) > float(special.gammainc(d * k / 2, d * k / 2 * middle)) + _TIE:
            low = middle
        else:
            high = middle
    return high


def _largest(t: float, k: int, d: int) -> float:
    """Returns the maximum over a of P(a X_1 + b (X_2 + ... + X_d) <= t), b = (1 - a) / (d - 1), a in [1/d, 1]."""
    weights = np.geomspace(1.0 / d, 1.0, _SCAN)
    values = [_two_weights(t, float(a), k, d) for a in weights]
    best = int(np.argmax(values))
    low, high = float(weights[max(best - 1, 0)]), float(weights[min(best + 1, _SCAN - 1)])
    ratio = (math.sqrt(5) - 1) / 2
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    at_left, at_right = _two_weights(t, left, k, d), _two_weights(t, right, k, d)
    while high - low > 1e-7 * high:  # golden section
        if at_left > at_right:
            high, right, at_right = right, left, at_left
            left = high - ratio * (high - low)
            at_left = _two_weights(t, left, k, d)
        else:
            low, left, at_left = left, right, at_right
            right = low + ratio * (high - low)
            at_right = _two_weights(t, right, k, d)
    return max(values[best], at_left, at_right)


def _two_weights(t: float, a: float, k: int, d: int) -> float:
    """Returns P(a X_1 + b (X_2 + ... + X_d) <= t) by quadrature over the narrower of the two summands."""
    b = (1.0 - a) / (d - 1)
    if b <= 0.0:
        return float(special.gammainc(k / 2, k / 2 * t))
    parts = [(a * 2 / k, k / 2), (b * 2 / k, (d - 1) * k / 2)]
    # The distribution function of the wider summand is smooth on the scale of the narrower one's density.
    (scale, shape), (other_scale, other_shape) = sorted(parts, key=lambda part: part[0] * math.sqrt(part[1]))
    limit = t / scale
    ends = [float(special.gammaincinv(shape, 1e-17)), float(special.gammainccinv(shape, 1e-17))]
    # y = limit sin^2(angle) makes the integrand smooth at both ends for every number of degrees of freedom.
    angles = [math.asin(math.sqrt(min(end / limit, 1.0))) for end in ends]
    nodes, node_weights = _rule()
    angle = angles[0] + (angles[1] - angles[0]) * nodes
    y = limit * np.sin(angle) ** 2
    # A tiny y underflows to zero in the first node at most; its density is negligible.
    with np.errstate(divide="ignore"):
        log_density = special.xlogy(shape - 1, y) - y - special.gammaln(shape)
    jacobian = 2 * limit * np.sin(angle) * np.cos(angle)
    rest = special.gammainc(other_shape, np.maximum(t - scale * y, 0.0) / other_scale)
    return float((angles[1] - angles[0]) * np.sum(node_weights * np.exp(log_density) * jacobian * rest))


@lru_cache(maxsize=1)
def _rule() -> tuple[FloatArray, FloatArray]:
    """Returns nodes and weights of a composite Gauss-Legendre rule on [0, 1]."""
    nodes, weights = np.polynomial.legendre.leggauss(_PANEL_NODES)
    starts = np.arange(_PANELS)[:, None]
    return ((starts + (nodes + 1) / 2) / _PANELS).ravel(), np.tile(weights / (2 * _PANELS), _PANELS)
