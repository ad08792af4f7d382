"""Ends of a launch: by signals or its own time limit, and requests of users to stop or to save."""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from types import FrameType
from typing import Any, Self

import psutil

from trainctl.errors import ExitCode, RunStateError, TrainctlError
from trainctl.launchers.interface import Agents, cancel
from trainctl.memory.budget import budget
from trainctl.memory.traced import known_traced_model
from trainctl.plans.types import RunPlan
from trainctl.runs.attempts import config_of
from trainctl.runs.directory import last_attempt, run_id
from trainctl.runs.layout import RunPaths
from trainctl.runs.listing import RunSummary, summarise_run
from trainctl.runs.lock import find_holder
from trainctl.runs.processes import RunTag, terminate_processes
from trainctl.runs.records import Event, EventFollower, events_from_end, iter_events
from trainctl.runs.status import (
    Request,
    State,
    file_request,
    is_requested,
    read_status,
    withdraw_earlier,
    withdraw_request,
    write_status,
)
from trainctl.tuning.speed import step_time

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_SAME_SECONDS = 0.3
"""Signals this close together count as one: `timeout` and other wrappers signal a program and its
group.
"""


_TIME_LIMIT = "the time limit"

_SAVE_BYTES_PER_SECOND = 5e8
"""Speed assumed for the first save: that of a network file system under load."""


