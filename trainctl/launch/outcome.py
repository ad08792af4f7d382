"""How a launch ended."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trainctl.runs.status import State


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The end of an attempt.

    Attributes:
        exit_code: Code of the launch; 0 only if every rank ended well.
        state: finished, failed or stopped.
        message: What happened, in a sentence; empty when finished.
        cause: The word of the failure's record; empty where there was none.
        hint: What may help.
        log: The log that tells more, if there is one.
        log_tail: Its last lines.
        may_pass: Whether another attempt may end better.
    """

    exit_code: int
    state: State
    message: str = ""
    cause: str = ""
    hint: str = ""
    log: Path | None = None
    log_tail: tuple[str, ...] = ()
    may_pass: bool = False
