"""`status.json`: the state of a run's newest attempt."""

from __future__ import annotations

import os
import socket
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
    """State of an attempt; the last three are final."""

    queued = "queued"
    """Submitted to a scheduler; nothing of it has started."""
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
    """Content of `status.json`: the state of the newest attempt."""

    state: State
    attempt: int
    """Number of the attempt."""
    host: str
    """Machine of the launcher."""
    pid: int
    """Process of the launcher."""
    started: float
    """Start of the attempt, in Unix seconds."""
    updated: float
    """Time of the last change, in Unix seconds."""
    exit_code: int | None = None
    """Exit code of the launch, once it ended."""
    message: str = ""
    """Sentence about its end."""
    schema: int = STATUS_SCHEMA

    @classmethod
    def begin(cls, state: State, attempt: int) -> Status:
        """Return the status of an attempt that this process starts now."""
        now = time.time()
        host, pid = socket.gethostname(), os.getpid()
        return cls(state=state, attempt=attempt, host=host, pid=pid, started=now, updated=now)

    def changed(self, state: State, *, exit_code: int | None = None, message: str = "") -> Status:
        """Return the status with another state, updated now."""
        return replace(self, state=state, exit_code=exit_code, message=message, updated=time.time())


def write_status(run: RunPaths, status: Status) -> None:
    """Replace `status.json`."""
    write_json(run.status, to_plain(status))


def change_status(run: RunPaths, state: State, exit_code: int | None, message: str) -> None:
    """Replace the state of the newest attempt, if the run has a status."""
    status = read_status(run)
    if status is not None:
        write_status(run, status.changed(state, exit_code=exit_code, message=message))


def read_status(run: RunPaths) -> Status | None:
    """Read `status.json`; None before the first launch, or if it is damaged.

    A launcher and an agent that are killed at once leave `starting` or `running` behind;
    `trainctl.runs.lock.holder` tells whether that is still true.
    """
    try:
        return from_plain(Status, read_json(run.status))
    except (OSError, ValueError, TypeError):
        return None
