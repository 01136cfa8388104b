"""The curves of one step against direct integration of densities, against quadrature over Z, and against simulation."""

import math
from collections.abc import Callable

import numpy as np
import pytest
from scipy import integrate, stats

from dprc_lightning.accounting.discretization import Nodes, lower_nodes, upper_nodes
from dprc_lightning.accounting.hockey_stick import add_curve, gaussian_hockey_stick, remove_curve
from dprc_lightning.accounting.law import ExactLaw, GaussianConvexLaw, GaussianEnvelopeLaw, SensitivityLaw

ORDERS = np.array([-1.5, -0.3, -0.04, -0.01, 0.0, 0.005, 0.03, 0.2, 1.0, 2.5, 5.0])
ONE = Nodes(np.ones(1), np.ones(1))


def _by_densities(orders: np.ndarray, mu: float, q: float, direction: str) -> list[float]:
    """Integrals of (p - e^order r)_+ over the real line, from the densities alone, on a grid that no kink can hurt."""
    y = np.linspace(-11.0, 11.0 + mu, 2_000_001)
    without = np.exp(-(y**2) / 2) / math.sqrt(2 * math.pi)
    with_record = (1 - q) * without + q * np.exp(-((y - mu) ** 2) / 2) / math.sqrt(2 * math.pi)
    first, second = (with_record, without) if direction == "remove" else (without, with_record)
    return [float(integrate.trapezoid(np.maximum(first - math.exp(order) * second, 0.0), y)) for order in orders]


@pytest.mark.parametrize("direction", ["remove", "add"])
@pytest.mark.parametrize(("sigma", "q"), [(1.0, 0.01), (0.6, 0.3), (4.0, 0.05), (2.0, 1.0)])
def test_exact_clipping_agrees_with_the_densities(sigma: float, q: float, direction: str) -> None:
    curve = remove_curve if direction == "remove" else add_curve
    computed = curve(ORDERS, ONE, sigma, q)
    expected = _by_densities(ORDERS, 1 / sigma, q, direction)
    np.testing.assert_allclose(computed, expected, rtol=1e-6, atol=1e-9)


def _average_over_z(inner: Callable[[np.ndarray], np.ndarray], k: int, envelope: bool) -> float:
    """E inner(Z) by the trapezoidal rule in log w over the density of w = chi2_k / k; the envelope ends at w = 1."""
    top = 1.0 if envelope else stats.chi2.isf(1e-16, k) / k
    log_w = np.linspace(math.log(stats.chi2.ppf(1e-16, k) / k), math.log(top), 400_001)
    w = np.exp(log_w)
    atom = stats.chi2.sf(k, k) * float(inner(np.ones(1))[0]) if envelope else 0.0
    return atom + float(integrate.trapezoid(stats.chi2.pdf(k * w, k) * k * w * inner(w**-0.5), log_w))


@pytest.mark.parametrize("direction", ["remove", "add"])
@pytest.mark.parametrize(
    ("law", "sigma", "q"),
    [
        (GaussianConvexLaw(32), 1.0, 0.01),
        (GaussianConvexLaw(8), 2.0, 0.3),
        (GaussianEnvelopeLaw(32), 0.8, 0.05),
        (GaussianEnvelopeLaw(16), 0.2, 0.1),
        (GaussianConvexLaw(4), 0.3, 1.0),
    ],
)
def test_discrete_laws_bracket_the_average_over_z(law: SensitivityLaw, sigma: float, q: float, direction: str) -> None:
    assert isinstance(law, GaussianConvexLaw | GaussianEnvelopeLaw)
    curve = remove_curve if direction == "remove" else add_curve

    def inner(e: float, z: np.ndarray) -> np.ndarray:
        # The Gaussian's divergence in scipy's own words, per direction.
        mu = z / sigma
        if direction == "remove":
            if math.exp(e) <= 1 - q:
                return np.full_like(z, 1 - math.exp(e))
            a, scale = math.log1p(math.expm1(e) / q), q
        else:
            scale = 1 - math.exp(e) * (1 - q)
            if scale <= 0:
                return np.zeros_like(z)
            a = e + math.log(q / scale)
        return scale * (stats.norm.cdf(mu / 2 - a / mu) - np.exp(a + stats.norm.logcdf(-mu / 2 - a / mu)))

    orders = np.array([-0.3, 0.0, 0.02, 0.5, 2.0, 4.0])
    envelope = isinstance(law, GaussianEnvelopeLaw)
    expected = np.array([_average_over_z(lambda z, e=e: inner(float(e), z), law.sketch_dim, envelope) for e in orders])
    upper = curve(orders, upper_nodes(law, sigma, 1e-10, 256), sigma, q)
    lower = curve(orders, lower_nodes(law, sigma, 1e-10, 256), sigma, q)
    assert np.all(upper >= expected * (1 - 1e-7) - 1e-12)
    assert np.all(lower[orders >= 0] <= expected[orders >= 0] * (1 + 1e-7) + 1e-12)
    np.testing.assert_allclose(upper, expected, rtol=5e-3, atol=1e-9)
    np.testing.assert_allclose(lower[orders >= 0], expected[orders >= 0], rtol=5e-3, atol=1e-9)


