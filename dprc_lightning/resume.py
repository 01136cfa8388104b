"""How a run begins, goes on, or goes on elsewhere: what rank 0 decides about secret, ledger and noise."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from dprc_lightning.accounting.budget import spent_summary
from dprc_lightning.accounting.calibration import calibrate_noise_multiplier
from dprc_lightning.accounting.events import StepEvent
from dprc_lightning.accounting.ledger import LEDGER_NAME, Ledger
from dprc_lightning.config import PrivacyConfig, ResolvedPrivacy
from dprc_lightning.errors import ConfigurationError, LedgerError
from dprc_lightning.keys import SECRET_NAME, RunSecret, secret_identity
from dprc_lightning.run import own_folder, refuse_used_folder

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
        if not os.path.lexists(folder / LEDGER_NAME):
            raise LedgerError(
                f"--ckpt_path {checkpoint}: no ledger.jsonl in {folder}; put the run's ledger back, its steps are spent"
            )
        applied = remembered.get("applied_steps", remembered["global_step"])
        return cls(Path(checkpoint), folder, remembered["ledger_head"], int(applied))


def open_secret(folder: Path, origin: Origin | None) -> RunSecret:
    """The secret of a run that begins or goes on.

    Guarantee: two continuations of one run never share their streams. The stored secret is used only where the run goes
    on in its own folder and the file is the one that the ledger knows; in another folder, or in a copy of the folder,
    a new secret is drawn. So is one where the secret was lost; the ledger still counts.

    Args:
        folder: Run folder; made if it is not there.
        origin: What the run goes on from; None for a run that begins.

    Returns:
        The secret.

    Raises:
        ConfigurationError: A run begins in a folder that is in use.
    """
    if origin is None:
        refuse_used_folder(folder)
        folder.mkdir(parents=True, exist_ok=True)
    elif not _same(folder, origin.folder):
        refuse_used_folder(folder)
        folder.mkdir(parents=True, exist_ok=True)
    else:
        known = Ledger.open(folder, read_only=True).meta.get("secret")
        there = os.path.lexists(folder / SECRET_NAME)
        if there and known is not None and known != secret_identity(folder):
            # Kept, because nothing is ever thrown away here; its name says that nothing draws from it any more.
            aside = folder / f"{SECRET_NAME}.copied-{os.urandom(4).hex()}"
            os.rename(folder / SECRET_NAME, aside)
    # One that is there without a ledger is of a start that failed before anything was drawn from it.
    return RunSecret.load(folder) if os.path.lexists(folder / SECRET_NAME) else RunSecret.create(folder)


def open_ledger(
    folder: Path,
    origin: Origin | None,
    privacy: PrivacyConfig,
    *,
    num_records: int,
    sketch_dim: int | None,
    default_norm_slack: float,
) -> tuple[Ledger, ResolvedPrivacy]:
    """The ledger, open for writing, and the mechanism of the steps to come. Call `open_secret` before.

    Args:
        folder: Run folder.
        origin: What the run goes on from; None for a run that begins.
        privacy: As the user asks for it now.
        num_records: N.
        sketch_dim: k of the attached model.
        default_norm_slack: See `PrivacyConfig.resolve`.

    Returns:
        Both.

    Raises:
        LedgerError: Nothing of the budget is left.
    """
    if origin is None:
        resolved = privacy.resolve(num_records, sketch_dim, default_norm_slack=default_norm_slack)
        facts = {"mechanism": resolved.to_dict(), "secret": secret_identity(folder)}
        return Ledger.create(folder / LEDGER_NAME, facts), resolved
    # Read first: a refusal must not leave a forked ledger behind.
    source = Ledger.open(origin.folder, read_only=True, must_contain=origin.head)
    recorded = ResolvedPrivacy.from_dict(source.meta["mechanism"])
    resolved = _mechanism_of_further_steps(
        privacy.resolve(
            num_records, sketch_dim, default_norm_slack=default_norm_slack, calibrated=recorded.noise_multiplier
        ),
        recorded,
        source,
        origin,
    )
    if min(resolved.steps - origin.applied, resolved.budget - source.steps) < 1:
        raise LedgerError(
            f"run folder {origin.folder}: {spent_summary(source, recorded.delta)}, and the budget has no step left "
            f"(privacy.steps={resolved.steps}, {origin.applied} of them in the checkpoint); to go on, resume with a "
            "larger privacy.steps and the privacy.epsilon that all steps together may reach"
        )
    forked = not _same(folder, origin.folder)
    if forked:
        ledger = Ledger.fork(origin.folder, folder, must_contain=origin.head)
    else:
        ledger = Ledger.open(folder, must_contain=origin.head)
    try:
        changes: dict[str, Any] = {}
        if resolved != recorded:
            changes["mechanism"] = resolved.to_dict()
        if secret_identity(folder) != ledger.meta.get("secret"):
            changes["secret"] = secret_identity(folder)
        if changes:
            ledger.amend(changes)
    except BaseException:
        ledger.close()
        raise
    return ledger, resolved


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
    """
    changed = [f.name for f in fields(wanted) if getattr(wanted, f.name) != getattr(recorded, f.name)]
    if not changed:
        return recorded
    if refused := [name for name in changed if name not in _MAY_CHANGE]:
        raise ConfigurationError([
            f"privacy: the ledger in {origin.folder} counts steps with {name}={getattr(recorded, name)}, now it is "
            f"{getattr(wanted, name)}; resume with the configuration it began with"
            for name in refused
        ])
    lost = ledger.steps - origin.applied
    wanted = replace(wanted, crash_allowance=max(wanted.crash_allowance, lost))
    if wanted.target_epsilon is None:
        if wanted.budget > max(recorded.budget, ledger.steps):
            raise ConfigurationError([
                f"privacy.steps={wanted.steps}: this run's budget was {recorded.budget} steps with "
                f"privacy.noise_multiplier={recorded.noise_multiplier}; more steps cost more than was declared: give "
                "privacy.epsilon instead, and their noise is calibrated so that all steps together meet it"
            ])
        return wanted
    further = wanted.budget - ledger.steps
    if further < 1:
        return wanted
    sigma = calibrate_noise_multiplier(
        epsilon=wanted.target_epsilon,
        delta=wanted.delta,
        sample_rate=wanted.sample_rate,
        steps=further,
        sketch_dim=wanted.sketch_dim,
        projection=wanted.projection,
        bound=wanted.bound,
        spent=[(StepEvent.from_dict(event), count) for event, count in ledger.spent()],
    )
    return replace(wanted, noise_multiplier=sigma)


def _same(a: Path, b: Path) -> bool:
    return a.resolve() == b.resolve()
