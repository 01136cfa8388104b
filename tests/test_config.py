"""What a configuration resolves to, and what it refuses."""

import pytest

from dprc_lightning import PerformanceConfig, PrivacyConfig
from dprc_lightning.accounting import epsilon
from dprc_lightning.errors import ConfigurationError


def config(**changes):
    return PrivacyConfig(**({"epsilon": 2.0, "delta": 1e-5, "sample_rate": 0.05, "steps": 50} | changes))


def test_epsilon_is_met_by_the_calibrated_noise():
    resolved = config().resolve(1000, sketch_dim=32)
    upper = epsilon(
        noise_multiplier=resolved.noise_multiplier, delta=1e-5, sample_rate=0.05, steps=50, sketch_dim=32
    ).upper
    assert 1.98 < upper <= 2.0
    # Exact norms need less noise for the same epsilon.
    assert config().resolve(1000, sketch_dim=None).noise_multiplier < resolved.noise_multiplier


def test_batch_size_epochs_and_noise_are_scaled_by_constants():
    resolved = config(
        epsilon=None, noise_multiplier=1.5, sample_rate=None, expected_batch_size=64, steps=None, epochs=3
    )
    resolved = resolved.resolve(1600, sketch_dim=None)
    assert (resolved.sample_rate, resolved.steps, resolved.steps_per_epoch) == (0.04, 75, 25)
    assert resolved.expected_batch_size == pytest.approx(64)
    assert resolved.noise_std == pytest.approx(1.5 * 1.0 / 64)


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"noise_multiplier": 1.0}, "privacy.epsilon or privacy.noise_multiplier: both are set"),
        ({"epsilon": None}, "privacy.epsilon or privacy.noise_multiplier: neither is set"),
        ({"expected_batch_size": 5.0}, "privacy.sample_rate or privacy.expected_batch_size: both"),
        ({"epochs": 1.0}, "privacy.steps or privacy.epochs: both"),
        ({"sample_rate": 1.5}, "privacy.sample_rate=1.5"),
        ({"sample_rate": float("nan")}, "privacy.sample_rate=nan"),
        ({"sample_rate": None, "expected_batch_size": 2000}, "more than the 1000 training records"),
        ({"epsilon": -1.0}, "privacy.epsilon=-1.0"),
        ({"max_grad_norm": float("inf")}, "privacy.max_grad_norm=inf"),
        ({"delta": 0.01}, "above 1/1000"),
        ({"delta": 0.0}, "privacy.delta=0.0"),
        ({"steps": 0}, "privacy.steps=0"),
        ({"sketch_dim": 0}, "privacy.sketch_dim=0"),
        ({"projection": "countsketch"}, r"privacy.projection='countsketch': .*\(1, 1\) / sqrt\(2\)"),
        ({"projection": "haar"}, "privacy.projection='haar'"),
        ({"projection": "rademacher", "bound": "envelope"}, "privacy.bound='envelope'"),
    ],
)
def test_problems_are_named(changes, part):
    with pytest.raises(ConfigurationError, match=part):
        config(**changes).resolve(1000, sketch_dim=32)


def test_a_large_delta_can_be_allowed_by_name():
    assert config(delta=0.01, allow_large_delta=True).problems(1000) == []


def test_an_empty_training_set():
    assert any("0 records" in problem for problem in config().problems(0))


def test_performance_settings():
    assert PerformanceConfig().problems() == []
    assert len(PerformanceConfig(physical_batch_size=0, max_tokens=-1, num_workers=-1).problems()) == 3
    (neither,) = PerformanceConfig(physical_batch_size=None).problems()
    assert "performance.max_tokens" in neither


def test_random_signs_must_have_a_use():
    """An exact norm is not projected, and where too few columns leave no finite epsilon a run must not begin."""
    signs = {"projection": "rademacher", "noise_multiplier": 2.0, "epsilon": None}
    assert config(**signs).resolve(1000, sketch_dim=64).projection == "rademacher"
    with pytest.raises(ConfigurationError, match="estimator=auto every norm of this model is exact"):
        config(**signs, estimator="auto").resolve(1000, sketch_dim=None)
    with pytest.raises(ConfigurationError, match=r"privacy.sketch_dim=4: too few columns .* raise sketch_dim"):
        config(**signs).resolve(1000, sketch_dim=4)


def test_random_signs_are_calibrated_by_their_own_law():
    changes = {"projection": "rademacher", "sketch_dim": 64}
    resolved = config(**changes).resolve(1000, sketch_dim=64)
    mechanism = {"delta": 1e-5, "sample_rate": 0.05, "steps": 50, "sketch_dim": 64, "projection": "rademacher"}
    assert 1.98 < epsilon(noise_multiplier=resolved.noise_multiplier, **mechanism).upper <= 2.0
    assert resolved.noise_multiplier > config().resolve(1000, sketch_dim=64).noise_multiplier
