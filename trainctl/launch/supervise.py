"""From the start of an attempt to its end: records, signals, teardown, status. Any launcher."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from trainctl.launch.outcome import Outcome
from trainctl.runs.failures import describe, sentence, signal_name
from trainctl.runs.layout import AttemptPaths, RunPaths
from trainctl.runs.processes import RunTag, sweep
from trainctl.runs.records import Event, EventFollower, EventWriter
from trainctl.runs.status import State, Status, write_status

_POLL_SECONDS = 0.1
_AGENT_MARGIN_SECONDS = 1.0
"""What an agent may take beyond the grace to end its ranks and itself."""

_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

Agent = subprocess.Popen[bytes]


@dataclass(frozen=True, slots=True)
class Attempt:
    """What is supervised.

    Attributes:
        run: The run.
        paths: The attempt's files.
        tag: What its processes carry.
        ranks: How many it has.
    """

    run: RunPaths
    paths: AttemptPaths
    tag: RunTag
    ranks: int


def supervise(
    attempt: Attempt,
    start: Callable[[], Agent],
    on_event: Callable[[Event], None],
    *,
    grace_seconds: float,
) -> Outcome:
    """Start the agent, pass on records, and return when it has ended and nothing of it is left.

    Args:
        attempt: What it is.
        start: Starts the agent.
        on_event: Called with each record of the attempt.
        grace_seconds: Between SIGTERM and SIGKILL.
    """
    now = time.time()
    status = Status(
        state=State.starting,
        attempt=attempt.paths.number,
        host=socket.gethostname(),
        pid=os.getpid(),
        started=now,
        updated=now,
    )
    write_status(attempt.run, status)
    records = _Records(attempt, on_event)
    with EventWriter(attempt.run.events, attempt.paths.number) as writer, StopSignals() as stop:
        writer.write("launch", host=status.host, pid=status.pid, ranks=attempt.ranks)
        agent = start()
        try:
            stop.forward_to(agent, attempt.tag)
            deadline = None
            while agent.poll() is None:
                records.poll()
                if status.state is State.starting and records.has_started:
                    status = status.changed(State.running)
                    write_status(attempt.run, status)
                if deadline is None and (stop.received or records.failure):
                    deadline = time.monotonic() + grace_seconds + _AGENT_MARGIN_SECONDS
                if deadline is not None and time.monotonic() > deadline:
                    sweep(attempt.tag, grace_seconds=0)
                time.sleep(_POLL_SECONDS)
        except BaseException as error:  # of on_event
            agent.terminate()
            sweep(attempt.tag, grace_seconds=grace_seconds)
            write_status(attempt.run, status.changed(State.failed, message=f"launcher: {error}"))
            raise
        stuck = sweep(attempt.tag, grace_seconds=grace_seconds)
        code = agent.returncode
        records.poll()
        if code != 0 and not records.failure and not stop.received:
            writer.write("failure", **_agent_death(attempt, agent.pid, code))
            records.poll()
        outcome = _outcome(code, stop.received, records.failure, stuck)
        write_status(
            attempt.run,
            status.changed(outcome.state, exit_code=outcome.exit_code, message=outcome.message),
        )
        return outcome


class _Records:
    """Passes records on, and keeps the first failure."""

    def __init__(self, attempt: Attempt, on_event: Callable[[Event], None]) -> None:
        self._follower = EventFollower(attempt.run.events, attempt.paths.number)
        self._on_event = on_event
        self.failure: Event | None = None
        self.has_started = False

    def poll(self) -> None:
        for event in self._follower.poll():
            kind = event["event"]
            self.has_started |= kind in ("start", "step")
            if kind == "failure" and self.failure is None:
                self.failure = event
            self._on_event(event)


class StopSignals:
    """While it is entered, signals end the attempt instead of this process.

    The first is passed to the agent, which ends its ranks within the grace; another kills all at
    once. Both are done in the handler, so that a launcher that is stuck writing to its terminal
    stops its ranks too. A signal that this process was told to ignore (nohup) stays ignored.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        self._agent: Agent | None = None
        self._tag: RunTag | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def forward_to(self, agent: Agent, tag: RunTag) -> None:
        """The agent to stop; at once if a signal came before it was started."""
        self._agent, self._tag = agent, tag
        if self.received:
            agent.terminate()

    def __enter__(self) -> Self:
        for number in _STOP_SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        is_first = self.received is None
        if is_first:
            self.received = signal.Signals(number)
        if self._agent is None or self._tag is None:
            return
        if is_first:
            self._agent.terminate()
        else:
            sweep(self._tag, grace_seconds=0)


def _agent_death(attempt: Attempt, pid: int, code: int) -> dict[str, Any]:
    """A `failure` record for an agent that ended without writing one."""
    log = attempt.paths.agent_log(0)
    fields = describe(code, log)
    fields["message"] = f"the agent (node 0, process {pid}) {fields['message']}"
    return {"rank": None, "node": 0, "host": socket.gethostname(), "pid": pid, **fields}


def _outcome(
    code: int, received: signal.Signals | None, failure: Event | None, stuck: set[int]
) -> Outcome:
    left = f"; processes {sorted(stuck)} do not end, not even by SIGKILL" if stuck else ""
    if code == 0:
        return Outcome(exit_code=0, state=State.finished)
    if received is not None:
        return Outcome(
            exit_code=128 + received,
            state=State.stopped,
            message=f"stopped by {signal_name(received)}{left}",
        )
    assert failure is not None
    return Outcome(
        exit_code=code if code > 0 else 128 - code,
        state=State.failed,
        message=sentence(failure) + left,
        hint=failure["hint"],
        log=Path(failure["log"]),
        log_tail=tuple(failure["log_tail"]),
    )
