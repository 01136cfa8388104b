r"""The random sensitivity of a step, as a law that the accountant can average over.

A clipped step adds N(0, sigma^2 C^2) to a sum in which one record moves the result by at most ``C * Z``. With exact
norms Z = 1. With an estimated norm ``n_hat`` the factor ``min(C / n_hat, 1)`` lets a record through with norm at most
``C * Z``, where ``Z = ||g|| / n_hat``. Everything that privacy accounting needs to know about the estimator is the law
of Z, or of ``w = 1 / Z^2 = n_hat^2 / ||g||^2``, which has mean one for an unbiased estimate.

`SensitivityLaw` is the extension point: whatever else has Gaussian noise and a random, data-independent scale plugs in
here.
"""

import abc
import enum
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

from dprc_lightning.accounting import _validation
from dprc_lightning.errors import InvalidArgumentError

FloatArray = NDArray[np.float64]


class Order(enum.Enum):
    """The sense in which a law dominates what any record can meet.

    An enum, because each sense is accounted for by a proof of its own: a further one needs its own.
    """

    STOCHASTIC = "stochastic"
    """For every record and every t, P(n_hat^2 / ||g||^2 <= t) <= cdf(t). Used as it is."""

    CONVEX = "convex"
    """The law has mean one, ``E f(n_hat^2 / ||g||^2) <= E f(w)`` for every record and every convex f, and the
    stochastic bound above holds for t < 1. Pays the slack of `dprc_lightning.accounting.slack`."""

    CONVEX_ALONE = "convex_alone"
    """``E f(n_hat^2 / ||g||^2) <= E f(w)`` for every record and every convex nonincreasing f; the law's mean may be
    smaller than one, and nothing is known about P(n_hat^2 / ||g||^2 <= t). Its mass below 1 / (12 sigma^2) counts as
    Z = infinity, and it pays a larger slack (`dprc_lightning.accounting.slack`)."""


class SensitivityLaw(abc.ABC):
    r"""A law of ``w = 1 / Z^2``, where ``C * Z`` bounds what one record adds to the sum of a step.

    Guarantee: the accountant's upper bounds hold for a mechanism if, for every record and given everything that is
    revealed about the estimator, the law dominates ``n_hat^2 / ||g||^2`` in the declared `order`, and the estimator's
    randomness is fresh at each step and independent of parameters, batch and noise. That is for the author of the law
    to prove; ``certified = True`` says that it was proved rather than observed, and reaches the accountant's answers.

    A subclass must define `cdf`. It should define `bins` if it knows means, which makes the bounds tighter. Give it to
    a `StepEvent`, which looks for contradictions in it (`dprc_lightning.accounting.own_law`).

    Attributes:
        order: The sense of domination.
        certified: Whether the domination is proved, with no supremum taken over a grid or a sample.
        attained: Whether some real record attains the law, so that it also gives a lower bound on epsilon.
        atoms: The values of w > 0 that have positive probability.
    """

    order: Order = Order.STOCHASTIC
    certified: bool = False
    attained: bool = False
    atoms: tuple[float, ...] = ()

    @abc.abstractmethod
    def cdf(self, w: ArrayLike) -> FloatArray:
        """P(1 / Z^2 <= w).

        Args:
            w: Values >= 0, any shape.

        Returns:
            Probabilities, float64, same shape. ``cdf(0)`` is the mass at Z = infinity.
        """

    @property
    def mass_at_infinity(self) -> float:
        """P(Z = infinity): the probability that the norm estimate misses the record altogether."""
        return float(self.cdf(0.0))

    def bins(self, edges: FloatArray) -> tuple[FloatArray, FloatArray | None]:
        """Masses of ``(edges[i], edges[i + 1]]`` and, where known, the mean of w within each.

        Args:
            edges: Increasing values > 0, shape [n + 1].

        Returns:
            Masses, shape [n], and conditional means of w, shape [n], or None if the law does not know them: each
            bin is then rounded to its worse end.
        """
        return np.maximum(np.diff(self.cdf(edges)), 0.0), None

    def lower_tail_integral(self, w: float) -> float:
        """Integral of the cdf from 0 to w, or an upper bound on it: what the slack of a convex order is made of.

        Args:
            w: The upper limit.

        Raises:
            InvalidArgumentError: If the law declares the convex order without providing this.
        """
        raise InvalidArgumentError("law", self, "a law in convex order must define lower_tail_integral")


@dataclass(frozen=True)
class ExactLaw(SensitivityLaw):
    """Exact per-record norms: Z = 1.

    Guarantee: with the exact norm the clipped record has norm ``min(C, ||g||) <= C`` (Abadi et al., arXiv 1607.00133).
    Attained by every record whose gradient is at least as long as C.
    """

    order = Order.STOCHASTIC
    certified = True
    attained = True
    atoms = (1.0,)

    def cdf(self, w: ArrayLike) -> FloatArray:
        """Returns zero below one, one from there on."""
        return (np.asarray(w, dtype=np.float64) >= 1.0).astype(np.float64)


def _require_sketch_dim(sketch_dim: Any) -> None:
    _validation.integer("sketch_dim", sketch_dim, 1)