class StopHandler:
    """Context in which signals end the launch in good order instead of killing this process.

    The first signal asks the ranks to save and end, if there is something to save. SIGTERM of a
    launch with `launcher.stop_grace_seconds` (from a scheduler that starts it again) always does;
    any other signal does once a step was made, within `launcher.interrupt_grace_seconds`. A second
    signal, the end of that time, or a first signal before the first step is passed to the agents,
    which end their ranks within their grace; another signal kills all at once. SIGHUP does not cut
    a save short: a terminal that closes sends several. All this is done in the handler, so that a
    launcher that is stuck writing to its terminal stops its ranks too. A signal that this process
    was told to ignore (nohup) stays ignored.

    Args:
        stop_grace_seconds: Time to save and end after a scheduler's SIGTERM; 0 means that SIGTERM
            is not a scheduler's.
        interrupt_grace_seconds: Time to save and end after another signal; 0 ends at once.
        limit: The launch's time limit.

    Attributes:
        end_signal: The signal that ended the launch, if one did.
        save_reason: Reason for the request to save and end: a signal's name, or the time limit.
        was_signalled: Whether this process got a signal to end.
        interrupt_signal: The signal that caused the request, unless it was a scheduler's.
        patience_seconds: Time that the ranks have to save and end; None without a limit.
    """

    def __init__(
        self,
        run: RunPaths,
        *,
        stop_grace_seconds: float,
        limit: TimeLimit,
        interrupt_grace_seconds: float = 0.0,
    ) -> None:
        self.end_signal: signal.Signals | None = None
        self.save_reason = ""
        self.interrupt_signal: signal.Signals | None = None
        self.patience_seconds: float | None = None
        self._run = run
        self._grace_seconds = stop_grace_seconds
        self._interrupt_grace_seconds = interrupt_grace_seconds
        self._limit = limit
        self._save_signal: signal.Signals | None = None
        self.was_signalled = self._is_preempted = False
        self._early_signals: list[signal.Signals] | None = None
        self._save_requested_at = self._save_by = float("inf")
        self._agents: Agents | None = None
        self._tag: RunTag | None = None
        self._previous: dict[signal.Signals, Any] = {}

    @classmethod
    def for_launch(cls, run: RunPaths, plan: RunPlan, began: float | None = None) -> Self:
        """Return a `StopHandler` with the graces and the time limit of a plan, as of `began`.

        A user's program reads no requests: signals are only passed to it. Nor does a signal save
        anything in a run that is configured never to save.
        """
        if not plan.config.trains_itself:
            return cls(run, stop_grace_seconds=0.0, limit=TimeLimit(None))
        minutes, launcher = plan.config.training.time_limit_minutes, plan.config.launcher
        saves = plan.config.checkpoint.saves_something
        kinds = ("step", "checkpoint", "weights")
        past = iter_events(run.events, *kinds) if minutes is not None else ()
        return cls(
            run,
            stop_grace_seconds=launcher.stop_grace_seconds,
            interrupt_grace_seconds=launcher.interrupt_grace_seconds if saves else 0.0,
            limit=TimeLimit(minutes, past, began, **_estimates(plan)),
        )

    @property
    def is_stopping(self) -> bool:
        """Whether the launch is to end, at once or when it has saved."""
        return self.end_signal is not None or bool(self.save_reason)

    @property
    def estimates(self) -> str:
        """Durations that the time limit had to estimate when it was near; may be empty."""
        return self._limit.estimates if self.save_reason == _TIME_LIMIT else ""

    @property
    def is_cancelled(self) -> bool:
        """Whether a scheduler has told both this process and an agent to end."""
        return self.was_signalled and self._is_preempted

    @property
    def code_when_saved(self) -> int:
        """Exit code of a launch whose ranks saved and ended on request."""
        if self.interrupt_signal is not None:
            return 128 + self.interrupt_signal
        return int(ExitCode.requeue if self.save_reason else ExitCode.success)

    def forward_to(self, agents: Agents, tag: RunTag) -> None:
        """Set the agents to stop; stop them at once if a signal came before they were started."""
        self._agents, self._tag = agents, tag
        if self.end_signal:
            agents.terminate()

    def observe(self, event: Event) -> None:
        """Take in a record of the attempt: durations of steps and saves, an agent's SIGTERM."""
        self._limit.observe(event)
        if event["event"] == "preempted" and not self._is_preempted:
            self._is_preempted = True
            if self.end_signal is None:
                reason = f"SIGTERM to node {event['node']}"
                self._request_save_within(self._grace_seconds, signal.SIGTERM, reason)

    def check_time(self) -> None:
        """Act on the clock and on requests. Call it again and again.

        Asks the ranks to end before the time limit, ends a save that takes too long, and follows a
        request to end.
        """
        if self.end_signal is None and is_requested(self._run, Request.end):
            withdraw_request(self._run, Request.end)
            self._end(signal.SIGTERM)
        if not self.save_reason and self._limit.is_near():
            self._request_save(_TIME_LIMIT)
        if self._save_signal is not None and time.monotonic() > self._save_by:
            self._save_by = float("inf")
            self._end(self._save_signal)

    def __enter__(self) -> Self:
        # Requests from before the attempt was made were meant for an earlier launch. Later ones
        # are for this launch, which may have started a while after the attempt was made.
        newest = self._run.attempt(last_attempt(self._run)).plan
        made = newest.stat().st_mtime if newest.is_file() else time.time()
        withdraw_earlier(self._run, made)
        for number in _STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        if self.save_reason:  # the ranks may not have followed it
            with suppress(OSError):
                withdraw_request(self._run, Request.stop)
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        received = signal.Signals(number)
        if self._early_signals is not None:  # one that interrupts the decision about the first
            self._early_signals.append(received)
            return
        is_first, self.was_signalled = not self.was_signalled, True
        if is_first and self.end_signal is None:
            early: list[signal.Signals] = []
            self._early_signals = early
            is_saving = self._save_for(received)
            self._early_signals = None
            for each in early if is_saving else [received, *early]:
                self._end_unless_saving(each)
        else:
            self._end_unless_saving(received)

    def _end_unless_saving(self, received: signal.Signals) -> None:
        """End the launch, unless a save is under way and the signal is a copy of the first."""
        saves = self._save_signal is not None and self.end_signal is None
        is_same = time.monotonic() - self._save_requested_at < _SAME_SECONDS
        if not (saves and (is_same or received is signal.SIGHUP)):
            self._end(received)

    def _save_for(self, number: signal.Signals) -> bool:
        """Ask the ranks to save and end, and return True, if this signal calls for it."""
        if number is signal.SIGTERM and self._grace_seconds > 0:
            self._request_save_within(self._grace_seconds, number, number.name)
        elif self._interrupt_grace_seconds > 0 and self._has_steps():
            self.interrupt_signal = number
            self._request_save_within(self._interrupt_grace_seconds, number, number.name)
        else:
            return False
        return True

    def _has_steps(self) -> bool:
        """Return True if the running attempt has made a step that its ranks can still save.

        Reads the file of records: a step counts from its record on, which `observe` may see later.
        """
        if self._tag is None:
            return False
        try:
            last = next(events_from_end(self._run.events, "step", "failure", "end"), {})
        except TrainctlError:
            return False
        return (last.get("event"), last.get("attempt")) == ("step", self._tag.attempt)

    def _request_save_within(self, seconds: float, number: signal.Signals, reason: str) -> None:
        if self._save_signal is None:
            self._save_signal, self.patience_seconds = number, seconds
            self._save_requested_at = time.monotonic()
            self._save_by = self._save_requested_at + seconds
            self._request_save(reason)

    def _request_save(self, reason: str) -> None:
        self.save_reason = self.save_reason or reason
        try:
            file_request(self._run, Request.stop, reason)
        except OSError:  # the disk is full: nothing could be saved either
            self._end(signal.SIGTERM)

    def _end(self, number: signal.Signals) -> None:
        is_first = self.end_signal is None
        self.end_signal = self.end_signal or number
        if self._agents is None or self._tag is None:
            return
        if is_first:
            self._agents.terminate()
        else:
            terminate_processes(self._tag, grace_seconds=0)