@pytest.mark.parametrize("direction", ["remove", "add"])
def test_curve_agrees_with_simulation(direction: str) -> None:
    k, sigma, q, n = 16, 0.9, 0.2, 1_000_000
    generator = np.random.default_rng(7)
    mu = np.sqrt(k / generator.chisquare(k, n)) / sigma
    y = generator.standard_normal(n)
    if direction == "remove":
        y = y + mu * (generator.random(n) < q)
    loss = np.log1p(q * np.expm1(mu * y - mu**2 / 2)) * (1 if direction == "remove" else -1)
    nodes = upper_nodes(GaussianConvexLaw(k), sigma, 1e-9, 256)
    curve = remove_curve if direction == "remove" else add_curve
    for order in (-0.1, 0.0, 0.05, 0.15) + ((0.6, 1.5) if direction == "remove" else ()):
        sample = np.maximum(-np.expm1(order - loss), 0.0)
        error = sample.std() / math.sqrt(n)
        assert abs(sample.mean() - curve(np.array([order]), nodes, sigma, q)[0]) < 4.5 * error


def test_the_two_directions_are_one_pair() -> None:
    """delta_add(e) = 1 - exp(e) + exp(e) delta_remove(-e), which the two formulas do not know of each other."""
    nodes = upper_nodes(GaussianConvexLaw(32), 0.8, 1e-9, 256)
    orders = np.linspace(-3, 3, 61)
    add = add_curve(orders, nodes, 0.8, 0.1)
    remove = remove_curve(-orders, nodes, 0.8, 0.1)
    np.testing.assert_allclose(add, 1 - np.exp(orders) + np.exp(orders) * remove, atol=1e-12)


def test_an_infinite_sensitivity_costs_q_in_one_direction_and_a_bounded_loss_in_the_other() -> None:
    nodes, q = Nodes(np.ones(1), np.full(1, 0.9), infinity=0.1), 0.2
    assert remove_curve(np.array([50.0]), nodes, 1.0, q)[0] == pytest.approx(0.1 * q)
    edge = -math.log1p(-q)
    assert add_curve(np.array([edge + 1e-9]), nodes, 1.0, q)[0] == 0.0
    assert add_curve(np.array([0.0]), nodes, 1.0, q)[0] == pytest.approx(
        q * (0.9 * gaussian_hockey_stick(0.0, 1.0) + 0.1)
    )


def test_gaussian_curve_survives_extreme_orders() -> None:
    a, mu = np.array([-np.inf, -500.0, 0.0, 500.0, 599.0]), np.array([[1e-4], [1.0], [40.0]])
    values = gaussian_hockey_stick(a, mu)
    assert np.all(np.isfinite(values))
    assert np.all((values >= 0) & (values <= 1))
    assert np.all(np.diff(values, axis=1) <= 0)
    assert np.all(values[:, 0] == 1.0)
    # mu = 40 at order exp(599): P(N(40, 1) > 599/40 + 20) and a correction that is a ratio of Mills ratios.
    assert values[2, 4] == pytest.approx(stats.norm.sf(599 / 40 - 20) - math.exp(599 + stats.norm.logsf(599 / 40 + 20)))


@pytest.mark.parametrize("sigma", [0.2, 0.5, 1.0, 3.0])
@pytest.mark.parametrize("law", [ExactLaw(), GaussianConvexLaw(1), GaussianConvexLaw(32), GaussianEnvelopeLaw(8)])
def test_discrete_laws_are_laws(law: SensitivityLaw, sigma: float) -> None:
    upper, lower = upper_nodes(law, sigma, 1e-9, 64), lower_nodes(law, sigma, 1e-9, 64)
    assert upper.mass.sum() + upper.infinity == pytest.approx(1.0, abs=1e-12)
    # The sliver, and what rounding loses of the masses.
    assert upper.infinity <= 1e-9 + 1e-14
    assert 1 - 2e-9 <= lower.mass.sum() <= 1 + 1e-12
    assert np.all(upper.mass > 0)
    # More bins, tighter on both sides.
    orders = np.array([0.0, 1.0])
    coarse = remove_curve(orders, upper, sigma, 0.1), remove_curve(orders, lower, sigma, 0.1)
    fine = (
        remove_curve(orders, upper_nodes(law, sigma, 1e-9, 512), sigma, 0.1),
        remove_curve(orders, lower_nodes(law, sigma, 1e-9, 512), sigma, 0.1),
    )
    assert np.all(fine[0] <= coarse[0] + 1e-12)
    assert np.all(fine[1] >= coarse[1] - 1e-12)
    assert np.all(fine[1] <= fine[0] + 1e-12)
