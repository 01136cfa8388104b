"""One private run on disk: its folder, its secret, its ledger, and the mechanism that they were made for."""

import os
from pathlib import Path
from typing import Any

from dprc_lightning.accounting.events import StepEvent
from dprc_lightning.accounting.ledger import LEDGER_NAME, Ledger, Reservation
from dprc_lightning.config import ResolvedPrivacy
from dprc_lightning.errors import ConfigurationError, LedgerError
from dprc_lightning.keys import KEY_BYTES, SECRET_NAME, Domain, RunSecret, secret_identity
from dprc_lightning.sampling import PoissonBatchSampler


class PrivateRun:
    """Hands out the numbered steps of a run, each written to the ledger before it begins.

    Guarantee: `begin_step` returns only after the step is on disk, its number never repeats, and the number of steps
    ever begun never exceeds the budget that the noise was calibrated for. Sampling, projection and dropout are
    functions of the run's secret and that number, never of the user's seed. On ranks other than 0, which have no
    ledger, the number is rank 0's: the collective that brings it comes after the write (see `DPRCModule`).

    Args:
        folder: Run folder.
        secret: Its secret.
        resolved: The mechanism.
        ledger: Open for writing; None on ranks other than 0, and in a baseline without privacy, which spends nothing
            because it protects nothing.
        spent: Steps that the ledger counted when this process began.
        next_sequence: The number of the first step that this process begins.
        applied: Steps that the checkpoint at hand brings along in its parameters.
        reserve: How many steps to write down at once.
    """

    def __init__(
        self,
        folder: Path,
        secret: RunSecret,
        resolved: ResolvedPrivacy,
        ledger: Ledger | None,
        *,
        spent: int = 0,
        next_sequence: int = 0,
        applied: int = 0,
        reserve: int = 1,
    ) -> None:
        self.folder = folder
        self.secret = secret
        self.resolved = resolved
        self.ledger = ledger
        self.applied = applied
        self._spent = spent
        self._next_sequence = next_sequence
        self._reserve = reserve
        self._reservation: Reservation | None = None

    @property
    def next_sequence(self) -> int:
        """The number of the next step."""
        return self._next_sequence

    @property
    def spent(self) -> int:
        """Steps ever begun, those lost to crashes included."""
        return self._spent

    @property
    def steps_left(self) -> int:
        """How many steps can still be made: of the run, and of the budget."""
        return max(min(self.resolved.steps - self.applied, self.resolved.budget - self._spent), 0)

    def begin_step(self) -> int:
        """Write a step down.

        Returns:
            Its sequence number.

        Raises:
            LedgerError: The budget is spent, or the ledger cannot be written: the step must not begin.
        """
        if self.steps_left < 1:
            raise LedgerError(
                f"{self.folder}: all {self.resolved.budget} steps of the privacy budget are spent; to make more, "
                "resume with a larger privacy.steps"
            )
        if self.ledger is not None:
            if self._reservation is None or self._reservation.remaining == 0:
                count = min(self._reserve, self.steps_left)
                self._reservation = self.ledger.reserve(step_event(self.resolved).to_dict(), count)
            self._next_sequence = self._reservation.take()
        sequence = self._next_sequence
        self._next_sequence += 1
        self._spent += 1
        return sequence

    def step_applied(self) -> None:
        """Tell that the step has reached the parameters."""
        self.applied += 1

    def sampler(self) -> PoissonBatchSampler:
        """The sampler of this run's logical batches, by sequence number."""
        return PoissonBatchSampler(
            self.resolved.num_records,
            sample_rate=self.resolved.sample_rate,
            steps=self.resolved.budget,
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


def run_folder(log_dir: Path, checkpoint: Path | None) -> Path:
    """Where a run lives.

    Args:
        log_dir: What the trainer calls its folder.
        checkpoint: The checkpoint to resume from, if any.

    Returns:
        ``log_dir``; on resume the checkpoint's own run folder, if ``log_dir`` is no more than the next ``version_N``
        beside it that a logger opened. Any other ``log_dir`` is meant: the run goes on there, as a fork.
    """
    if checkpoint is None or os.path.lexists(log_dir / LEDGER_NAME):
        return log_dir
    own = own_folder(checkpoint)
    versions = log_dir.name.startswith("version_") and own.name.startswith("version_")
    if versions and log_dir.resolve().parent == own.parent and os.path.lexists(own / LEDGER_NAME):
        return own
    return log_dir


def own_folder(checkpoint: Path) -> Path:
    """The run folder that a checkpoint lies in: the nearest folder above it with a ledger, else the one above its own.

    Args:
        checkpoint: The file, or the folder of a sharded checkpoint.

    Returns:
        The folder.
    """
    path = checkpoint.resolve()
    for folder in list(path.parents)[:3]:
        if os.path.lexists(folder / LEDGER_NAME):
            return folder
    return path.parent.parent


def identity_of(folder: Path) -> dict[str, Any]:
    """Tells the files that a run wrote from copies and from what a backup brought back.

    Args:
        folder: Run folder.

    Returns:
        What the ledger has under ``files``.
    """
    ledger = folder / LEDGER_NAME
    return {"secret": secret_identity(folder), "ledger": os.stat(ledger).st_ino if ledger.exists() else None}


def stored_secret(folder: Path) -> RunSecret | None:
    """The secret in a run folder, if folder and secret are those that the run itself made.

    Args:
        folder: Run folder.

    Returns:
        The secret; None if there is none, or it may be somebody else's.
    """
    if not all(os.path.lexists(folder / name) for name in (LEDGER_NAME, SECRET_NAME)):
        return None
    # Whoever owns another file there made the secret too, and could vouch for whatever lies beside it.
    if os.stat(folder / SECRET_NAME).st_uid != os.geteuid():
        return None
    ledger = Ledger.open(folder, read_only=True)
    return RunSecret.load(folder) if ledger.meta.get("files") == identity_of(folder) else None


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


def passing_secret() -> RunSecret:
    """The secret of a baseline: its streams are random too, but nothing is stored."""
    return RunSecret(os.urandom(KEY_BYTES))