class TimeLimit:
    """Decides when a launch has to save and end, to be gone before its time limit.

    The margin is twice the longest save and twice the longest time between two steps in all the
    run's records, and a tenth of the limit (at most a minute) for processes to end. What was never
    seen counts by its estimate. An evaluation does not count, since it ends at its next batch.
    Steps and estimates make the margin no more than half of the limit: otherwise, once a step has
    hung for hours, each launch would end after its first step, to be requeued for ever.

    Args:
        minutes: The limit; None is no limit.
        past: Records of the run so far.
        began: Unix time from which it counts; None is the start of this process.
    """

    def __init__(
        self,
        minutes: float | None,
        past: Iterable[Event] = (),
        began: float | None = None,
        *,
        save_seconds: float = 0.0,
        step_seconds: float = 0.0,
    ) -> None:
        self._seconds = float("inf") if minutes is None else minutes * 60
        age = time.time() - (psutil.Process().create_time() if began is None else began)
        self._started = time.monotonic() - age
        self._longest_save = self._longest_step = 0.0
        self._estimated_save, self._estimated_step = save_seconds, step_seconds
        self._last_step: Event | None = None
        for event in past:
            self.observe(event)

    @property
    def margin_seconds(self) -> float:
        """Time before the limit at which the launch is asked to end."""
        margin = 2 * self._longest_save + min(60.0, self._seconds / 10)
        unsure = 2 * (self._longest_step or self._estimated_step)
        unsure += 0.0 if self._longest_save else 2 * self._estimated_save
        return margin + min(unsure, max(0.0, self._seconds / 2 - margin))

    @property
    def estimates(self) -> str:
        """Durations that count by their estimates, in words; empty if all were seen."""
        kinds = (
            ("save", self._longest_save, self._estimated_save),
            ("step", self._longest_step, self._estimated_step),
        )
        found = [f"a {kind} is taken to last {s:.3g} s" for kind, seen, s in kinds if not seen]
        return f"{' and '.join(found)}, as none was seen yet" if found else ""

    def observe(self, event: Event) -> None:
        """Update the longest save and step from a record."""
        if event["event"] in ("checkpoint", "weights"):
            self._longest_save = max(self._longest_save, event.get("seconds", 0.0))
        elif event["event"] == "step":
            last, self._last_step = self._last_step, event
            if last is not None and last["attempt"] == event["attempt"]:
                evaluation = event.get("seconds", {}).get("evaluation", 0.0)
                between = event["time"] - last["time"] - evaluation
                self._longest_step = max(self._longest_step, between)

    def is_near(self) -> bool:
        """Return True if it is time to save and end."""
        return time.monotonic() - self._started > self._seconds - self.margin_seconds


