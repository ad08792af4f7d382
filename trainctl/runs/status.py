"""State of a run's newest attempt, and requests to it: `status.json`, `job.json`, heartbeats.

The launcher writes `status.json`, and `job.json` once a scheduler has accepted the attempt, or
before it is asked if the job's name is known by then. Each rank writes heartbeats, its phase and
the time, which its node's agent reads. Their times are of the machine's monotonic clock, which all
of its processes share and nobody can set, so a heartbeat is read only on the machine of its rank.

Requests to the launch are files in the run's `requests/` folder. Anyone who may write there can
make one. Rank 0 looks once a step and all ranks agree, so a request is never followed by only some
ranks. A file is renamed into place; its name is the request.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

from trainctl.config.codec import from_plain, to_plain
from trainctl.config.reading import read_json
from trainctl.runs.files import (
    ensure_folder,
    open_as_its_folder,
    remove_stale_temporary,
    write_json,
)
from trainctl.runs.layout import AttemptPaths, RunPaths

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
    `trainctl.runs.lock.find_holder` tells whether that is still true.
    """
    try:
        return from_plain(Status, read_json(run.status))
    except (OSError, ValueError, TypeError):
        return None


JOB_SCHEMA = 1
"""Version of `job.json`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerJob:
    """A scheduler's job that runs an attempt."""

    kind: str
    """The launcher: `slurm`, `kubernetes`, `ray`."""
    id: str
    """The scheduler's job id, such as `4711` or `4711_3` (an array's task)."""
    submitted: float
    """Time of submission, in Unix seconds."""
    host: str
    """Machine that it was submitted from."""
    schema: int = JOB_SCHEMA


def write_job(attempt: AttemptPaths, job: SchedulerJob) -> None:
    """Record the job of an attempt."""
    write_json(attempt.job, to_plain(job))


def read_job(attempt: AttemptPaths) -> SchedulerJob | None:
    """Return the job of an attempt; None if no scheduler has it, or the file is damaged."""
    try:
        return from_plain(SchedulerJob, read_json(attempt.job))
    except (OSError, ValueError, TypeError):
        return None


_LINE_BYTES = 128
"""Length of every beat, since a beat overwrites the one before it."""


_MAX_DOING_LENGTH = 40
"""Longest `doing` in characters: leaves room for the rest of the line."""


class Phase(StrEnum):
    """Phase of a rank's work."""

    start = "start"
    step = "step"
    evaluate = "evaluate"
    save = "save"
    end = "end"

    @property
    def is_slow(self) -> bool:
        """Whether a rank may be silent for long: it takes longer with the model's size."""
        return self in (Phase.start, Phase.save, Phase.end)


@dataclass(frozen=True, slots=True)
class Beat:
    """One heartbeat."""

    monotonic: float
    """Seconds of this machine's monotonic clock."""
    phase: Phase
    """Phase that the rank has entered."""
    step: int
    """Optimizer steps done."""
    doing: str = ""
    """Activity in plain words; empty where the phase is enough."""


class Heartbeat:
    """Writer of a rank's beats: one `pwrite` of a line, no sync, cheap enough for every step.

    Args:
        path: The rank's file; truncated, or made with its folder.
        check: Called with every beat; its error ends the rank.
    """

    def __init__(self, path: Path, check: Callable[[], None] = lambda: None) -> None:
        self._check = check
        ensure_folder(path.parent)
        self._descriptor = open_as_its_folder(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        self._step = 0
        self.beat(Phase.start)

    def beat(self, phase: Phase, step: int | None = None, doing: str = "") -> None:
        """Write a beat for the phase that this rank enters.

        A full disk loses at most this beat: the file has its blocks after the first one.

        Args:
            step: Optimizer steps done; None keeps the last number.
            doing: Activity in a few plain words.
        """
        self._check()
        self._step = self._step if step is None else step
        record = {"monotonic": time.monotonic(), "phase": phase.value, "step": self._step}
        record |= {"doing": doing[:_MAX_DOING_LENGTH]} if doing else {}
        line = json.dumps(record).ljust(_LINE_BYTES - 1) + "\n"
        try:
            os.pwrite(self._descriptor, line.encode(), 0)
        except OSError as error:
            print(f"cannot write a heartbeat: {error}", flush=True)


def read_beat(path: Path) -> Beat | None:
    """Return the last beat; None before the first, or while one is being written."""
    try:
        record = read_json(path)
        doing = str(record["doing"]) if "doing" in record else ""
        return Beat(float(record["monotonic"]), Phase(record["phase"]), int(record["step"]), doing)
    except (OSError, ValueError, TypeError, KeyError):
        return None


class Request(StrEnum):
    """Kind of request."""

    checkpoint = "checkpoint"
    """Save at the next step and continue."""
    stop = "stop"
    """Save at the next step and end in good order."""
    end = "end"
    """End at once without saving. The launcher follows it, as if it got SIGTERM."""


def file_request(run: RunPaths, request: Request, reason: str = "") -> None:
    """Make a request to the launch that holds the run; repeating a pending request changes nothing.

    Args:
        reason: Reason, for a person who looks.

    Raises:
        OSError: The folder cannot be written.
    """
    ensure_folder(run.requests)
    write_json(
        run.requests / request.value, {"time": time.time(), "pid": os.getpid(), "reason": reason}
    )


def pending_requests(run: RunPaths) -> set[Request]:
    """Return the requests that have not been followed yet. Lists one folder."""
    try:
        names = os.listdir(run.requests)  # noqa: PTH208  (once a step: no object for each name)
    except OSError:
        return set()
    return {Request(name) for name in names if name in Request.__members__}


def is_requested(run: RunPaths, request: Request) -> bool:
    """Return True if the request is pending; False if the folder cannot be read."""
    return request in pending_requests(run)


def withdraw_earlier(run: RunPaths, moment: float) -> None:
    """Withdraw requests made before a moment, in Unix seconds: they were for another launch."""
    remove_stale_temporary(run.requests, before=moment)
    for request in pending_requests(run):
        with suppress(FileNotFoundError):
            if (run.requests / request.value).stat().st_mtime < moment:
                withdraw_request(run, request)


def withdraw_request(run: RunPaths, request: Request) -> None:
    """Withdraw a request, or mark it as followed."""
    (run.requests / request.value).unlink(missing_ok=True)
