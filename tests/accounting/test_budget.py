import re
from pathlib import Path

import pytest

from dprc_lightning.accounting import Accountant, StepEvent
from dprc_lightning.accounting.budget import spent_summary
from dprc_lightning.accounting.ledger import Ledger
from dprc_lightning.errors import InvalidArgumentError

EVENT = StepEvent(0.8, 0.085, 32)


def test_the_phrase_has_the_steps_and_an_epsilon_that_is_never_rounded_down(tmp_path: Path) -> None:
    with Ledger.create(tmp_path, {}) as ledger:
        assert spent_summary(ledger, 1e-5) == "0 steps are spent: epsilon 0 at delta 1e-05"
        ledger.reserve(EVENT.to_dict()).take()
        assert spent_summary(ledger, 1e-5).startswith("1 step is spent: epsilon ")
        ledger.reserve(StepEvent(1.1, 0.085, 32).to_dict(), count=12)
        figure = re.fullmatch(r"13 steps are spent: epsilon (\d\.\d{3}) at delta 1e-05", spent_summary(ledger, 1e-5))
        upper = Accountant([(EVENT, 1), (StepEvent(1.1, 0.085, 32), 12)]).upper(1e-5)
        assert figure and upper <= float(figure[1]) < upper + 1e-3


def test_steps_without_a_finite_epsilon_and_steps_that_are_none(tmp_path: Path) -> None:
    ledger = Ledger.create(tmp_path, {})
    ledger.reserve(StepEvent(0.05, 0.5, 1).to_dict(), count=50)
    assert spent_summary(ledger, 1e-9) == "50 steps are spent: epsilon inf at delta 1e-09"
    ledger.reserve({"sigma": 1.0})
    with pytest.raises(InvalidArgumentError, match="sigma"):
        spent_summary(ledger, 1e-5)
