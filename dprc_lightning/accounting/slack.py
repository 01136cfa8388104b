r"""The slack that a law in convex order pays for the region where the divergence is not convex.

Guarantee: let ``h(w) = delta_a(c / sqrt(w))``, c = 1 / sigma, X the law's w and Q the true one. ``g = -h'`` is positive
and, for sigma > 12^(-1/2), increasing below its mode (which is below c^2/12 < 1) and decreasing above. With
``D(t) = int_0^t (F_Q - F_X)``: D' <= 0 for t < 1 (the stochastic bound) and D <= 0 everywhere, D(inf) = 0 (convex
order, equal means). Let w* below the mode have g(w*) = g(1). Then

    E h(Q) - E h(X) = int g D' <= int_0^1 min(g, g(1)) D' - g(1) D(1) <= g(1) int_0^{w*} F_X =: at most B.

w* is largest at a = 0, where it is w0, and g(1) <= c / (2 sqrt(2 pi)), so that for all a at once

    B <= c / (2 sqrt(2 pi)) * int_0^{w0} F_X(w) dw,    w0 < c^2/12 the root of w^(-3/2) exp(-c^2/(8w)) = exp(-c^2/8).

For orders e >= 0 the step's curve exceeds that of X by at most q B. Replacing delta(e) by ``r + (1 - r) delta(e)`` with
``r = q B / (1 - delta(0))`` covers that, and by ``delta_add(e) = 1 - exp(e) + exp(e) delta_remove(-e)`` it covers the
negative orders when it is done in both directions. The replaced pair is again a pair of distributions: with probability
r the loss is infinite.
"""

import math

from dprc_lightning.accounting.law import SensitivityLaw

CONVEX_MIN_NOISE_MULTIPLIER = 12.0**-0.5
"""The convex order is proved for noise multipliers from here on: below, w = 1 is outside the convex region."""


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
        law: A law in convex order.
        noise_multiplier: sigma >= 12^(-1/2).
        sample_rate: q.
        delta_at_zero: The step's curve under the law at order zero, or an upper bound on it.

    Returns:
        r, in units of delta.
    """
    return min(1.0, sample_rate * divergence_slack(law, noise_multiplier) / (1.0 - delta_at_zero))