@dataclass(frozen=True)
class GaussianConvexLaw(SensitivityLaw):
    r"""Gaussian sketch with ``sketch_dim = k`` columns: ``Z = sqrt(k / chi2_k)``.

    Guarantee: a Gaussian sketch P with k columns and entries N(0, 1/k) estimates a squared norm with
    ``w = l_0 + sum_i l_i X_i``, where l is the normalised spectrum of the record's gradient (l_0: the share of the
    layers whose norm is exact) and the X_i are chi2_k / k. For convex f,
    ``f(l_0 + sum l_i X_i) <= l_0 f(1) + sum l_i f(X_i)`` and ``f(1) <= E f(X)``, so ``E f(w) <= E f(chi2_k / k)`` for
    every spectrum. For t < 1 also P(w <= t) <= P(chi2_k / k <= t) (arXiv 2605.24879). A record whose gradient has rank
    one in one sketched layer attains it, so that no tighter law exists for this estimator while P is public.

    Attributes:
        sketch_dim: k, the number of columns really drawn.
    """

    sketch_dim: int
    order = Order.CONVEX
    certified = True
    attained = True

    def __post_init__(self) -> None:
        _require_sketch_dim(self.sketch_dim)

    def cdf(self, w: ArrayLike) -> FloatArray:
        """Returns the regularised incomplete gamma function P(k / 2, k w / 2)."""
        half = self.sketch_dim / 2
        return np.asarray(special.gammainc(half, half * np.asarray(w, dtype=np.float64)), dtype=np.float64)

    def bins(self, edges: FloatArray) -> tuple[FloatArray, FloatArray | None]:
        """Returns masses and means: E[w; w <= t] is the cdf of chi-square with k + 2 degrees of freedom at k t."""
        half = self.sketch_dim / 2
        x = half * edges
        mass, moment = _gamma_bins(half, x), _gamma_bins(half + 1, x)
        with np.errstate(divide="ignore", invalid="ignore"):
            mean = np.where(mass > 0, moment / mass, edges[1:])
        return mass, np.clip(mean, edges[:-1], edges[1:])

    def lower_tail_integral(self, w: float) -> float:
        """Returns ``w F_k(w) - E[v; v <= w]``, with a relative allowance of 1e-9 for the cancellation."""
        half = self.sketch_dim / 2
        return float(w * special.gammainc(half, half * w) - special.gammainc(half + 1, half * w)) * (1 + 1e-9)


def _gamma_bins(shape: float, x: FloatArray) -> FloatArray:
    """Returns masses of a Gamma(shape) law between the points x, each difference taken in the smaller tail."""
    lower, upper = np.diff(special.gammainc(shape, x)), -np.diff(special.gammaincc(shape, x))
    return np.maximum(np.where(x[:-1] > shape, upper, lower), 0.0)


@dataclass(frozen=True)
class GaussianEnvelopeLaw(SensitivityLaw):
    r"""Gaussian sketch, the paper's dimension-free envelope: ``Z = max(1, sqrt(k / chi2_k))``.

    Guarantee: for every k >= 1 and t < 1 the supremum of P(n_hat^2 / ||g||^2 <= t) over all spectra, exact layers
    included, is attained at one single eigenvalue, where it is P(chi2_k / k <= t); for t >= 1 a layer with an exact
    norm gives probability one (arXiv 2605.24879). See `dprc_lightning.accounting.envelope`.

    Attributes:
        sketch_dim: k, the number of columns really drawn.
    """

    sketch_dim: int
    order = Order.STOCHASTIC
    certified = True
    atoms = (1.0,)

    def __post_init__(self) -> None:
        _require_sketch_dim(self.sketch_dim)

    def cdf(self, w: ArrayLike) -> FloatArray:
        """Returns the envelope: chi-square below one, one from there on."""
        w = np.asarray(w, dtype=np.float64)
        return np.where(w >= 1.0, 1.0, GaussianConvexLaw(self.sketch_dim).cdf(w))

    def bins(self, edges: FloatArray) -> tuple[FloatArray, FloatArray | None]:
        """Returns masses and means: those of the chi-square below one, and the atom at one."""
        mass, mean = GaussianConvexLaw(self.sketch_dim).bins(edges)
        return _with_atom_at_one(edges, self.cdf(edges), mass, mean)


def _with_atom_at_one(
    edges: FloatArray, cdf: FloatArray, mass: FloatArray, mean: FloatArray | None
) -> tuple[FloatArray, FloatArray | None]:
    """Returns the bins of a law whose mass above one is moved to one, where ``cdf`` is one."""
    # The discretisation puts the atom into a bin of its own, (largest float below 1, 1].
    above = edges[1:] >= 1.0
    mass = np.where(above, np.maximum(np.diff(cdf), 0.0), mass)
    return mass, None if mean is None else np.where(above, np.minimum(1.0, edges[1:]), mean)


@dataclass(frozen=True)
class EnvelopeOfLaw(SensitivityLaw):
    """The stochastic bound that a law in convex order contains: its cdf below one, and one from there on.

    Guarantee: `Order.CONVEX` promises P(n_hat^2 / ||g||^2 <= t) <= cdf(t) for t < 1; for t >= 1 the bound is trivial.
    No slack is paid and no noise multiplier is too small for it. For a Gaussian sketch it is `GaussianEnvelopeLaw`.

    Attributes:
        law: A law in convex order.
    """

    law: SensitivityLaw
    order = Order.STOCHASTIC

    def __post_init__(self) -> None:
        # The domination below one is as proved as the law's own.
        object.__setattr__(self, "certified", self.law.certified)
        object.__setattr__(self, "atoms", (*(atom for atom in self.law.atoms if atom < 1.0), 1.0))

    def cdf(self, w: ArrayLike) -> FloatArray:
        """Returns the law's cdf below one, one from there on."""
        w = np.asarray(w, dtype=np.float64)
        return np.where(w >= 1.0, 1.0, self.law.cdf(w))

    def bins(self, edges: FloatArray) -> tuple[FloatArray, FloatArray | None]:
        """Returns masses and means: those of the law below one, and the atom at one."""
        mass, mean = self.law.bins(edges)
        return _with_atom_at_one(edges, self.cdf(edges), mass, mean)
