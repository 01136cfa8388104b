r"""The law of a Rademacher sketch, whose entries are +-1/sqrt(k): one bit each, and a tail that is known on grids only.

A spectrum's worst case in convex order is rank one for any random projection, so that the law needs only
``Q = (1/k) sum_j (r_j . u)^2`` for unit vectors u, where the r_j are k independent vectors of signs. With
``L(h) >= sup_u E exp(-h (r . u)^2)``, for every t and every s > 0,

    E (t - Q)_+ <= exp(s t - 1) L(s/k)^k / s                              y_+ <= exp(s y - 1) / s
    E (t - Q)_+ <= t - 1 + exp(-s t - 1) (1 - 2s/k)^(-k/2) / s            E Q = 1, and signs are sub-Gaussian
    E (t - Q)_+ <= (sqrt(2/k + (t-1)^2) + t - 1) / 2                      Scarf, Var Q <= 2/k

The smallest of these, convexified, is ``E (t - w)_+`` of a law w, because ``E (t - Q)_+`` is convex in t, with a slope
between 0 and 1. Every convex nonincreasing f is a mixture of functions (t - w)_+ and a constant, so that w dominates Q
in the order `Order.CONVEX_ALONE`.

For L let m be the largest u_i^2 and g standard normal.

* m <= 1/2: ``E exp(-h (r.u)^2) = E prod_i cos(sqrt(2h) u_i g)``, and Hoelder's inequality with exponents 1 / u_i^2
  bounds it by ``sup_{a >= 2} E |cos(sqrt(2h/a) g)|^a``.
* m >= 1/2: given the other signs, whose sum has the square V with mean v = 1 - m, it is E f(V) with
  ``f(V) = exp(-h (m + V)) cosh(2h sqrt(m V))``. A line above f on [0, 12], taken at v, bounds it (Jensen). Beyond 12,
  where f falls, the line may lie too low by its slope times V - 12, and ``E (V - 12)_+ <= 4 v exp(-6 / v)``
  (Hoeffding).

Both suprema, over a and over m, are taken on grids, and so is the line: hence ``certified = False``. Hoelder's
inequality with an exponent 1/m < 2 for the largest coordinate bounds the second case more tightly: taken where it is
the smaller one, it gives ``L = max((1 + 2h)^(-1/2), (1 + exp(-2h)) / 2)`` on the same grids, which is attained, and one
to five per cent less noise. It is left out: what is not certified keeps that margin.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from dprc_lightning.accounting import _validation
from dprc_lightning.accounting.law import FloatArray, Order, SensitivityLaw
from dprc_lightning.accounting.slack import CONVEX_ALONE_CHARGE, convex_limit
from dprc_lightning.errors import InvalidArgumentError

_SPENT = 0.99
"""Share of delta that infinite losses may take before the sketch is refused: the accountant cuts off a little too."""
_H = np.geomspace(1e-3, 1e4, 320)
"""Arguments of L: bound 1 is minimised over them."""
_TERMS = 200
"""Terms of the Fourier series of |cos|^a: the last are below 1e-17 for h >= 1e-3 and a <= 400."""
_HULL_END = 12.0
_HULL_ALLOWANCE = 4 * 0.5 * math.exp(-_HULL_END) / (_HULL_END - 0.5)
"""Slope of a line from at most 1 at v <= 1/2 to at least 0 at 12, times E (V - 12)_+ at its largest, v = 1/2."""


def cosine_moment(a: FloatArray, h: FloatArray) -> FloatArray:
    """E |cos(sqrt(2h/a) g)|^a, g standard normal: its Fourier series in the phase, each term averaged over g.

    Args:
        a: Exponents in [1, 400], shape [n].
        h: Arguments >= 1e-3, shape [m].

    Returns:
        The moments, shape [n, m].
    """
    a, h = a[:, None], h[None, :]
    coefficient, total = np.ones_like(a), np.ones((a.shape[0], h.shape[1]))
    for n in range(1, _TERMS):
        coefficient = coefficient * (a / 2 - n + 1) / (a / 2 + n)
        total += 2 * coefficient * np.exp(-4 * n * n * h / a)
    return np.exp(special.gammaln(a + 1) - 2 * special.gammaln(a / 2 + 1) - a * math.log(2)) * total


def _one_large_coordinate(m: float, h: FloatArray) -> FloatArray:
    """Smallest line above f on [0, 12] at v = 1 - m, the concave hull of f there; shape of ``h``."""

    def f(v: FloatArray) -> FloatArray:
        root, largest = np.sqrt(v), math.sqrt(m)
        return (np.exp(-np.outer(h, (root - largest) ** 2)) + np.exp(-np.outer(h, (root + largest) ** 2))) / 2

    v = 1.0 - m
    left = np.linspace(0.0, v, 40)
    right = np.unique(np.append(v + np.geomspace(1e-3, _HULL_END - v, 150), m))
    at_left, at_right = f(left)[:, :, None], f(right)[:, None, :]
    share = (v - left)[:, None] / (right[None, :] - left[:, None] + (right[None, :] == left[:, None]))
    return np.max(at_left + share * (at_right - at_left), axis=(1, 2)) + _HULL_ALLOWANCE


@lru_cache(maxsize=1)
def laplace_bound() -> tuple[FloatArray, FloatArray]:
    """L(h): how large E exp(-h (r . u)^2) can be over unit vectors u, on a grid of h; the same for every sketch.

    Returns:
        h and L(h), each of shape [n].
    """
    exponents = np.concatenate([np.linspace(2.0, 8.0, 61), np.geomspace(8.2, 400.0, 40)])
    spread = cosine_moment(exponents, _H).max(axis=0)
    # The limit a = infinity: many equal coordinates are Gaussian.
    spread = np.maximum(spread, (1 + 2 * _H) ** -0.5)
    large = [_one_large_coordinate(m, _H) for m in (0.5, 0.52, 0.56, 0.62, 0.7, 0.8, 0.9, 1.0)]
    return _H, np.minimum(np.maximum(spread, np.max(large, axis=0)), 1.0)


def integrated_cdf_bound(t: FloatArray, sketch_dim: int) -> FloatArray:
    """The smallest of the three bounds on E (t - Q)_+, before it is convexified.

    Args:
        t: Values > 0, shape [n].
        sketch_dim: k.

    Returns:
        Bounds, shape [n].
    """
    k, column = sketch_dim, t[:, None]
    h, bound = laplace_bound()
    low = np.exp(np.min(k * h * column - 1 + k * np.log(bound) - np.log(k * h), axis=1))
    h = np.geomspace(1e-4, 0.4999, 200)
    high = np.exp(np.min(-k * h * column - 1 - k / 2 * np.log1p(-2 * h) - np.log(k * h), axis=1)) + (t - 1)
    scarf = (np.hypot(math.sqrt(2 / k), t - 1) + (t - 1)) / 2
    return np.minimum(np.minimum(low, high), scarf)


@lru_cache(maxsize=64)
def _table(sketch_dim: int) -> tuple[FloatArray, FloatArray]:
    """Returns the atoms of the law, from zero on, and its cdf there, shape [n] each.

    Linear interpolation between the points of the grid stays above E (t - Q)_+, which is convex; its greatest convex
    minorant does too, and its slopes are the cdf. Beyond the grid E (t - Q)_+ rises at a slope of at most one.
    """
    top = 1 + 12 * math.sqrt(2 / sketch_dim) + 40 / sketch_dim
    t = np.unique(np.concatenate([np.geomspace(1e-4, 0.2, 300), np.linspace(0.2, top, 1600)]))
    x, y = np.append(0.0, t), np.append(0.0, integrated_cdf_bound(t, sketch_dim))
    hull: list[int] = []
    for i in range(x.size):
        while len(hull) > 1:
            a, b = hull[-2], hull[-1]
            if (y[b] - y[a]) * (x[i] - x[a]) < (y[i] - y[a]) * (x[b] - x[a]):
                break
            hull.pop()
        hull.append(i)
    slopes = np.diff(y[hull]) / np.diff(x[hull])
    return x[hull], np.append(np.clip(np.maximum.accumulate(slopes), 0.0, 1.0), 1.0)


def _atom_bins(atoms: FloatArray, mass: FloatArray, edges: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Returns masses and means of a discrete law in the bins (edges[i], edges[i + 1]]."""
    at = np.searchsorted(edges, atoms, side="left")
    inside = (at > 0) & (at < edges.size)
    count = edges.size - 1
    total = np.bincount(at[inside] - 1, weights=mass[inside], minlength=count).astype(np.float64)
    moment = np.bincount(at[inside] - 1, weights=(mass * atoms)[inside], minlength=count).astype(np.float64)
    with np.errstate(divide="ignore", invalid="ignore"):
        mean = np.where(total > 0, moment / total, edges[1:])
    return total, np.clip(mean, edges[:-1], edges[1:])


