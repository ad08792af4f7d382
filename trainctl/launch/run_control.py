"""Requests to a launch that runs: to stop, or to save now."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable

from trainctl.errors import ExitCode, TrainctlError
from trainctl.launch.launchers import cancel
from trainctl.runs.attempts import config_of
from trainctl.runs.directory import run_id
from trainctl.runs.layout import RunPaths
from trainctl.runs.listing import RunSummary, summarise
from trainctl.runs.lock import holder
from trainctl.runs.processes import RunTag, terminate_processes
from trainctl.runs.records import Event, EventFollower, events_from_end
from trainctl.runs.requests import Request, file_request, withdraw_request
from trainctl.runs.status import State, read_status, write_status

_POLL_SECONDS = 0.2
_KILL_PATIENCE_SECONDS = 15.0
"""Time that `stop --now` gives a launcher to answer, beyond the ranks' own grace."""
_FORCE_PATIENCE_SECONDS = 60.0
"""Further time after ending the launcher by force: schedulers are slow."""


def ask_to_stop(run: RunPaths, *, now: bool = False) -> str:
    """Ask the launch of a live run to stop; cancel a job that has not started.

    Returns what happens now, in words. With `now` the run ends at once, without saving.
    """
    summary = summarise(run)
    if summary.holder is None and summary.job is not None:
        cancel(summary.job)
        before = read_status(run)
        if before is not None:
            message = "cancelled before it started"
            write_status(run, before.changed(State.stopped, message=message))
        return f"job {summary.job.id} is cancelled"
    # A user's own program reads no requests to save: its launcher ends it.
    ends = now or not config_of(run).trains_itself
    file_request(run, Request.end if ends else Request.stop, "trainctl runs stop")
    return f"asked; it {'ends now' if ends else 'saves at its next step and ends'}"


def wait_for_end(run: RunPaths, *, now: bool = False) -> RunSummary:
    """Wait until no launcher holds the run; with `now`, end one that does not answer by force.

    Raises:
        TrainctlError: The launcher does not answer and is on another machine, or does not end by
            force either (exit code 5).
    """
    patience = config_of(run).launcher.grace_seconds + _KILL_PATIENCE_SECONDS
    deadline = time.monotonic() + patience
    is_forced = False
    while (current := holder(run)) is not None:
        if now and time.monotonic() > deadline:
            if is_forced:
                raise TrainctlError(
                    f"{run.root} does not end: process {current.pid} on {current.host} holds it",
                    hint="it may be stuck in the kernel, by a disk or a network file system (state "
                    "D in `ps`), or in another container; or its scheduler needs more time",
                    exit_code=ExitCode.run_state,
                )
            _end_by_force(run)
            is_forced, deadline = True, time.monotonic() + patience + _FORCE_PATIENCE_SECONDS
        time.sleep(_POLL_SECONDS)
    return summarise(run)


def _end_by_force(run: RunPaths) -> None:
    """End a launcher that does not answer: by its scheduler, or on this machine by a signal."""
    summary = summarise(run)
    if summary.holder is None:
        return
    if summary.job is not None:
        cancel(summary.job)
    elif summary.holder.host == socket.gethostname():
        terminate_processes(RunTag(run_id(run), run.root), grace_seconds=0)
    else:
        raise TrainctlError(
            f"{run.root} does not answer: process {summary.holder.pid} on {summary.holder.host}",
            hint=f"repeat this on {summary.holder.host}",
            exit_code=ExitCode.run_state,
        )


def save_now(run: RunPaths, say: Callable[[str], None]) -> Event:
    """Have a run that trains save at its next step; return the record of the committed checkpoint.

    `say` is called with a sentence once the run has been asked.

    Raises:
        TrainctlError: The run does not train, or ended before it saved (exit code 5).
    """
    if holder(run) is None:
        raise TrainctlError(
            f"{run.root} is not training",
            hint="`trainctl checkpoint ls` shows what it saved",
            exit_code=ExitCode.run_state,
        )
    follower = EventFollower(run.events)
    last = next(events_from_end(run.events, "step"), None)
    since = _place(last) if last else (0, 0)
    file_request(run, Request.checkpoint, "trainctl checkpoint now")
    say("asked; the run saves at its next step")
    saved = _wait_for_save(run, follower, since)
    if saved is None:
        withdraw_request(run, Request.checkpoint)
        raise TrainctlError(f"{run.root} ended before it saved", exit_code=ExitCode.run_state)
    return saved


def _place(event: Event) -> tuple[int, int]:
    """Return the attempt and step of a record. A later attempt may repeat steps."""
    return int(event["attempt"]), int(event["step"])


def _wait_for_save(run: RunPaths, follower: EventFollower, since: tuple[int, int]) -> Event | None:
    """Return the record of the first save at or after `since`; None if the launch ended first.

    A save that was already under way at the request has an earlier step, and does not count.
    """
    while True:
        training = holder(run) is not None  # before the poll: the last records precede the end
        for event in follower.poll():
            if event["event"] == "checkpoint" and _place(event) >= since:
                return event
        if not training:
            return None
        time.sleep(_POLL_SECONDS)
