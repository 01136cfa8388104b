"""How a run begins, goes on, or goes on elsewhere: what rank 0 decides about secret, ledger and noise."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dprc_lightning.accounting.budget import spent_summary
from dprc_lightning.accounting.calibration import calibrate_noise_multiplier
from dprc_lightning.accounting.events import StepEvent
from dprc_lightning.accounting.ledger import LEDGER_NAME, Ledger
from dprc_lightning.config import PrivacyConfig, ResolvedPrivacy
from dprc_lightning.errors import ConfigurationError, LedgerError
from dprc_lightning.keys import SECRET_NAME, RunSecret
from dprc_lightning.run import identity_of, own_folder, refuse_used_folder

_MAY_CHANGE = {"steps", "crash_allowance", "target_epsilon"}


@dataclass(frozen=True)
class Origin:
    """What a run goes on from.

    Attributes:
        checkpoint: The file, as the user named it.
        folder: Its run folder, which has the ledger.
        head: The ledger's last entry when the checkpoint was written.
        applied: Steps that its parameters have.
    """

    checkpoint: Path
    folder: Path
    head: str
    applied: int

    @classmethod
    def of(cls, checkpoint: str | os.PathLike[str], remembered: Mapping[str, Any] | None) -> "Origin":
        """Read a checkpoint's own words.

        Args:
            checkpoint: The file.
            remembered: What `DPRCModule.on_save_checkpoint` put into it.

        Returns:
            The origin.

        Raises:
            ConfigurationError: It is not of a private run.
            LedgerError: There is no ledger where it lies.
        """
        if not remembered or remembered.get("ledger_head") is None:
            raise ConfigurationError([
                f"--ckpt_path {checkpoint}: it is not a checkpoint of a private run; resume from this run's own, or "
                "load other weights in the model's __init__"
            ])
        folder = own_folder(Path(checkpoint))
        told = remembered.get("folder")
        if told and not os.path.lexists(folder / LEDGER_NAME) and os.path.lexists(Path(told) / LEDGER_NAME):
            # A requeue by Slurm, for one, leaves its checkpoint elsewhere. The ledger must hold its entry all the same.
            folder = Path(told)
        if not os.path.lexists(folder / LEDGER_NAME):
            raise LedgerError(
                f"--ckpt_path {checkpoint}: no ledger.jsonl in {folder}; put the run's ledger back, its steps are spent"
            )
        applied = remembered.get("applied_steps", remembered["global_step"])
        return cls(Path(checkpoint), folder, remembered["ledger_head"], int(applied))


class Opening:
    """A run on its way: what rank 0 holds until the first step may begin.

    Guarantee: a run that begins, goes on in another folder, or in a copy of its folder, draws a new secret, whatever
    lies there; and one whose secret was lost. The stored one is used only where the run goes on in its own folder, and
    secret and ledger are the very files that it wrote, told by inode and by the secret's time of change. So two
    continuations do not share their streams, unless an older ledger was written over the newer one into the same file,
    or a whole file system was brought back: that cannot be seen from here. The ledger is locked, or forked, before
    anything is decided by what it holds: no other process can add steps to it in between.

    Args:
        folder: Run folder; made if it is not there.
        origin: What the run goes on from; None for a run that begins.

    Raises:
        ConfigurationError: A run begins in a folder that is in use.
    """

    def __init__(self, folder: Path, origin: Origin | None) -> None:
        self.folder, self.origin = folder, origin
        self.ledger: Ledger | None = None
        own = origin is not None and folder.resolve() == origin.folder.resolve()
        self._ledger_is_new = not own
        self._secret_is_new = False
        if not own:
            refuse_used_folder(folder)
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigurationError([
                    f"run folder {folder}: it cannot be made ({error.strerror}); choose a writable place "
                    "(trainer.default_root_dir, or save_dir of the logger)"
                ]) from None
        elif origin is not None:
            self.ledger = Ledger.open(folder, must_contain=origin.head)
        try:
            if self.ledger is None and origin is not None:
                self.ledger = Ledger.fork(origin.folder, folder, must_contain=origin.head)
            self.secret = self._secret()
        except BaseException:
            self.abandon()
            raise

    def _secret(self) -> RunSecret:
        there = os.path.lexists(self.folder / SECRET_NAME)
        if there and not self._ledger_is_new and self.ledger is not None:
            if self.ledger.meta.get("files") == identity_of(self.folder):
                return RunSecret.load(self.folder)
        if there:
            # Kept, because nothing is ever thrown away here; its name says that nothing draws from it any more.
            os.rename(self.folder / SECRET_NAME, self.folder / f"{SECRET_NAME}.unused-{os.urandom(4).hex()}")
        secret = RunSecret.create(self.folder)
        self._secret_is_new = self._ledger_is_new
        return secret

    def settle(
        self, privacy: PrivacyConfig, *, num_records: int, sketch_dim: int | None, default_norm_slack: float
    ) -> tuple[Ledger, ResolvedPrivacy]:
        """Fix the mechanism of the steps to come, and write it down.

        Args:
            privacy: As the user asks for it now.
            num_records: N.
            sketch_dim: k of the attached model.
            default_norm_slack: See `PrivacyConfig.resolve`.

        Returns:
            The ledger, open for writing, and the mechanism.
        """
        if self.ledger is None or self.origin is None:
            resolved = privacy.resolve(num_records, sketch_dim, default_norm_slack=default_norm_slack)
            self.ledger = Ledger.create(self.folder / LEDGER_NAME, {"mechanism": resolved.to_dict()})
            self.ledger.amend({"files": identity_of(self.folder)})
            return self.ledger, resolved
        recorded = ResolvedPrivacy.from_dict(self.ledger.meta["mechanism"])
        wanted = privacy.resolve(
            num_records, sketch_dim, default_norm_slack=default_norm_slack, calibrated=recorded.noise_multiplier
        )
        resolved = _mechanism_of_further_steps(wanted, recorded, self.ledger, self.origin)
        now: dict[str, Any] = {"mechanism": resolved.to_dict(), "files": identity_of(self.folder)}
        if resolved != recorded:
            now["asked"] = _asked(wanted)
        changes = {name: value for name, value in now.items() if self.ledger.meta.get(name) != value}
        if changes:
            self.ledger.amend(changes)
        return self.ledger, resolved

    def abandon(self) -> None:
        """Give up before the first step: the ledger counts no further step, and the folder is free if it was."""
        if self.ledger is None:
            self._drop_secret()
            return
        self.ledger.close()
        if self._ledger_is_new:
            # No step was begun, and nothing was drawn.
            self.ledger.path.unlink(missing_ok=True)
            self._drop_secret()

    def _drop_secret(self) -> None:
        if self._secret_is_new:
            (self.folder / SECRET_NAME).unlink(missing_ok=True)


def _mechanism_of_further_steps(
    wanted: ResolvedPrivacy, recorded: ResolvedPrivacy, ledger: Ledger, origin: Origin
) -> ResolvedPrivacy:
    """The recorded mechanism; where steps or epsilon changed, one whose noise pays for what is spent already.

    Guarantee: all steps of the ledger and all that the new budget allows compose to at most the target epsilon (see
    `calibrate_noise_multiplier`), if the change was not made in the light of what the earlier steps released.

    Returns:
        The mechanism.

    Raises:
        ConfigurationError: Something else changed, or more steps without a target to calibrate them to.
        LedgerError: Nothing of the budget is left.
    """
    # Steps and epsilon are held against what was asked for last: the allowance on record grows by what was lost.
    before = recorded.to_dict() | ledger.meta.get("asked", {})
    now = wanted.to_dict()
    changed = [name for name in now if now[name] != before.get(name)]
    if refused := [name for name in changed if name not in _MAY_CHANGE]:
        raise ConfigurationError([
            f"privacy: the ledger in {origin.folder} counts steps with {name}={before.get(name)}, now it is "
            f"{now[name]}; resume with the configuration it began with"
            for name in refused
        ])
    if not changed:
        wanted = recorded
    elif wanted.target_epsilon is None and wanted.steps + wanted.crash_allowance > recorded.budget:
        raise ConfigurationError([
            f"privacy.steps={wanted.steps}, privacy.crash_allowance={wanted.crash_allowance}: the run's budget was "
            f"{recorded.budget} steps with privacy.noise_multiplier={recorded.noise_multiplier}; more steps cost more "
            "than was declared: give privacy.epsilon instead, and their noise is calibrated so that all meet it"
        ])
    else:
        allowance = max(wanted.crash_allowance, ledger.steps - origin.applied)
        if wanted.target_epsilon is None:
            allowance = min(allowance, recorded.budget - wanted.steps)
        wanted = replace(wanted, crash_allowance=allowance)
    if min(wanted.steps - origin.applied, wanted.budget - ledger.steps) < 1:
        raise LedgerError(
            f"run folder {origin.folder}: {spent_summary(ledger, recorded.delta)}, and the budget has no step left "
            f"(privacy.steps={wanted.steps}, {origin.applied} of them in the checkpoint); to go on, resume with a "
            "larger privacy.steps and the privacy.epsilon that all steps together may reach"
        )
    if not changed or wanted.target_epsilon is None:
        return wanted
    sigma = calibrate_noise_multiplier(
        epsilon=wanted.target_epsilon,
        delta=wanted.delta,
        sample_rate=wanted.sample_rate,
        steps=wanted.budget - ledger.steps,
        sketch_dim=wanted.sketch_dim,
        projection=wanted.projection,
        bound=wanted.bound,
        spent=[(StepEvent.from_dict(event), count) for event, count in ledger.spent()],
    )
    return replace(wanted, noise_multiplier=sigma)


def _asked(wanted: ResolvedPrivacy) -> dict[str, Any]:
    return {name: value for name, value in wanted.to_dict().items() if name in _MAY_CHANGE}