@dataclass(frozen=True)
class RademacherLaw(SensitivityLaw):
    r"""Rademacher sketch with ``sketch_dim = k`` columns of entries +-1/sqrt(k).

    Guarantee: for every record and every convex nonincreasing f, ``E f(n_hat^2 / ||g||^2) <= E f(w)``, by the bounds of
    this module, up to the suprema that they take on grids: not certified. ``cdf(0)`` is close to 2^-k, the probability
    with which the sketch really misses u = (1, 1) / sqrt(2) altogether: few columns are unusable.

    Attributes:
        sketch_dim: k, the number of columns really drawn.
    """

    sketch_dim: int
    order = Order.CONVEX_ALONE
    certified = False

    def __post_init__(self) -> None:
        _validation.integer("sketch_dim", self.sketch_dim, 1)

    def cdf(self, w: ArrayLike) -> FloatArray:
        """Returns the slope of the convexified bound on E (t - Q)_+ to the right of w."""
        atoms, cdf = _table(self.sketch_dim)
        at = np.searchsorted(atoms, np.asarray(w, dtype=np.float64), side="right") - 1
        return np.where(at < 0, 0.0, cdf[np.maximum(at, 0)])

    def bins(self, edges: FloatArray) -> tuple[FloatArray, FloatArray | None]:
        """Returns masses and means of the law's atoms, which lie on its own grid."""
        atoms, cdf = _table(self.sketch_dim)
        return _atom_bins(atoms, np.diff(cdf, prepend=0.0), edges)


