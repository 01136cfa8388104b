"""A law of one's own: each order against what is known otherwise, its flag, and what is refused."""

import copy
import math
import pickle
from typing import Any

import numpy as np
import pytest
from scipy import stats

from dprc_lightning.accounting import Accountant, EpsilonBounds, Order, SensitivityLaw, StepEvent
from dprc_lightning.accounting.accountant import upper_bounds
from dprc_lightning.accounting.discretization import upper_nodes
from dprc_lightning.accounting.grid import COARSE
from dprc_lightning.accounting.law import EnvelopeOfLaw, FloatArray, GaussianConvexLaw, GaussianEnvelopeLaw
from dprc_lightning.errors import InvalidArgumentError

DELTA = 1e-3


class Drawn(SensitivityLaw):
    """chi2_32 / 32 in scipy's words and without means, as somebody outside would write it."""

    order, certified = Order.CONVEX, True

    def cdf(self, w: Any) -> FloatArray:
        return np.asarray(stats.chi2.cdf(32 * np.asarray(w), 32))

    def lower_tail_integral(self, w: float) -> float:
        grid = np.linspace(0, w, 2001)
        return float(np.trapezoid(self.cdf(grid), grid)) * 1.001


class WithMeans(Drawn):
    """The same, with the means of its bins."""

    def bins(self, edges: FloatArray) -> tuple[FloatArray, FloatArray | None]:
        mass, moment = np.diff(self.cdf(edges)), np.diff(stats.chi2.cdf(32 * edges, 34))
        with np.errstate(divide="ignore", invalid="ignore"):
            mean = np.where(mass > 1e-12, moment / mass, edges[1:])
        return mass, np.clip(mean, edges[:-1], edges[1:])


class Alone(WithMeans):
    """The same, with less promised of it."""

    order, certified = Order.CONVEX_ALONE, False


class Stochastic(SensitivityLaw):
    """An estimate that is half the norm's square once in a thousand steps, and otherwise right."""

    certified, atoms = True, (0.5, 1.0)

    def cdf(self, w: Any) -> FloatArray:
        w = np.asarray(w, dtype=np.float64)
        return np.where(w >= 1, 1.0, np.where(w >= 0.5, 1e-3, 0.0))


def _upper(event: StepEvent, steps: int = 4) -> float:
    # The same bounds, composed in a moment on a coarse grid.
    return min(bound.fast_epsilon(bound.composers()) for bound in upper_bounds([(event, steps)], DELTA, COARSE))


def test_a_stochastic_law_lies_between_its_two_values() -> None:
    found = _upper(StepEvent(1.0, 0.1, law=Stochastic()))
    # w = 1/2 is a noise multiplier smaller by sqrt(2).
    assert _upper(StepEvent(1.0, 0.1)) < found < _upper(StepEvent(math.sqrt(0.5), 0.1))
    assert _upper(StepEvent(1.0, 0.1, law=Stochastic(), bound="envelope")) == found


def test_a_convex_law_is_accounted_like_the_gaussian_one() -> None:
    for sigma, bound in ((1.5, "best"), (1.5, "convex"), (1.5, "envelope"), (0.25, "best")):
        known = _upper(StepEvent(sigma, 0.1, 32, bound=bound))
        assert _upper(StepEvent(sigma, 0.1, law=WithMeans(), bound=bound)) == pytest.approx(known, rel=2e-3)
        # Without means each bin is rounded to its worse end.
        assert known * (1 - 1e-6) <= _upper(StepEvent(sigma, 0.1, law=Drawn(), bound=bound)) < 1.1 * known


