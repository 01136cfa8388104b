r"""Discrete laws of Z between which the hockey-stick curve of a step is bracketed.

As a function of ``w = 1 / Z^2`` the Gaussian divergence ``h(w) = delta_a(c / sqrt(w))``, c = 1 / sigma, is decreasing,
with ``-h'(w) = (c/2) w^(-3/2) phi(c / (2 sqrt(w)) - a sqrt(w) / c)``. The logarithmic derivative of -h' is
``-3/(2w) + c^2/(8 w^2) - a^2/(2 c^2)``, negative for w > c^2/12: h is convex on [c^2/12, inf) for every real a.

Guarantee: w is cut into bins. Upper law: where h is convex, a bin's mass goes to its two ends so that the bin's mean is
kept (a chord lies above a convex function), elsewhere to the end with the larger Z. Lower law: where h is convex, the
mass goes to the bin's mean (Jensen), elsewhere to the end with the smaller Z. So the average of h over the upper
(lower) law bounds the true one from above (below) for every a at once.
"""

from dataclasses import dataclass

import numpy as np

from dprc_lightning.accounting.law import FloatArray, SensitivityLaw

_FINER = 8
"""How much narrower the bins are where their mass is rounded to one end."""

_MOST = 3
"""At most so many times the number of bins in either region: a wide tail does not deserve more."""

_UPPER_TAIL = 1e-12
"""Mass of large w (small Z, where privacy is best) that is lumped rather than resolved."""


@dataclass(frozen=True)
class Nodes:
    """A discrete law of Z.

    Attributes:
        z: Finite values of Z, shape [n], float64.
        mass: Their probabilities, shape [n], float64.
        infinity: P(Z = infinity).
    """

    z: FloatArray
    mass: FloatArray
    infinity: float = 0.0


def _quantile_edge(law: SensitivityLaw, probability: float) -> float:
    """Returns a w with cdf(w) <= probability, within a relative 1e-12 of the largest: bisection on log w."""
    low, high = -690.0, 690.0
    for _ in range(64):
        middle = (low + high) / 2
        if float(law.cdf(np.exp(middle))) <= probability:
            low = middle
        else:
            high = middle
    return float(np.exp(low))


def _edges(law: SensitivityLaw, noise_multiplier: float, sliver: float, bins: int) -> tuple[FloatArray, float]:
    """Returns bin edges of w, increasing, and the edge of the convex region."""
    low = _quantile_edge(law, sliver + law.mass_at_infinity)
    high = _quantile_edge(law, 1.0 - _UPPER_TAIL) * (1 + 1e-9)
    convex_from = 1.0 / (12.0 * noise_multiplier**2)
    high = max([high, *law.atoms])
    split = min(max(convex_from, low), high)
    density = bins / np.log(high / low)
    parts = [np.array([low, split, high])]
    # Rounding to one end costs the first order of the bin's width, keeping the mean only the second.
    for start, stop, factor in ((low, split, _FINER), (split, high, 1)):
        if stop > start:
            count = min(int(np.ceil(factor * density * np.log(stop / start))), _MOST * bins)
            parts.append(np.geomspace(start, stop, count + 1)[1:-1])
    for atom in law.atoms:
        parts.append(np.array([float(np.nextafter(atom, 0.0)), atom]))
    edges = np.unique(np.concatenate(parts))
    return edges, convex_from


def upper_nodes(law: SensitivityLaw, noise_multiplier: float, sliver: float, bins: int) -> Nodes:
    """A discrete law whose hockey-stick average is at least that of ``law``, for every order.

    Args:
        law: The law of w.
        noise_multiplier: sigma; it decides where the divergence is convex in w.
        sliver: Probability of the largest Z that may be moved to infinity.
        bins: Number of bins.

    Returns:
        The law; its masses and ``infinity`` add up to one.
    """
    if sliver + law.mass_at_infinity >= 1.0 - _UPPER_TAIL:
        # Nothing is left to cut into bins.
        return Nodes(np.ones(1), np.zeros(1), 1.0)
    edges, convex_from = _edges(law, noise_multiplier, sliver, bins)
    mass, mean = law.bins(edges)
    low, high = edges[:-1], edges[1:]
    far = np.zeros_like(mass)
    if mean is not None:
        # Zero where h is not convex: the whole bin is rounded to its larger Z.
        far = np.where(low >= convex_from, np.clip((mean - low) / (high - low), 0.0, 1.0), 0.0)
    weights = np.zeros_like(edges)
    weights[:-1] += mass * (1.0 - far)
    weights[1:] += mass * far
    infinity = float(law.cdf(edges[0]))
    weights[-1] += max(0.0, 1.0 - float(law.cdf(edges[-1])))
    # What is then still missing, by rounding or by a law that forgets some of its mass, counts against the law.
    infinity += max(0.0, 1.0 - infinity - float(weights.sum()))
    keep = weights > 0
    return Nodes(1.0 / np.sqrt(edges[keep]), weights[keep], infinity)


def lower_nodes(law: SensitivityLaw, noise_multiplier: float, sliver: float, bins: int) -> Nodes:
    """A discrete law whose hockey-stick average is at most that of ``law``, for every order >= 0.

    The negative orders of one direction are the positive ones of the other (`divergence`).

    Args:
        law: The law of w.
        noise_multiplier: sigma; it decides where the divergence is convex in w.
        sliver: Probability of the largest Z that may be left out.
        bins: Number of bins.

    Returns:
        The law; its masses add up to at most one: what is left out counts as Z = 0.
    """
    if sliver + law.mass_at_infinity >= 1.0 - _UPPER_TAIL:
        return Nodes(np.ones(1), np.zeros(1))
    edges, convex_from = _edges(law, noise_multiplier, sliver, bins)
    mass, mean = law.bins(edges)
    low, high = edges[:-1], edges[1:]
    centre = high if mean is None else np.where(low >= convex_from, mean, high)
    keep = mass > 0
    return Nodes(1.0 / np.sqrt(centre[keep]), mass[keep])