def _estimates(plan: RunPlan) -> dict[str, float]:
    """Return the estimates of `TimeLimit`; none without a limit, or of a model that is unknown."""
    traced, model = known_traced_model(plan.config), plan.config.model
    is_known = traced is not None or not model.needs_trace
    if plan.config.training.time_limit_minutes is None or model.is_module or not is_known:
        return {}
    saved = budget(plan, traced).checkpoint_bytes or 0
    step_seconds = step_time(plan).seconds
    return {"save_seconds": saved / _SAVE_BYTES_PER_SECOND, "step_seconds": step_seconds}


_POLL_SECONDS = 0.2
_KILL_PATIENCE_SECONDS = 15.0
"""Time that `stop --now` gives a launcher to answer, beyond the ranks' own grace."""
_FORCE_PATIENCE_SECONDS = 60.0
"""Further time after ending the launcher by force: schedulers are slow."""


def ask_to_stop(run: RunPaths, *, now: bool = False) -> str:
    """Ask the launch of a live run to stop; cancel a job whose launcher is not known to run.

    Returns what happens now, in words. With `now` the run ends at once, without saving.
    """
    summary = summarise_run(run)
    if summary.holder is None and summary.job is not None:
        cancel(summary.job)
        message = f"job {summary.job.id} is cancelled"
        if (before := read_status(run)) is not None:
            write_status(run, before.changed(State.stopped, message=message))
        return message
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
    while (current := find_holder(run)) is not None:
        if now and time.monotonic() > deadline:
            if is_forced:
                raise RunStateError(
                    f"{run.root} does not end: process {current.pid} on {current.host} holds it",
                    hint="it may be stuck in the kernel, by a disk or a network file system (state "
                    "D in `ps`), or in another container; or its scheduler needs more time",
                )
            _end_by_force(run)
            is_forced, deadline = True, time.monotonic() + patience + _FORCE_PATIENCE_SECONDS
        time.sleep(_POLL_SECONDS)
    return summarise_run(run)


def _end_by_force(run: RunPaths) -> None:
    """End a launcher that does not answer: by its scheduler, or on this machine by a signal."""
    summary = summarise_run(run)
    if summary.holder is None:
        return
    if summary.job is not None:
        cancel(summary.job)
    elif summary.holder.host == socket.gethostname():
        terminate_processes(RunTag(run_id(run), run.root), grace_seconds=0)
    else:
        raise RunStateError(
            f"{run.root} does not answer: process {summary.holder.pid} on {summary.holder.host}",
            hint=f"repeat this on {summary.holder.host}",
        )


def save_now(run: RunPaths, say: Callable[[str], None]) -> Event:
    """Have a run that trains save at its next step; return the record of the committed checkpoint.

    `say` is called with a sentence once the run has been asked.

    Raises:
        TrainctlError: The run does not train, or ended before it saved (exit code 5).
    """
    if find_holder(run) is None:
        raise RunStateError(
            f"{run.root} is not training", hint="`trainctl checkpoint ls` shows what it saved"
        )
    follower = EventFollower(run.events)
    last = next(events_from_end(run.events, "step"), None)
    since = _attempt_and_step(last) if last else (0, 0)
    file_request(run, Request.checkpoint, "trainctl checkpoint now")
    say("asked; the run saves at its next step")
    saved = _wait_for_save(run, follower, since)
    if saved is None:
        withdraw_request(run, Request.checkpoint)
        raise RunStateError(f"{run.root} ended before it saved")
    return saved


def _attempt_and_step(event: Event) -> tuple[int, int]:
    """Return the attempt and step of a record. A later attempt may repeat steps."""
    return int(event["attempt"]), int(event["step"])


def _wait_for_save(run: RunPaths, follower: EventFollower, since: tuple[int, int]) -> Event | None:
    """Return the record of the first save at or after `since`; None if the launch ended first.

    A save that was already under way at the request has an earlier step, and does not count.
    """
    while True:
        training = find_holder(run) is not None  # before the poll: the last records precede the end
        for event in follower.poll():
            if event["event"] == "checkpoint" and _attempt_and_step(event) >= since:
                return event
        if not training:
            return None
        time.sleep(_POLL_SECONDS)
