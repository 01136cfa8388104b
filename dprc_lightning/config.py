"""What a run promises (`PrivacyConfig`) apart from how fast it keeps it (`PerformanceConfig`).

No setting of PerformanceConfig changes the guarantee, and no setting of PrivacyConfig is there for speed.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from dprc_lightning.errors import ConfigurationError, InvalidArgumentError


@dataclass(frozen=True)
class PrivacyConfig:
    """The mechanism: DP-SGD with randomized clipping under Poisson sampling, add/remove one unit of privacy.

    The unit is one record, or all records of one person (`group_column`).

    Args:
        delta: What the probabilities with and without a record may differ by beyond the factor exp(epsilon); at most
            1 / number of training records.
        epsilon: Target. The noise multiplier is calibrated to it. Give this OR noise_multiplier.
        noise_multiplier: sigma: the noise has standard deviation sigma * max_grad_norm on the sum of clipped gradients.
        sample_rate: q, probability of each record to be in a logical batch. Give this OR expected_batch_size.
        expected_batch_size: q times the number of training records.
        steps: Number of logical steps. Give this OR epochs.
        epochs: Expected number of times a record (with group_column: a group) is used; steps = ceil(epochs / q).
        crash_allowance: How many steps may be lost to crashes on top of `steps`: begun and counted, but in no
            checkpoint. The noise is calibrated for steps + crash_allowance, so that the run can still make all its
            steps; without it a lost step makes the training one step shorter.
        group_column: The column of the training set that tells whose a record is. The unit of privacy is then all
            records of one value of it: groups are sampled instead of records, and a group that is drawn takes part with
            one of its records, drawn anew in each step from a secret stream. N is then the number of groups.
        max_grad_norm: C, the clipping threshold.
        estimator: How per-record norms are had: hutchinson, exact, auto (small matrices, such as LoRA's, exactly), or
            hutchpp: k directions of each gradient exactly and a sketch of the rest, closer to the norm than hutchinson
            for four times its work, with the same noise.
        sketch_dim: k, columns of the projection. More cost more memory and time and need less noise.
        projection: Distribution of the projection's entries: gaussian, or rademacher: random signs, kept as bits, a
            thirty-second of the memory. They need more noise, and their epsilon is NOT CERTIFIED: the law that it rests
            on is known on a grid only.
        bound: Which law of the randomized clipping is accounted: best, convex or envelope.
        norm_slack: By how much of itself a norm may come out too small; the clipping threshold is lowered by it, so
            that the guarantee holds all the same. Default: 0 in float32, 2^-8 where layers run in bfloat16.
        on_nonfinite: A record whose gradient norm is NaN or infinite: ``raise`` ends the run, ``drop`` gives it factor
            0 and counts it.
        unused: A trainable parameter that no loss reaches: ``error``, or ``zero``: it gets noise alone.
        check_isolation: In the first step, change one record and see that no other one's loss or norm moves; costs two
            more forwards and norm passes of one micro-batch.
        allow_large_delta: Accept a delta above 1 / number of training records.
        log_unprotected: Log training loss and clipped fraction. They are computed from private data without noise and
            are outside of the guarantee; turn it off where others read the logs.
        baseline_without_privacy: Train the same steps on the same kind of batches WITHOUT clipping and noise, for
            comparison. Nothing is protected then, and every output says so.
    """

    delta: float
    epsilon: float | None = None
    noise_multiplier: float | None = None
    sample_rate: float | None = None
    expected_batch_size: float | None = None
    steps: int | None = None
    epochs: float | None = None
    crash_allowance: int = 0
    group_column: str | None = None
    max_grad_norm: float = 1.0
    estimator: Literal["auto", "exact", "hutchinson", "hutchpp"] = "auto"
    sketch_dim: int = 32
    projection: Literal["gaussian", "rademacher"] = "gaussian"
    bound: Literal["best", "convex", "envelope"] = "best"
    norm_slack: float | None = None
    on_nonfinite: Literal["raise", "drop"] = "raise"
    unused: Literal["error", "zero"] = "error"
    check_isolation: bool = True
    allow_large_delta: bool = False
    log_unprotected: bool = True
    baseline_without_privacy: bool = False

    def resolve(
        self,
        num_records: int,
        sketch_dim: int | None,
        *,
        default_norm_slack: float = 0.0,
        calibrated: float | None = None,
    ) -> "ResolvedPrivacy":
        """Find every contradiction, then fix the numbers of the run.

        Args:
            num_records: N, the declared number of training records (groups, with group_column). It is public.
            sketch_dim: k of the sketches that the attached model really uses; None if every norm is exact.
            default_norm_slack: What norm_slack is where it is not given: it depends on the precision.
            calibrated: The noise multiplier for the target epsilon, if it is known already: a resumed run goes on with
                the one that it began with.

        Returns:
            The mechanism that the run will use.

        Raises:
            ConfigurationError: All contradictions together.
        """
        problems = self.problems(num_records)
        if problems:
            raise ConfigurationError(problems)
        rate = self.sample_rate if self.sample_rate is not None else _given(self.expected_batch_size) / num_records
        steps = self.steps if self.steps is not None else math.ceil(_given(self.epochs) / rate)
        sigma = 0.0
        if not self.baseline_without_privacy:
            known = calibrated if self.noise_multiplier is None else self.noise_multiplier
            budget = steps + self.crash_allowance
            self._refuse_signs_without_use(sketch_dim, known, rate, budget)
            sigma = self._calibrate(rate, budget, sketch_dim) if known is None else known
        return ResolvedPrivacy(
            noise_multiplier=sigma,
            max_grad_norm=self.max_grad_norm,
            sample_rate=rate,
            steps=steps,
            crash_allowance=self.crash_allowance,
            delta=self.delta,
            num_records=num_records,
            group_column=self.group_column,
            expected_batch_size=rate * num_records,
            estimator=self.estimator,
            sketch_dim=sketch_dim,
            projection=self.projection,
            norm_slack=default_norm_slack if self.norm_slack is None else self.norm_slack,
            bound=self.bound,
            target_epsilon=None if self.baseline_without_privacy else self.epsilon,
            private=not self.baseline_without_privacy,
        )

    def _calibrate(self, rate: float, steps: int, sketch_dim: int | None) -> float:
        from dprc_lightning.accounting import calibrate_noise_multiplier

        return calibrate_noise_multiplier(
            epsilon=_given(self.epsilon),
            delta=self.delta,
            sample_rate=rate,
            steps=steps,
            sketch_dim=sketch_dim,
            projection=self.projection,
            bound=self.bound,
        )

    def _refuse_signs_without_use(self, sketch_dim: int | None, sigma: float | None, rate: float, steps: int) -> None:
        """What of projection=rademacher can be known once the model is attached.

        Args:
            sketch_dim: k; None if nothing is sketched.
            sigma: The noise multiplier; None if it is to be calibrated, which refuses by itself.
            rate: q.
            steps: The budget.

        Raises:
            ConfigurationError: Nothing is sketched, or no finite epsilon could be given.
        """
        if self.projection != "rademacher":
            return
        if sketch_dim is None:
            raise ConfigurationError([
                f"privacy.projection=rademacher: with privacy.estimator={self.estimator} every norm of this model is "
                "exact and nothing is projected; leave privacy.projection out"
            ])
        if sigma is not None:
            from dprc_lightning.accounting.rademacher import require_enough_columns

            try:
                require_enough_columns(sketch_dim, sigma, rate, steps, self.delta)
            except InvalidArgumentError as error:
                raise ConfigurationError([f"privacy.{error}"]) from None

    def problems(self, num_records: int) -> list[str]:
        """Everything that is wrong with these settings.

        Args:
            num_records: N.

        Returns:
            One line per problem, in the words of the command line.
        """
        found: list[str] = []
        if not self.baseline_without_privacy:
            found += _exactly_one("privacy.epsilon", self.epsilon, "privacy.noise_multiplier", self.noise_multiplier)
        found += _exactly_one(
            "privacy.sample_rate", self.sample_rate, "privacy.expected_batch_size", self.expected_batch_size
        )
        found += _exactly_one("privacy.steps", self.steps, "privacy.epochs", self.epochs)
        for name in ("epsilon", "noise_multiplier", "expected_batch_size", "epochs", "max_grad_norm"):
            value = getattr(self, name)
            if value is not None and not (1e-12 <= value < math.inf):
                found.append(f"privacy.{name}={value}: expected a finite value > 0 (at least 1e-12)")
        if self.sample_rate is not None and not 0 < self.sample_rate <= 1:
            found.append(f"privacy.sample_rate={self.sample_rate}: expected a value in (0, 1]")
        for name, least in (("steps", 1), ("sketch_dim", 1), ("crash_allowance", 0)):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                found.append(f"privacy.{name}={value}: expected an integer >= {least}")
        if refused := _refused_projection(self.projection, self.bound, self.estimator):
            found.append(f"privacy.{refused}")
        if self.group_column is not None and not self.group_column:
            found.append("privacy.group_column='': expected the name of a column, or null for records as units")
        if self.norm_slack is not None and not 0 <= self.norm_slack < 1:
            found.append(f"privacy.norm_slack={self.norm_slack}: expected a value in [0, 1)")
        if num_records < 1:
            found.append(f"the training set has {num_records} records: at least one is needed")
        elif self.expected_batch_size is not None and self.expected_batch_size > num_records:
            found.append(
                f"privacy.expected_batch_size={self.expected_batch_size}: more than the {num_records} training records"
            )
        if not 0 < self.delta < 1:
            found.append(f"privacy.delta={self.delta}: expected a value in (0, 1)")
        elif num_records >= 1 and self.delta > 1 / num_records and not self.allow_large_delta:
            found.append(
                f"privacy.delta={self.delta}: above 1/{num_records}, one over the number of training records, a "
                "mechanism may publish a record at random; lower it, or set privacy.allow_large_delta=true"
            )
        return found


@dataclass(frozen=True)
class ResolvedPrivacy:
    """The numbers of one run: public, and fixed before its first step.

    Attributes:
        noise_multiplier: sigma; 0 in a baseline without privacy.
        max_grad_norm: C.
        sample_rate: q.
        steps: Logical steps of the whole run that reach the parameters.
        crash_allowance: Further steps that may be begun, lost and counted.
        delta: As asked for.
        num_records: N, the number of units of privacy: records, or groups with `group_column`.
        group_column: Whose a record is; None if the unit of privacy is the record.
        expected_batch_size: q * N, the constant that gradients are divided by. Never the realised batch size.
        estimator: How norms are had.
        sketch_dim: k, None if every norm is exact.
        projection: Distribution of the projection's entries.
        norm_slack: By how much, as a share, the clipping threshold is lowered.
        bound: Which law is accounted.
        target_epsilon: As asked for, None if the noise multiplier was given.
        private: False only for a baseline without privacy.
    """

    noise_multiplier: float
    max_grad_norm: float
    sample_rate: float
    steps: int
    crash_allowance: int
    delta: float
    num_records: int
    group_column: str | None
    expected_batch_size: float
    estimator: str
    sketch_dim: int | None
    projection: str
    norm_slack: float
    bound: str
    target_epsilon: float | None
    private: bool

    @property
    def noise_std(self) -> float:
        """Standard deviation of the noise on the averaged gradient: sigma * C / (q * N)."""
        return self.noise_multiplier * self.max_grad_norm / self.expected_batch_size

    @property
    def budget(self) -> int:
        """Steps that may ever be begun: what the noise is calibrated for."""
        return self.steps + self.crash_allowance

    @property
    def steps_per_epoch(self) -> int:
        """Logical steps of one epoch, ceil(1 / q)."""
        return math.ceil(1 / self.sample_rate)

    def to_dict(self) -> dict[str, Any]:
        """All fields, ready for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "ResolvedPrivacy":
        """Read what `to_dict` wrote.

        Args:
            values: As they stand in a ledger.

        Returns:
            The mechanism.
        """
        names = {field.name for field in fields(cls)}
        # A ledger of an earlier release has fewer of them.
        return cls(**{"crash_allowance": 0, "group_column": None} | {k: v for k, v in values.items() if k in names})


@dataclass(frozen=True)
class PerformanceConfig:
    """How a logical batch is computed. None of it changes the guarantee.

    Args:
        physical_batch_size: Most records in one micro-batch.
        max_tokens: Most tokens in one micro-batch, padding included; a longer record gets one of its own.
        num_workers: Processes that prepare batches ahead; 0 prepares them in the training process.
        reserve_steps: How many steps to write into the ledger at once. More than one saves waiting for a slow disk
            (NFS, Lustre) at each step; a killed run may then count that many steps, less one, that it never made.
        projection_memory: GiB of the projection that are kept for a whole step; what is beyond is made again at each
            use, the same bit for bit, which takes time (8 s for 10^9 Gaussian entries on one core) but nearly no
            memory. null keeps all, 0 nothing.
        mlp_chunk: Run the MLP of each layer so many tokens at a time, a multiple of 512; null runs it at once. It then
            keeps its input alone from the forward to the backwards, which run it once more: nothing more to compute
            where activations are checkpointed, else one more forward of the MLP in each of the two backwards.
        lean_norms: Run RMSNorms (Hugging Face's, frozen ones too) some tokens at a time, so that they keep their input
            alone: the same values, no more to compute.
        offload_checkpoints: Keep the inputs of activation checkpoints in the host's memory, for models that checkpoint
            their activations. It takes two transfers back for each one there.
        memory: GiB of the device that training may use. Before a private run begins, steps of its largest micro-batch
            (`DPRCModule.largest_batch`) are simulated, and the cheapest of activation checkpointing (Hugging Face's
            models), mlp_chunk and offload_checkpoints are turned on with which one fits, with Adam's states; what is
            set already stays. ``auto``: nine tenths of the memory of the device at hand (of the machine's on a CPU):
            allocators need room. null picks nothing. For the strategies dprc_single and dprc_ddp.
    """

    physical_batch_size: int | None = 32
    max_tokens: int | None = None
    num_workers: int = 0
    reserve_steps: int = 1
    projection_memory: float | None = 1.0
    mlp_chunk: int | None = None
    lean_norms: bool = True
    offload_checkpoints: bool = False
    memory: float | Literal["auto"] | None = None

    def problems(self) -> list[str]:
        """Everything that is wrong with these settings.

        Returns:
            One line per problem, in the words of the command line.
        """
        found = []
        for name in ("physical_batch_size", "max_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                found.append(f"performance.{name}={value}: expected an integer >= 1")
        if self.physical_batch_size is None and self.max_tokens is None:
            found.append("performance.physical_batch_size or performance.max_tokens: neither is set; give one or both")
        if self.reserve_steps < 1:
            found.append(f"performance.reserve_steps={self.reserve_steps}: expected an integer >= 1")
        if self.num_workers < 0:
            found.append(f"performance.num_workers={self.num_workers}: expected an integer >= 0")
        from dprc_lightning.sketch import BLOCK_ROWS

        chunk = self.mlp_chunk
        whole = isinstance(chunk, int) and not isinstance(chunk, bool)
        if chunk is not None and not (whole and chunk >= 1 and chunk % BLOCK_ROWS == 0):
            found.append(f"performance.mlp_chunk={chunk}: expected a multiple of {BLOCK_ROWS} tokens, or null")
        for name in ("lean_norms", "offload_checkpoints"):
            if not isinstance(getattr(self, name), bool):
                found.append(f"performance.{name}={getattr(self, name)}: expected true or false")
        found += self._memory_problems()
        kept = self.projection_memory
        if kept is not None and not (
            isinstance(kept, int | float) and not isinstance(kept, bool) and 0 <= kept < math.inf
        ):
            found.append(
                f"performance.projection_memory={self.projection_memory}: expected finite GiB >= 0, or null to keep all"
            )
        return found

    def _memory_problems(self) -> list[str]:
        memory = self.memory
        if memory is None:
            return []
        number = isinstance(memory, int | float) and not isinstance(memory, bool)
        if memory != "auto" and not (number and 0 < float(memory) < math.inf):
            return [f"performance.memory={memory}: expected finite GiB > 0, auto, or null to pick nothing"]
        if self.physical_batch_size is None and self.max_tokens is not None:
            return [
                f"performance.memory={memory}: performance.max_tokens={self.max_tokens} alone allows as many records "
                "of one token, each with sketches of its own; set performance.physical_batch_size too"
            ]
        return []


def _given(value: float | None) -> float:
    assert value is not None, "checked by PrivacyConfig.problems"
    return value


def _refused_projection(projection: str, bound: str, estimator: str) -> str | None:
    from dprc_lightning.accounting.events import StepEvent

    # The accounting does not tell the others apart.
    sketch = "hutchpp" if estimator == "hutchpp" else "hutchinson"
    try:
        StepEvent(1.0, 1.0, sketch_dim=1, projection=projection, bound=bound, estimator=sketch)
    except InvalidArgumentError as error:
        return str(error)
    return None


def _exactly_one(name_a: str, a: float | None, name_b: str, b: float | None) -> list[str]:
    if (a is None) == (b is None):
        state = "neither is set" if a is None else f"both are set ({a} and {b})"
        return [f"{name_a} or {name_b}: {state}; give exactly one"]
    return []
