r"""Hockey-stick divergences of a composed history, at many orders at once: delta as a function of epsilon.

Guarantee: each bound's composed pair of distributions dominates the history, separately in each direction and at every
real order e (see `privacy_loss`). So its divergence ``delta(e) = E (1 - exp(e - loss))_+``, an infinite loss counting
one, is an upper bound once what the composition may be off by is added (see `composition`), and so is the smallest of
several such bounds. For e >= 0 the larger of the two directions is the delta of (e, delta)-differential privacy.

An accurate composition is tilted towards one delta, so that several are made and the best is taken at each order. And
since ``H_e(P, Q) = 1 - exp(e) + exp(e) H_{-e}(Q, P)`` for any two distributions, each direction at a negative order is
also bounded by the other at the positive one.
"""

import math
from collections.abc import Iterable, Iterator

import numpy as np

from dprc_lightning.accounting.composition import Composed, Composer
from dprc_lightning.accounting.law import FloatArray
from dprc_lightning.accounting.privacy_loss import UpperBound
from dprc_lightning.errors import AccountingResourceError

LARGEST_ORDER = 700.0
"""exp(700) is the last comfortable double; the divergence at a larger order is at most the one here."""

_FIRST_AIM, _AIM_RATIO = 0.1, 1e-3
"""The deltas that compositions aim at, down to that of the bound: each is accurate to a millionth of its own."""
_EPS = float(np.finfo(np.float64).eps)


class _Curve:
    """One direction of one bound: a composed loss on consecutive grid points, ready to be evaluated."""

    def __init__(self, composed: Composed) -> None:
        # Slow to import (half a second): `dprc calibrate --help` must not pay for it.
        from scipy import signal

        self._composed, self._interval, self._first = composed, composed.interval, int(composed.pmf.index[0])
        # A negative mass is rounding; an upper bound takes it as zero.
        mass = np.maximum(composed.pmf.mass, 0.0)[::-1]
        # above[i] = sum_{j >= i} mass_j and discounted[i] = sum_{j >= i} mass_j exp(loss_i - loss_j): with the weights
        # relative to where the sum begins, no exponential over- or underflows.
        self._above = np.append(np.cumsum(mass)[::-1], 0.0)
        self._discounted = np.append(signal.lfilter([1.0], [1.0, -math.exp(-self._interval)], mass)[::-1], 0.0)
        self.low, self.high = self._first * self._interval, (self._first + mass.size) * self._interval

    def at(self, orders: FloatArray) -> FloatArray:
        """Returns the divergence at each order, with all that may be wrong with it."""
        composed, last = self._composed, self._above.size - 1
        start = np.clip(np.floor(orders / self._interval) + 1 - self._first, 0, last).astype(np.int64)
        above = self._above[start]
        gap = np.minimum(orders - (self._first + start) * self._interval, 0.0)
        finite = np.maximum(above - np.exp(gap) * self._discounted[start], 0.0)
        # Either of the two running sums errs by one rounding per term, and their difference inherits it.
        rounding = 4 * (last + 4) * _EPS * above
        error = np.exp(np.minimum(composed.log_error - composed.tilt * orders, 1.0))
        return np.minimum((finite + composed.pmf.infinity + rounding) * (1.0 + 2 * composed.drift) + error, 1.0)


class Divergences:
    """Certified upper bounds on delta at any order, from a few compositions per bound and direction.

    Args:
        bounds: Upper bounds that hold for one and the same history.
    """

    def __init__(self, bounds: Iterable[UpperBound]) -> None:
        self._remove: list[_Curve] = []
        self._add: list[_Curve] = []
        for bound in bounds:
            for curves, composer in zip((self._remove, self._add), bound.composers(), strict=True):
                curves.extend(_compositions(composer, bound.delta))

    @property
    def losses(self) -> tuple[float, float]:
        """The lowest and the highest finite loss of any curve: beyond them the divergences are trivial."""
        curves = self._remove + self._add
        return min(curve.low for curve in curves), max(curve.high for curve in curves)

    def at(self, orders: FloatArray) -> tuple[FloatArray, FloatArray]:
        """Delta for removing a record and for adding one.

        Args:
            orders: Values of epsilon, any real numbers or infinite, shape [n].

        Returns:
            Two upper bounds in [0, 1], each of shape [n].
        """
        orders = np.clip(orders, -LARGEST_ORDER, LARGEST_ORDER)
        remove, add = _smallest(self._remove, orders), _smallest(self._add, orders)
        negative = orders < 0
        mirrored = orders[negative]
        for values, others in ((remove, self._add), (add, self._remove)):
            other = -np.expm1(mirrored) + np.exp(mirrored) * _smallest(others, -mirrored)
            values[negative] = np.minimum(values[negative], other * (1 + 4 * _EPS))
        return remove, add


def _compositions(composer: Composer, smallest: float) -> Iterator[_Curve]:
    """Yields compositions that aim at deltas from large to small.

    Raises:
        AccountingResourceError: If not even the first can be made.
    """
    aim = max(_FIRST_AIM, smallest)
    yield _Curve(composer.compose(delta=aim))
    while aim > smallest:
        aim = max(aim * _AIM_RATIO, smallest)
        try:
            yield _Curve(composer.compose(delta=aim))
        except AccountingResourceError:
            # The stronger the tilt the longer the window. The curves made so far are valid everywhere.
            return


def _smallest(curves: list[_Curve], orders: FloatArray) -> FloatArray:
    return np.asarray(np.minimum.reduce([curve.at(orders) for curve in curves]))
