"""`status.json`: how the newest attempt of a run stands."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from enum import StrEnum

from trainctl.config.codec import from_plain, to_plain
from trainctl.config.reading import read_json
from trainctl.runs.atomic import write_json
from trainctl.runs.layout import RunPaths

STATUS_SCHEMA = 1
"""Version of `status.json`."""


class State(StrEnum):
    """Where an attempt stands; the last three are final."""

    queued = "queued"
    """In a scheduler's hands; nothing of it has started."""
    starting = "starting"
    running = "running"
    finished = "finished"
    failed = "failed"
    stopped = "stopped"

    @property
    def is_final(self) -> bool:
        return self in (State.finished, State.failed, State.stopped)


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """State of the newest attempt."""

    state: State
    attempt: int
    """Its number."""
    host: str
    """Machine of the launcher."""
    pid: int
    """Process of the launcher."""
    started: float
    """Unix seconds."""
    updated: float
    """Unix seconds of the last change."""
    exit_code: int | None = None
    """Exit code of the launch, once it ended."""
    message: str = ""
    """Why it ended, in a sentence."""
    schema: int = STATUS_SCHEMA

    def changed(self, state: State, *, exit_code: int | None = None, message: str = "") -> Status:
        """Return the same attempt in another state, as of now."""
        return replace(self, state=state, exit_code=exit_code, message=message, updated=time.time())


def write_status(run: RunPaths, status: Status) -> None:
    """Replace `status.json`."""
    write_json(run.status, to_plain(status))


def read_status(run: RunPaths) -> Status | None:
    """What `status.json` says; None before the first launch, or if it is damaged.

    A launcher and an agent that are killed at once leave `starting` or `running` behind:
    whether it is still true, `trainctl.runs.lock.holder` tells.
    """
    try:
        return from_plain(Status, read_json(run.status))
    except (OSError, ValueError, TypeError):
        return None
