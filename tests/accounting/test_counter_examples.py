"""What docs/accounting.md says does NOT hold, with its numbers: each from densities or simulation."""

import math

import numpy as np
import pytest
from scipy import integrate, special, stats

from dprc_lightning.accounting import epsilon
from dprc_lightning.accounting.discretization import upper_nodes
from dprc_lightning.accounting.hockey_stick import remove_curve
from dprc_lightning.accounting.law import GaussianConvexLaw


def test_a_projection_by_position_moves_the_others_by_1_5_c() -> None:
    """64 micro-batches of one record each; a record without gradient is inserted in front. k = 32, in units of C."""
    k, batches, n = 32, 64, 20_000
    z = np.sqrt(k / np.random.default_rng(0).chisquare(k, (n, batches + 1)))
    # Record j has the clipped gradient Z_j e_j, orthogonal to the others'; it moves from projection j to j + 1.
    shift = np.sqrt(np.sum((z[:, 1:] - z[:, :-1]) ** 2, axis=1))
    mean = math.sqrt(k / 2) * math.exp(special.gammaln((k - 1) / 2) - special.gammaln(k / 2))
    expected = math.sqrt(2 * batches * (k / (k - 2) - mean**2))
    assert expected == pytest.approx(1.50, abs=0.005)
    assert math.sqrt(np.mean(shift**2)) == pytest.approx(expected, rel=5e-3)
    assert np.quantile(shift, 0.01) > 1.0


def _hidden(others: int, order: float, k: int) -> float:
    """delta at sigma = 1, q = 1 if Z is hidden but shown by so many other records, by integrals over densities.

    Their coordinates add up to T = sqrt(others) Z + noise; x has the coordinate y = Z + noise, or noise alone.
    """
    log_w = np.linspace(math.log(1e-3), 1.6, 401)
    w = np.exp(log_w)
    z, mass = w**-0.5, stats.chi2.pdf(k * w, k) * k * w
    mass /= mass.sum()
    y = np.linspace(-8.0, 30.0, 401)
    without = stats.norm.pdf(y)
    with_x = stats.norm.pdf(y[:, None] - z)
    if others == 0:
        return float(integrate.trapezoid(np.maximum(with_x @ mass - math.exp(order) * without, 0), y))
    root = math.sqrt(others)
    total = np.linspace(-8.0, root * 25, 1501)
    shown = stats.norm.pdf(total[:, None] - root * z) * mass  # density of (T, Z), shape [T, Z]
    inside = np.empty_like(total)
    for start in range(0, total.size, 500):
        part = slice(start, start + 500)
        gap = shown[part] @ with_x.T - math.exp(order) * shown[part].sum(axis=1)[:, None] * without
        inside[part] = integrate.trapezoid(np.maximum(gap, 0), y, axis=1)
    return float(integrate.trapezoid(inside, total))


def test_the_mixture_over_a_hidden_z_is_not_a_bound() -> None:
    k, order = 8, 4.0
    public = remove_curve(np.array([order]), upper_nodes(GaussianConvexLaw(k), 1.0, 1e-9, 512), 1.0, 1.0)[0]
    hidden, ten, hundred = (_hidden(others, order, k) for others in (0, 10, 100))
    assert hidden == pytest.approx(0.0022, abs=5e-5)
    assert public == pytest.approx(0.0070, abs=5e-5)
    assert hidden < ten < hundred < public
    assert hundred == pytest.approx(0.0068, abs=1e-4)


@pytest.mark.parametrize(("runs", "counted", "true"), [(2, 0.39, 0.83), (5, 0.58, 3.43)])
def test_the_same_batch_noised_again_is_not_another_subsampled_step(runs: int, counted: float, true: float) -> None:
    """The mean of n noisy sums of one batch is one sum with noise sigma / sqrt(n)."""
    setting = {"sample_rate": 0.05, "delta": 1e-3}
    assert epsilon(noise_multiplier=1.0, steps=runs, **setting).upper == pytest.approx(counted, abs=0.006)
    assert epsilon(noise_multiplier=runs**-0.5, steps=1, **setting).lower == pytest.approx(true, abs=0.006)


def test_repeated_rows_of_a_projection_can_hide_a_gradient_altogether() -> None:
    """Equal seeds on two shards of the axis that P contracts: the shards' sketches cancel."""
    half = np.random.default_rng(1).standard_normal((16, 8))
    gradient = np.concatenate([np.eye(16)[:, :4], -np.eye(16)[:, :4]])
    assert np.linalg.norm(np.concatenate([half, half]).T @ gradient) < 1e-12
    assert np.linalg.norm(gradient) > 2.0


def test_a_tied_weight_sketched_twice_under_estimates() -> None:
    """Two uses with the same gradient: the squares add up to half of the squared sum."""
    sketch = np.random.default_rng(2).standard_normal((8, 4))
    gradient = np.ones((4, 3))
    apart = 2 * np.linalg.norm(sketch @ gradient) ** 2
    assert np.linalg.norm(sketch @ (gradient + gradient)) ** 2 == pytest.approx(2 * apart)
