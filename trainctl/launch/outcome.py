"""Outcome of a launch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trainctl.runs.status import State


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """End of an attempt, and exit code of its launch."""

    exit_code: int
    """Exit code of the launch; 0 only if every rank ended well."""
    state: State
    """finished, failed, stopped, or queued if a scheduler has taken it."""
    message: str = ""
    """Sentence about the end; empty when finished."""
    cause: str = ""
    """`cause` of the failure's record; empty if nothing failed."""
    hint: str = ""
    log: Path | None = None
    """The log that tells more, if there is one."""
    log_tail: tuple[str, ...] = ()
    is_transient: bool = False
    """Whether another attempt may end better."""
