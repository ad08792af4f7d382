"""How a launch ended."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trainctl.runs.status import State


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The end of an attempt."""

    exit_code: int
    """Code of the launch; 0 only if every rank ended well."""
    state: State
    """finished, failed or stopped."""
    message: str = ""
    """What happened, in a sentence; empty when finished."""
    cause: str = ""
    """The word of the failure's record; empty where there was none."""
    hint: str = ""
    log: Path | None = None
    """The log that tells more, if there is one."""
    log_tail: tuple[str, ...] = ()
    may_pass: bool = False
    """Whether another attempt may end better."""
