"""What can go wrong, in one place: the exit codes, the findings of a check, the one error type.

Every room reports a user's mistake as a `Finding`, or raises a `TrainctlError` that carries one or
more. Only the command line turns them into text and an exit code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum, StrEnum
from typing import Any


class ExitCode(IntEnum):
    """How a command ended. A process ended by signal n exits with 128 + n, as a shell has it."""

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
    """The folder is not a run, is in use by another launch, or has no checkpoint to go on from;
    or a checkpoint is damaged."""
    training_failed = 6
    """A rank ended with an error of its own; its log says which."""
    requeue = 75
    """Asked to stop, saved and stopped (EX_TEMPFAIL of sysexits.h): start the same again."""
    interrupted = 130
    terminated = 143


def describe_exception(error: BaseException) -> str:
    """Return the type and the message of an exception, whatever its `__str__` does."""
    try:
        text = str(error)
    except Exception:
        text = "its message cannot be printed"
    return f"{type(error).__name__}: {text}".rstrip(": ")


class Severity(StrEnum):
    """An error stops `validate` and `launch`; a warning is printed and recorded."""

    error = "error"
    warning = "warning"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is wrong with what the user asked for."""

    rule: str
    """Stable identifier of the check, such as ``TC012``."""
    message: str
    """What is wrong, with the values."""
    key: str = ""
    """Dotted config key it is about; empty when it is about no single key."""
    hint: str = ""
    """The nearest legal value, or what to do."""
    severity: Severity = Severity.error
    """Whether it stops a launch."""
    exit_code: ExitCode = ExitCode.bad_input
    """How a command that stops for it ends."""
    source: str = ""
    """What set the key: a file and line, or the override; empty if unknown or a default."""

    def set_by(self, source: str) -> Finding:
        """Return the same finding, naming what set its key."""
        return replace(self, source=source)

    @property
    def is_error(self) -> bool:
        return self.severity is Severity.error


class TrainctlError(Exception):
    """A failure that a user can act on; never shown with a traceback.

    Args:
        message: What went wrong, in one sentence.
        hint: What to do about it.
        exit_code: The kind of failure.
        findings: All problems found, when there is a list of them.
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
        self.message = message
        self.hint = hint
        self.exit_code = exit_code
        self.findings = tuple(findings)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without `__init__`, whose arguments differ between subclasses."""
        return type(self).__new__, (type(self), *self.args), self.__dict__

    @classmethod
    def from_findings(cls, findings: Sequence[Finding]) -> TrainctlError:
        """Return one error for all problems; the first error's exit code is the command's."""
        errors = [finding for finding in findings if finding.is_error]
        count = f"{len(errors)} problem" + ("s" if len(errors) != 1 else "")
        exit_code = errors[0].exit_code if errors else ExitCode.bad_input
        return cls(f"{count} in this configuration", exit_code=exit_code, findings=findings)
