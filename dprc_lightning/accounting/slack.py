r"""The slack that a law in convex order pays for the region where the divergence is not convex.

`Order.CONVEX`. Guarantee: let ``h(w) = delta_a(c / sqrt(w))``, c = 1 / sigma, X the law's w and Q the true one.
``g = -h'`` is positive and, for sigma > 12^(-1/2), increasing below its mode (which is below c^2/12 < 1) and decreasing
above. With ``D(t) = int_0^t (F_Q - F_X)``: D' <= 0 for t < 1 (the stochastic bound) and D <= 0 everywhere, D(inf) = 0
(convex order, equal means). Let w* below the mode have g(w*) = g(1). Then

    E h(Q) - E h(X) = int g D' <= int_0^1 min(g, g(1)) D' - g(1) D(1) <= g(1) int_0^{w*} F_X =: at most B.

w* is largest at a = 0, where it is w0, and g(1) <= c / (2 sqrt(2 pi)), so that for all a at once

    B <= c / (2 sqrt(2 pi)) * int_0^{w0} F_X(w) dw,    w0 < c^2/12 the root of w^(-3/2) exp(-c^2/(8w)) = exp(-c^2/8).

For orders e >= 0 the step's curve exceeds that of X by at most q B. Replacing delta(e) by ``r + (1 - r) delta(e)`` with
``r = q B / (1 - delta(0))`` covers that, and by ``delta_add(e) = 1 - exp(e) + exp(e) delta_remove(-e)`` it covers the
negative orders when it is done in both directions. The replaced pair is again a pair of distributions: with probability
r the loss is infinite.

`Order.CONVEX_ALONE`. Guarantee, for every sigma: let w0 = c^2/12, from where on h is convex, and let psi be h there
and, below, the line through (w0, h(w0)) with slope ``-sup_{s < w0} (h(s) - h(w0)) / (w0 - s)``. psi is convex,
nonincreasing and at least h. With m0 = P(X <= w0), and that mass moved to w = 0, where h = 1,

    E h(Q) <= E psi(Q) <= E psi(X) <= E h(X moved) + m0 (psi(0) - 1)_+
    psi(0) - 1 = sup_{0 < theta < 1} (theta G(sqrt(12)) - G(sqrt(12 / theta))) / (1 - theta),   G(mu) = 1 - delta_a(mu)

so that only convex nonincreasing functions matter, and no mean. The supremum depends on a alone. Orders e >= 0 of
either direction need a >= 0 only, and over those it is below 0.303: a subdivision of the (a, theta) plane with a bound
on every box (G rises in a and falls in mu) proves it, and is done in the tests. Its value is 0.3012, at a = 7.4 and
theta = 0.40. So the curve is charged with ``r = 0.303 q m0 / (1 - delta(0))`` as above, delta(0) under the moved law.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from dprc_lightning.accounting.law import FloatArray, Order, SensitivityLaw
from dprc_lightning.errors import InvalidArgumentError

CONVEX_MIN_NOISE_MULTIPLIER = 12.0**-0.5
"""The convex order is proved for noise multipliers from here on: below, w = 1 is outside the convex region."""

CONVEX_ALONE_CHARGE = 0.303
"""(psi(0) - 1)_+ over all a >= 0, rounded up."""


@dataclass(frozen=True)
class _Moved(SensitivityLaw):
    """A law whose mass up to a limit is moved to w = 0, that is to Z = infinity.

    Guarantee: Z only grows. Used in place of a law in the order `Order.CONVEX_ALONE`, which is charged separately.
    """

    law: SensitivityLaw
    limit: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "certified", self.law.certified)
        object.__setattr__(self, "atoms", tuple(atom for atom in self.law.atoms if atom > self.limit))

    def cdf(self, w: ArrayLike) -> FloatArray:
        """Returns the law's cdf, below the limit the cdf at the limit."""
        return self.law.cdf(np.maximum(np.asarray(w, dtype=np.float64), self.limit))

    def bins(self, edges: FloatArray) -> tuple[FloatArray, FloatArray | None]:
        """Returns masses and means of the law beyond the limit."""
        mass, mean = self.law.bins(np.maximum(edges, self.limit))
        if mean is None:
            return mass, None
        return mass, np.clip(mean, edges[:-1], edges[1:])


def convex_limit(noise_multiplier: float) -> float:
    """c^2/12: from this w on the divergence is convex in w, at every order.

    Args:
        noise_multiplier: sigma > 0.

    Returns:
        1 / (12 sigma^2).
    """
    return 1.0 / (12.0 * noise_multiplier**2)


def law_to_average(law: SensitivityLaw, noise_multiplier: float) -> SensitivityLaw:
    """The law over which a step's curve is averaged; its slack comes on top.

    Args:
        law: A law of w.
        noise_multiplier: sigma > 0.

    Returns:
        The law itself; in the order `Order.CONVEX_ALONE` with its mass below the convex region at Z = infinity.
    """
    return _Moved(law, convex_limit(noise_multiplier)) if law.order is Order.CONVEX_ALONE else law


def tail_limit(noise_multiplier: float) -> float:
    """w0, the limit of the integral above, by bisection and rounded up.

    Args:
        noise_multiplier: sigma >= 12^(-1/2).

    Returns:
        A w0 at least as large as the root, at most c^2/12.
    """
    c2 = noise_multiplier**-2
    low, high = 1e-12 * c2, c2 / 12

    def excess(w: float) -> float:
        return -1.5 * math.log(w) - c2 / (8 * w) + c2 / 8

    if excess(high) <= 0:  # sigma = 12^(-1/2) up to rounding: the root is double, at the mode
        return high
    for _ in range(200):
        middle = (low + high) / 2
        if excess(middle) < 0:
            low = middle
        else:
            high = middle
    return high


def divergence_slack(law: SensitivityLaw, noise_multiplier: float) -> float:
    """B: by how much, at most, a record's averaged Gaussian divergence exceeds that of the law, at any order.

    Args:
        law: A law in convex order.
        noise_multiplier: sigma >= 12^(-1/2).

    Returns:
        B, in units of delta.
    """
    factor = 1.0 / (noise_multiplier * 2.0 * math.sqrt(2.0 * math.pi))
    return factor * law.lower_tail_integral(tail_limit(noise_multiplier))


def step_slack(law: SensitivityLaw, noise_multiplier: float, sample_rate: float, delta_at_zero: float) -> float:
    """r: the probability per step that is charged as an infinite loss.

    Args:
        law: A law of w.
        noise_multiplier: sigma; at least 12^(-1/2) for a law in the order `Order.CONVEX`.
        sample_rate: q.
        delta_at_zero: The step's curve at order zero under `law_to_average`, or an upper bound on it.

    Returns:
        r, in units of delta; zero for a law in stochastic order.

    Raises:
        InvalidArgumentError: If the noise is too small for the proof of a law in convex order.
    """
    if law.order is Order.STOCHASTIC:
        return 0.0
    if law.order is Order.CONVEX_ALONE:
        excess = CONVEX_ALONE_CHARGE * float(law.cdf(convex_limit(noise_multiplier)))
    elif noise_multiplier < CONVEX_MIN_NOISE_MULTIPLIER:
        remedy = f"a law in convex order is proved from {CONVEX_MIN_NOISE_MULTIPLIER:.4f} on; use its stochastic bound"
        raise InvalidArgumentError("noise_multiplier", noise_multiplier, remedy)
    else:
        excess = divergence_slack(law, noise_multiplier)
    if delta_at_zero >= 1.0:
        return 1.0
    return min(1.0, sample_rate * excess / (1.0 - delta_at_zero))
