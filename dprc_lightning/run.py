"""One private run on disk: its folder, its secret, its ledger, and the mechanism that they were made for."""

import os
from pathlib import Path

from dprc_lightning.accounting.events import StepEvent
from dprc_lightning.accounting.ledger import LEDGER_NAME, Ledger
from dprc_lightning.config import ResolvedPrivacy
from dprc_lightning.errors import ConfigurationError, LedgerError
from dprc_lightning.keys import KEY_BYTES, SECRET_NAME, Domain, RunSecret
from dprc_lightning.sampling import PoissonBatchSampler


class PrivateRun:
    """Hands out the numbered steps of a run, each written to the ledger before it begins.

    Guarantee: `begin_step` returns only after the step is on disk, its number never repeats, and the number of steps
    never exceeds the one that the noise was calibrated for. Sampling, projection and dropout are functions of the
    run's secret and that number, never of the user's seed.

    Args:
        folder: Run folder.
        secret: Its secret.
        resolved: The mechanism.
        ledger: Open for writing; None in a baseline without privacy, which spends nothing because it protects nothing.
    """

    def __init__(self, folder: Path, secret: RunSecret, resolved: ResolvedPrivacy, ledger: Ledger | None) -> None:
        self.folder = folder
        self.secret = secret
        self.resolved = resolved
        self.ledger = ledger
        self._count = 0

    @property
    def next_sequence(self) -> int:
        """The number of the next step."""
        return self._count if self.ledger is None else self.ledger.next_sequence

    @property
    def steps_left(self) -> int:
        """How many steps the budget still has."""
        spent = self._count if self.ledger is None else self.ledger.steps
        return self.resolved.steps - spent

    def begin_step(self) -> int:
        """Write a step down.

        Returns:
            Its sequence number.

        Raises:
            LedgerError: The budget is spent, or the ledger cannot be written: the step must not begin.
        """
        if self.steps_left < 1:
            raise LedgerError(
                f"{self.folder}: all {self.resolved.steps} steps of the privacy budget are spent; "
                "more steps need a new calibration (privacy.steps) and a new run"
            )
        if self.ledger is None:
            self._count += 1
            return self._count - 1
        return self.ledger.reserve(step_event(self.resolved).to_dict()).take()

    def sampler(self) -> PoissonBatchSampler:
        """The sampler of this run's logical batches, by sequence number."""
        return PoissonBatchSampler(
            self.resolved.num_records,
            sample_rate=self.resolved.sample_rate,
            steps=self.resolved.steps,
            key=self.secret.subkey(Domain.SAMPLING),
        )

    def close(self) -> None:
        """Stop cleanly: what was reserved but not begun is given back."""
        if self.ledger is not None:
            self.ledger.close()


def step_event(resolved: ResolvedPrivacy) -> StepEvent:
    """One logical step as the accountant knows it.

    Args:
        resolved: The mechanism.

    Returns:
        The event.
    """
    return StepEvent(
        noise_multiplier=resolved.noise_multiplier,
        sample_rate=resolved.sample_rate,
        sketch_dim=resolved.sketch_dim,
        projection=resolved.projection,
        bound=resolved.bound,
    )


def refuse_used_folder(folder: Path) -> None:
    """A run that begins needs a folder of its own.

    Args:
        folder: Run folder.

    Raises:
        ConfigurationError: It holds a ledger already.
    """
    if os.path.lexists(folder / LEDGER_NAME):
        raise ConfigurationError([
            f"run folder {folder}: it holds the ledger of an earlier run; resume it with --ckpt_path, or choose another"
        ])


def open_secret(folder: Path, *, private: bool) -> RunSecret:
    """The secret of a run folder.

    Args:
        folder: Run folder; made if it is not there.
        private: False for a baseline: its streams are random too but nothing is stored.

    Returns:
        The stored secret, else a new one. A run that lost its secret goes on with new streams; the ledger still counts.
        A start that failed before its ledger was made leaves a secret that nothing was drawn from.

    Raises:
        SecretError: The secret is there but cannot be used, or none can be stored.
    """
    if not private:
        return RunSecret(os.urandom(KEY_BYTES))
    folder.mkdir(parents=True, exist_ok=True)
    if os.path.lexists(folder / SECRET_NAME):
        return RunSecret.load(folder)
    return RunSecret.create(folder)


def start_ledger(folder: Path, resolved: ResolvedPrivacy) -> Ledger:
    """The ledger of a run that begins.

    Args:
        folder: Run folder.
        resolved: The mechanism, written into the first line.

    Returns:
        The ledger, open for writing.
    """
    return Ledger.create(folder / LEDGER_NAME, {"mechanism": resolved.to_dict()})


def resume_ledger(folder: Path, resolved: ResolvedPrivacy, head: str | None) -> Ledger:
    """The ledger of a run that goes on.

    Args:
        folder: Run folder.
        resolved: The mechanism; it must be the one that the ledger has counted so far.
        head: What the checkpoint remembers of the ledger; a ledger without it is refused.

    Returns:
        The ledger, open for writing.

    Raises:
        ConfigurationError: The mechanism changed.
    """
    ledger = Ledger.open(folder, must_contain=head)
    now = step_event(resolved).to_dict()
    changed = [event for event, _ in ledger.spent() if event != now]
    if changed or ledger.meta.get("mechanism", {}).get("num_records") != resolved.num_records:
        ledger.close()
        raise ConfigurationError([
            f"run folder {folder}: its ledger counts steps {changed[0] if changed else ledger.meta} but this "
            f"configuration makes {now} on {resolved.num_records} records; resume with the configuration it began with"
        ])
    return ledger
