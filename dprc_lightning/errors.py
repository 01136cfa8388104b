"""Typed errors: one line each, naming the setting as the user wrote it, its value, and the remedy.

Everything this package raises on purpose derives from `DPRCError`, so that one ``except`` catches all of it.
"""

from collections.abc import Sequence
from typing import Any


class DPRCError(Exception):
    """Base class of all errors that this package raises on purpose."""


class InvalidArgumentError(DPRCError, ValueError):
    """A value that cannot be used.

    Args:
        name: The argument as the caller wrote it.
        value: What was passed.
        remedy: What is accepted, or what to do instead.
    """

    def __init__(self, name: str, value: Any, remedy: str) -> None:
        self.name, self.value, self.remedy = name, value, remedy
        super().__init__(f"{name}={value!r}: {remedy}")


class ConfigurationError(DPRCError, ValueError):
    """Every contradiction found in a configuration, raised together and before any work.

    Args:
        problems: One line per problem, each naming the setting, its value and the remedy.
    """

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(self.problems))


class CalibrationError(DPRCError, ValueError):
    """No noise multiplier in the supported range meets the privacy target."""


class AccountingResourceError(DPRCError, MemoryError):
    """The privacy accounting would need more memory or time than it may take."""


class LedgerError(DPRCError):
    """The privacy ledger cannot be trusted or written: nothing may be trained on."""


class SecretError(DPRCError):
    """The run secret is missing, unreadable, or readable by others."""


class CheckpointError(DPRCError):
    """A checkpoint cannot be written, is missing or damaged, or holds what could run code when it is loaded."""


class ReportError(DPRCError):
    """A run's report is missing or damaged, and cannot be made again."""


class ExportError(DPRCError):
    """A run's model cannot be exported as asked."""


class UnsupportedModuleError(DPRCError, TypeError):
    """A trainable parameter, module or mode for which per-record gradient norms are not implemented."""


class LossShapeError(DPRCError, ValueError):
    """The losses are not a tensor of shape [B] with one entry per record, or not connected to the model."""


class StepOrderError(DPRCError, RuntimeError):
    """The calls of one logical step came in an order that would break the guarantee."""


class UnclippedGradientError(DPRCError, RuntimeError):
    """A gradient reached a protected parameter without passing the clipping."""


class UnusedParameterError(DPRCError, RuntimeError):
    """A trainable parameter that no loss reaches."""


class IsolationError(DPRCError, RuntimeError):
    """A record's loss or norm moved when another record of the batch was changed."""


class NonFiniteRecordError(DPRCError, FloatingPointError):
    """A record's gradient norm is NaN or infinite."""


class UnprotectedStrategyError(DPRCError, TypeError):
    """A strategy without the noise hook was given to a private module."""


class DatasetError(DPRCError, ValueError):
    """A data set or model source is missing or malformed."""


class BenchError(DPRCError, RuntimeError):
    """A benchmark could not be run to its end."""


class RankZeroError(DPRCError, RuntimeError):
    """Rank 0 stopped, so this rank does too; rank 0's own message says why."""


class InterruptedRun(SystemExit):
    """A signal ended a run after a whole step; everything is saved. A script ends with status 128 + signal.

    Not an error, and no Exception: ``except Exception`` must not go on with a model that is half trained.

    Args:
        signal: Its number.
        message: One line: after which step, and how to go on.
    """

    def __init__(self, signal: int, message: str) -> None:
        super().__init__(128 + signal)
        self.signal, self.message = signal, message

    def __str__(self) -> str:
        return self.message
