"""Privacy accounting of DP-SGD with exact or randomized clipping: how much noise, and what it buys.

    >>> from dprc_lightning.accounting import calibrate_noise_multiplier, epsilon
    >>> setting = dict(delta=1e-5, sample_rate=64 / 1225, steps=208, sketch_dim=32)
    >>> round(calibrate_noise_multiplier(epsilon=0.7, **setting), 2)
    4.21
    >>> epsilon(noise_multiplier=4.215, **setting).upper < 0.7
    True

Adjacency is add/remove one record under Poisson sampling. No module here imports torch.
"""

from typing import TYPE_CHECKING, Any

from dprc_lightning.accounting.accountant import Accountant, EpsilonBounds, epsilon, epsilon_schedule, tradeoff_function
from dprc_lightning.accounting.calibration import calibrate_noise_multiplier
from dprc_lightning.accounting.envelope import envelope_cdf
from dprc_lightning.accounting.events import StepEvent
from dprc_lightning.accounting.law import Order, SensitivityLaw

if TYPE_CHECKING:
    from dprc_lightning.accounting.interop import RandomizedClippingAccountant as RandomizedClippingAccountant
    from dprc_lightning.accounting.interop import RandomizedClippingDpEvent as RandomizedClippingDpEvent
    from dprc_lightning.accounting.ledger import Ledger as Ledger

__all__ = [
    "Accountant",
    "EpsilonBounds",
    "Ledger",
    "Order",
    "RandomizedClippingAccountant",
    "RandomizedClippingDpEvent",
    "SensitivityLaw",
    "StepEvent",
    "calibrate_noise_multiplier",
    "envelope_cdf",
    "epsilon",
    "epsilon_schedule",
    "tradeoff_function",
]


def __getattr__(name: str) -> Any:
    if name == "Ledger":
        from dprc_lightning.accounting.ledger import Ledger

        return Ledger
    if name in {"RandomizedClippingAccountant", "RandomizedClippingDpEvent"}:
        # Imports dp_accounting, which takes a second.
        from dprc_lightning.accounting import interop

        return getattr(interop, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