def test_below_the_proof_a_convex_law_falls_back_to_its_stochastic_bound() -> None:
    sigma = 0.25
    event = StepEvent(sigma, 0.1, law=Drawn())
    assert event.envelope_law() == EnvelopeOfLaw(event.law)
    assert _upper(event) == _upper(StepEvent(sigma, 0.1, law=Drawn(), bound="envelope"))
    with pytest.raises(InvalidArgumentError, match="noise_multiplier=0.25"):
        StepEvent(sigma, 0.1, law=Drawn(), bound="convex")
    # norm_slack counts as noise that is missing.
    with pytest.raises(InvalidArgumentError, match="noise_multiplier"):
        StepEvent(0.29, 0.1, law=Drawn(), bound="convex", norm_slack=0.01)


def test_envelope_of_a_law_is_the_papers_for_a_gaussian_sketch() -> None:
    w, edges = np.array([0.0, 0.3, 0.99, 1.0, 3.0]), np.geomspace(0.01, 4, 50)
    envelope, paper = EnvelopeOfLaw(GaussianConvexLaw(8)), GaussianEnvelopeLaw(8)
    np.testing.assert_array_equal(envelope.cdf(w), paper.cdf(w))
    np.testing.assert_allclose(envelope.bins(edges)[0], paper.bins(edges)[0], atol=1e-12)
    assert envelope.certified
    assert envelope.atoms == (1.0,)
    assert envelope.order is Order.STOCHASTIC
    assert not EnvelopeOfLaw(Alone()).certified


def test_the_convex_order_alone_costs_its_charge() -> None:
    sigma, q, steps = 2.0, 0.1, 20
    event = StepEvent(sigma, q, law=Alone())
    # The mass below 1 / (12 sigma^2) is lost, and 0.303 of it once more.
    charge = steps * q * 1.303 * float(Alone().cdf(1 / (12 * sigma**2)))
    accountant = Accountant([(event, steps)])
    assert accountant.upper(0.9 * charge) == math.inf
    assert Accountant([(StepEvent(sigma, q, 32), steps)]).upper(2 * charge) <= accountant.upper(2 * charge) < math.inf
    # Where nearly nothing is left of the law, nothing is promised.
    assert _upper(StepEvent(0.1, q, law=Alone())) == math.inf
    with pytest.raises(InvalidArgumentError, match="bound='envelope'"):
        StepEvent(sigma, q, law=Alone(), bound="envelope")


def test_the_flag_reaches_every_answer() -> None:
    proved, seen = StepEvent(2.0, 0.1, law=Stochastic()), StepEvent(2.0, 0.1, law=Alone())
    accountant = Accountant([(proved, 5)])
    assert accountant.certified
    assert accountant.epsilon(0.1).certified
    accountant.compose(seen)
    assert not accountant.certified
    assert not accountant.epsilon(0.1).certified
    assert Accountant().certified
    assert Accountant().epsilon(0.1).certified


def test_bounds_stay_a_tuple_of_three() -> None:
    bounds = EpsilonBounds(1.0, 2.0, 3.0, certified=False)
    lower, estimate, upper = bounds
    assert (lower, estimate, upper) == bounds == EpsilonBounds(1.0, 2.0, 3.0)
    assert EpsilonBounds(1.0, 2.0, 3.0).certified
    assert repr(bounds) == "EpsilonBounds(lower=1.0, estimate=2.0, upper=3.0, certified=False)"
    for other in (pickle.loads(pickle.dumps(bounds)), copy.copy(bounds), copy.deepcopy(bounds)):
        assert type(other) is EpsilonBounds
        assert other == bounds
        assert not other.certified
    assert bounds._replace(upper=4.0) == (1.0, 2.0, 4.0)
    assert not bounds._replace(upper=4.0).certified
    assert EpsilonBounds(1.0, 2.0, 3.0)._replace(upper=4.0).certified
    assert bounds._asdict() == {"lower": 1.0, "estimate": 2.0, "upper": 3.0}
    # What nobody vouches for is not certified.
    assert not EpsilonBounds._make((1.0, 2.0, 3.0)).certified