@dataclass(frozen=True)
class SignPairLaw(SensitivityLaw):
    r"""A Rademacher sketch of u = (1, 1) / sqrt(2): ``w = 2 Bin(k, 1/2) / k``.

    Guarantee: ``(r . u)^2`` is 0 or 2 with probability 1/2 each, independently over the k columns. A record whose
    gradient has rank one and two equal entries along the sketched axis meets exactly this law, so that it gives a lower
    bound on epsilon. It is one record's law and bounds no other's.

    Attributes:
        sketch_dim: k, the number of columns really drawn.
    """

    sketch_dim: int
    certified = True
    attained = True

    def __post_init__(self) -> None:
        _validation.integer("sketch_dim", self.sketch_dim, 1)

    def _atoms(self) -> tuple[FloatArray, FloatArray]:
        count = np.arange(self.sketch_dim + 1, dtype=np.float64)
        k = float(self.sketch_dim)
        log_choose = special.gammaln(k + 1) - special.gammaln(count + 1) - special.gammaln(k - count + 1)
        return 2 * count / k, np.exp(log_choose - k * math.log(2))

    def cdf(self, w: ArrayLike) -> FloatArray:
        """Returns the binomial cdf at k w / 2."""
        atoms, mass = self._atoms()
        at = np.searchsorted(atoms, np.asarray(w, dtype=np.float64), side="right") - 1
        return np.where(at < 0, 0.0, np.minimum(np.cumsum(mass), 1.0)[np.maximum(at, 0)])

    def bins(self, edges: FloatArray) -> tuple[FloatArray, FloatArray | None]:
        """Returns masses and means of the atoms."""
        return _atom_bins(*self._atoms(), edges)


def require_enough_columns(
    sketch_dim: int, noise_multiplier: float, sample_rate: float, steps: int, delta: float
) -> None:
    """Refuses a sketch that misses norms so often that no finite epsilon can be given at this delta.

    The mass of the law below 1 / (12 sigma^2), and what the convex order charges for it, are infinite losses.

    Args:
        sketch_dim: k.
        noise_multiplier: sigma; more noise can only help.
        sample_rate: q.
        steps: Number of steps.
        delta: The target delta.

    Raises:
        InvalidArgumentError: If the infinite losses alone reach delta.
    """
    missed = float(RademacherLaw(sketch_dim).cdf(convex_limit(noise_multiplier)))
    per_step = min(1.0, (1 + CONVEX_ALONE_CHARGE) * sample_rate * missed)
    charge = -math.expm1(steps * math.log1p(-per_step)) if per_step < 1 else 1.0
    if charge >= delta * _SPENT:
        raise InvalidArgumentError(
            "sketch_dim",
            sketch_dim,
            f"too few columns for projection='rademacher': its sketch can miss a norm with probability {missed:.2g} at "
            f"noise_multiplier={noise_multiplier:.4g}, an infinite loss that costs {charge:.2g} in {steps} steps "
            f"and leaves nothing of delta={delta:.2g}; raise sketch_dim, or use projection='gaussian'",
        )
