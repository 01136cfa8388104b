r"""Hockey-stick curves of one step: delta as a function of epsilon, for removing and for adding a record.

Guarantee: a record is drawn with probability q. Its clipped gradient moves the sum by at most ``C * Z``, and
N(0, sigma^2 C^2) is added. The randomness behind Z is public and the same under both hypotheses, so that the step's
hockey-stick divergence is the average over Z of that of a subsampled Gaussian with sensitivity ``mu = Z / sigma``,
separately in each direction. A pair of distributions that dominates this curve for every real epsilon and per direction
dominates the step under adaptive composition (Zhu, Dong and Wang, arXiv 2106.08567). The mixture of Gaussians in
which Z is hidden is NOT such a pair: the sums of the other records depend on the same randomness.
"""

import math

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from dprc_lightning.accounting.discretization import Nodes
from dprc_lightning.accounting.law import FloatArray

_CHUNK = 1 << 19
"""Elements of the (epsilon, Z) table that are held at once: 4 MiB per temporary."""


def gaussian_hockey_stick(a: ArrayLike, mu: ArrayLike) -> FloatArray:
    """Hockey-stick divergence between N(mu, 1) and N(0, 1) at order exp(a).

    ``delta_a(mu) = Phi(mu/2 - a/mu) - exp(a) Phi(-mu/2 - a/mu)``, Balle and Wang, arXiv 1805.06530.

    Args:
        a: Real numbers, any shape; -inf gives 1.
        mu: Distances > 0, a shape that broadcasts with ``a``.

    Returns:
        The divergence, float64, in [0, 1], of the broadcast shape.
    """
    a, mu = np.broadcast_arrays(np.asarray(a, dtype=np.float64), np.asarray(mu, dtype=np.float64))
    ratio = a / mu
    near, far = ratio - mu / 2, ratio + mu / 2
    # exp(a) Phi(-far) = phi(near) * Mills(far): neither factor over- or underflows before the product matters.
    with np.errstate(under="ignore"):
        second = np.exp(-0.5 * near * near) * (0.5 * special.erfcx(np.maximum(far, 0.0) * math.sqrt(0.5)))
        left = far < 0
        if np.any(left):
            second[left] = np.exp(a[left]) * special.ndtr(-far[left])
    return np.maximum(special.ndtr(-near) - second, 0.0)


def _averaged(order: FloatArray, nodes: Nodes, noise_multiplier: float) -> FloatArray:
    """Returns E_Z of `gaussian_hockey_stick` at each order, shape [n]; Z = infinity contributes its mass."""
    out = np.empty_like(order)
    mu = nodes.z / noise_multiplier
    rows = max(1, _CHUNK // max(1, mu.size))
    for start in range(0, order.size, rows):
        part = order[start : start + rows]
        out[start : start + rows] = gaussian_hockey_stick(part[:, None], mu[None, :]) @ nodes.mass
    return np.minimum(out + nodes.infinity, 1.0)


def remove_curve(epsilon: FloatArray, nodes: Nodes, noise_multiplier: float, sample_rate: float) -> FloatArray:
    """Hockey-stick curve of a step for removing the record: with it against without it.

    ``q E_Z delta_{e'}(Z / sigma)`` with ``exp(e') = 1 + (exp(e) - 1) / q`` where exp(e) > 1 - q, else 1 - exp(e).

    Args:
        epsilon: Orders e, any sign, at most 600, shape [n].
        nodes: A discrete law of Z.
        noise_multiplier: sigma.
        sample_rate: q.

    Returns:
        delta(e), float64, shape [n].
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        order = np.log1p(np.maximum(np.expm1(epsilon) / sample_rate, -1.0))
    if sample_rate == 1.0:
        order = epsilon
    inside = order > -np.inf
    out = -np.expm1(np.minimum(epsilon, 0.0))
    out[inside] = sample_rate * _averaged(order[inside], nodes, noise_multiplier)
    # Just above log(1 - q) the divergence cannot be below the trivial 1 - exp(e); rounding must not put it there.
    return np.maximum(out, -np.expm1(np.minimum(epsilon, 0.0)))


def add_curve(epsilon: FloatArray, nodes: Nodes, noise_multiplier: float, sample_rate: float) -> FloatArray:
    """Hockey-stick curve of a step for adding the record: without it against with it.

    ``(1 - exp(e)(1-q)) E_Z delta_{e''}(Z / sigma)`` with ``exp(e'') = exp(e) q / (1 - exp(e)(1-q))`` where
    exp(e)(1-q) < 1, else 0. The loss is bounded by -log(1-q), also where Z is infinite.

    Args:
        epsilon: Orders e, any sign, at most 600, shape [n].
        nodes: A discrete law of Z.
        noise_multiplier: sigma.
        sample_rate: q.

    Returns:
        delta(e), float64, shape [n].
    """
    log_rest = math.log1p(-sample_rate) if sample_rate < 1 else -math.inf
    share = -np.expm1(epsilon + log_rest)
    inside = share > 0
    order = epsilon[inside] + math.log(sample_rate) - np.log(share[inside])
    out = np.zeros_like(share)
    out[inside] = share[inside] * _averaged(order, nodes, noise_multiplier)
    return np.maximum(out, -np.expm1(np.minimum(epsilon, 0.0)))