def _falls(self: Any, w: Any) -> FloatArray:
    return np.asarray(1 - stats.chi2.cdf(32 * np.asarray(w), 32))


def _leaves(self: Any, w: Any) -> FloatArray:
    return np.asarray(1.01 * stats.chi2.cdf(32 * np.asarray(w), 32))


def _shifted(self: Any, w: Any) -> FloatArray:
    return np.asarray(stats.chi2.cdf(32 * np.asarray(w) / 1.1, 32))


def _short(self: Any, w: Any) -> FloatArray:
    return np.ones(3)


def _nan(self: Any, w: Any) -> FloatArray:
    return np.full(np.shape(w), np.nan)


def _other_masses(self: Any, edges: FloatArray) -> Any:
    return np.diff(stats.chi2.cdf(33 * edges, 33)), None


def _means_outside(self: Any, edges: FloatArray) -> Any:
    return np.diff(self.cdf(edges)), edges[1:] * 1.1


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ({"cdf": _falls}, "must not fall"),
        ({"cdf": _leaves}, r"must lie in \[0, 1\]"),
        ({"cdf": _nan}, r"must lie in \[0, 1\]"),
        ({"cdf": _short}, "shape"),
        ({"cdf": _shifted}, "mean one, its mean is about 1.[01]"),
        ({"bins": _other_masses}, "masses of its cdf"),
        ({"bins": _means_outside}, "means within their edges"),
        ({"lower_tail_integral": lambda self, w: 0.0}, r"lower_tail_integral\(0.01\)"),
        ({"lower_tail_integral": SensitivityLaw.lower_tail_integral}, "must define lower_tail_integral"),
        ({"order": "convex"}, "member of Order"),
        ({"certified": "yes"}, "True or False"),
        ({"atoms": (0.0, 1.0)}, "mass at zero"),
    ],
)
def test_a_law_that_contradicts_itself_is_refused(members: dict[str, Any], reason: str) -> None:
    law = type("Slip", (Drawn,), members)()
    with pytest.raises(InvalidArgumentError, match=reason) as caught:
        StepEvent(1.0, 0.1, law=law)
    assert caught.value.name == "law"
    assert "\n" not in str(caught.value)


def test_what_is_no_law_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="must be a SensitivityLaw"):
        StepEvent(1.0, 0.1, law=lambda w: w)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="not both"):
        StepEvent(1.0, 0.1, 8, law=Stochastic())


class Forgetful(SensitivityLaw):
    """Its bins know nothing of a mass of 9e-8 that lies far down: it decides a delta of 1e-8."""

    certified, atoms = True, (1.0,)

    def cdf(self, w: Any) -> FloatArray:
        w = np.asarray(w, dtype=np.float64)
        return np.where(w >= 1, 1.0, np.where(w >= 1e-4, 9e-8, 0.0))

    def bins(self, edges: FloatArray) -> tuple[FloatArray, FloatArray | None]:
        return (1 - 9e-8) * np.diff((edges >= 1).astype(np.float64)), None


class UpperEnds(Drawn):
    """Its means are the upper ends of the bins, which narrow bins do not show."""

    order = Order.CONVEX

    def bins(self, edges: FloatArray) -> tuple[FloatArray, FloatArray | None]:
        return np.diff(self.cdf(edges)), edges[1:]

    def lower_tail_integral(self, w: float) -> float:
        return w * float(self.cdf(w))


@pytest.mark.parametrize(("law", "told"), [(Forgetful(), "masses"), (UpperEnds(), "add up")])
def test_bins_that_contradict_the_law_are_refused(law: SensitivityLaw, told: str) -> None:
    with pytest.raises(InvalidArgumentError, match=told):
        StepEvent(1.0, 0.1, law=law)


def test_a_mass_that_the_bins_forget_counts_as_infinite() -> None:
    assert upper_nodes(Forgetful(), 1.0, 1e-12, 64).infinity == pytest.approx(9e-8, rel=1e-6)
