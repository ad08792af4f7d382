"""Exit codes, findings of checks, and the one exception type for mistakes of users.

Every room reports a user's mistake as a `Finding`, or raises a `TrainctlError` that carries one or
more. Only the command line turns them into text and an exit code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum, StrEnum
from pathlib import Path
from typing import Any, Self


class ExitCode(IntEnum):
    """Exit codes of commands. A process killed by signal n exits with 128 + n, as in a shell."""

    success = 0
    internal_error = 1
    """A bug in trainctl: the only case that prints a traceback."""
    bad_input = 2
    """A wrong option, key, value or file, or a technique that cannot be trained with yet."""
    does_not_fit = 3
    """The memory budget is larger than a device, host, NVMe or disk."""
    environment = 4
    """This machine is not what the plan needs: devices, memory, packages, ports, space."""
    run_state = 5
    """The folder is not a run, is in use by another launch, or has no checkpoint to resume from;
    or a checkpoint is damaged.
    """
    training_failed = 6
    """A rank ended with an error of its own; its log says which. Or a proof found a difference."""
    requeue = 75
    """Stopped on request after saving (EX_TEMPFAIL of sysexits.h): the same command continues."""
    interrupted = 130
    terminated = 143

    @classmethod
    def of(cls, status: int) -> ExitCode:
        """Return the exit code for the end of a launch, which may have any status."""
        return cls(status) if status in set(cls) else cls.training_failed


def describe_exception(error: BaseException) -> str:
    """Return the type and the message of an exception, whatever its `__str__` does."""
    try:
        text = str(error)
    except Exception:
        text = "its message cannot be printed"
    return f"{type(error).__name__}: {text}".rstrip(": ")


class Severity(StrEnum):
    """Severity of a finding: an error stops `validate` and `launch`, a warning does not."""

    error = "error"
    warning = "warning"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One problem in the user's request."""

    rule: str
    """Stable identifier of the check, such as ``TC012``."""
    message: str
    """The problem, with the values involved."""
    key: str = ""
    """Dotted config key; empty if the finding concerns no single key."""
    hint: str = ""
    """The nearest legal value, or what to do."""
    severity: Severity = Severity.error
    exit_code: ExitCode = ExitCode.bad_input
    """Exit code of a command that stops because of this finding."""
    source: str = ""
    """The file and line, or the override, that set the key; empty if unknown or a default."""

    def set_by(self, source: str) -> Finding:
        """Return a copy of the finding that names what set its key."""
        return replace(self, source=source)

    @property
    def is_error(self) -> bool:
        return self.severity is Severity.error

    def __str__(self) -> str:
        where = f" [{self.source}]" if self.source else ""
        hint = f" ({self.hint})" if self.hint else ""
        return f"{self.severity}: {self.rule}: {self.message}{where}{hint}"

    def to_json(self) -> dict[str, Any]:
        return {
            "rule": self.rule,
            "severity": self.severity.value,
            "key": self.key,
            "message": self.message,
            "hint": self.hint,
            "source": self.source,
            "exit_code": int(self.exit_code),
        }


class TrainctlError(Exception):
    """A failure that a user can act on; never shown with a traceback.

    `message` is one sentence, `hint` says what to do, `findings` holds all problems where there are
    several.
    """

    def __init__(
        self,
        message: str,
        *,
        hint: str = "",
        exit_code: ExitCode = ExitCode.bad_input,
        findings: Sequence[Finding] = (),
    ) -> None:
        super().__init__(message)
        self.is_of_all_ranks = False
        self.message = message
        self.hint = hint
        self.exit_code = exit_code
        self.findings = tuple(findings)
        if hint:  # shown by a traceback
            self.add_note(f"hint: {hint}")

    def __str__(self) -> str:
        return "\n".join((self.message, *map(str, self.findings)))

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without `__init__`, whose arguments differ between subclasses."""
        return type(self).__new__, (type(self), *self.args), self.__dict__

    def of_all_ranks(self) -> Self:
        """Return this error, marked as one that all ranks raise together: they can still save."""
        self.is_of_all_ranks = True
        return self

    @classmethod
    def from_findings(cls, findings: Sequence[Finding]) -> TrainctlError:
        """Return one error for all findings, with the exit code of the first error among them."""
        errors = [finding for finding in findings if finding.is_error]
        count = f"{len(errors)} problem" + ("s" if len(errors) != 1 else "")
        exit_code = errors[0].exit_code if errors else ExitCode.bad_input
        return cls(f"{count} in this configuration", exit_code=exit_code, findings=findings)


class MachineError(TrainctlError):
    """This machine, or a service that it uses, is not what the command needs."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message, hint=hint, exit_code=ExitCode.environment)


class RunStateError(TrainctlError):
    """A run or a checkpoint is missing, damaged, in use, or another's."""

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message, hint=hint, exit_code=ExitCode.run_state)


class StoppedBySignal(BaseException):
    """A signal, whose number is the argument, ended what this process was doing; as
    KeyboardInterrupt, it passes what handles errors.
    """


class RunFailed(TrainctlError):
    """A launched run that failed, with what explains it."""

    path: Path
    """Run directory."""
    cause: str
    """Cause in the failure's record, as `trainctl explain` knows it."""
    log: Path | None
    """The log that tells more."""
    log_tail: tuple[str, ...]
    """Its last lines."""

    def __init__(
        self,
        message: str,
        *,
        path: Path,
        cause: str,
        log: Path | None,
        log_tail: tuple[str, ...],
        **settings: Any,
    ) -> None:
        """Make the error; `settings` are those of `TrainctlError`."""
        super().__init__(message, **settings)
        self.path, self.cause, self.log, self.log_tail = path, cause, log, log_tail
        if log_tail:
            self.add_note("\n".join((f"the end of {log}:", *log_tail)))
