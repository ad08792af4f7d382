"""Tells people what happens to a run: `logging.alerts`, by a process like a logger's.

What is to be told is decided once, by the records, and written into the cursor before anyone is
told; who was told what is written after each. A process that is killed goes on from there. Only one
that is killed between somebody's answer and that write tells him again: with the same `id`, and
`tries` above 1.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from trainctl.config.schema import AlertKind, RunConfig
from trainctl.errors import TrainctlError
from trainctl.monitor.loggers.cursor import read_cursor, read_on
from trainctl.monitor.loggers.delivery import Refused, post, start
from trainctl.monitor.loggers.sending import ALERTS
from trainctl.runs.attempts import config_of
from trainctl.runs.directory import read_plan, run_id
from trainctl.runs.failures import sentence
from trainctl.runs.interventions import account as intervention
from trainctl.runs.interventions import divergence_account
from trainctl.runs.layout import RunPaths
from trainctl.runs.records import Event
from trainctl.runs.status import read_status
from trainctl.runs.stragglers import account as straggler

MOST_WAITING = 100
"""Alerts that wait for one who cannot be reached; of more the oldest are left out."""
MOST_REFUSALS = 3
"""Tries of an alert that its server refuses (HTTP 4xx)."""
_TEXT_LENGTH = 1000

_TOLD: dict[str, tuple[AlertKind, Callable[[Event], str]]] = {
    "failure": (AlertKind.failure, lambda event: f"attempt {event['attempt']}: {sentence(event)}"),
    "restart": (
        AlertKind.restart,
        lambda event: (
            f"restart {event['number']} of {event['of']} from step {event['step']:,}, "
            f"after: {event['cause']}"
        ),
    ),
    "intervention": (AlertKind.spike, intervention),
    "divergence": (AlertKind.spike, divergence_account),
    "straggler": (AlertKind.straggler, straggler),
}
"""Kinds of records that are told, and how."""


@dataclass(frozen=True, slots=True)
class _Target:
    """One who is told."""

    name: str
    """Without secrets: what the cursor knows it as."""
    tell: Callable[[dict[str, Any]], None]
    """Tells it; raises where that fails."""


class Alerter:
    """Reads a run's records and tells of them, from where it was.

    Args:
        run: The run.

    Raises:
        TrainctlError: Its cursor is damaged.
    """

    def __init__(self, run: RunPaths) -> None:
        self._run, self._path = run, run.logger(ALERTS).cursor
        self._config: RunConfig | None = None
        self._asked: dict[int, bool] = {}
        self._id, self._began = run_id(run), time.time()
        self.cursor = read_cursor(self._path)

    def send(self) -> bool:
        """Tell of the next batch of records, and of what could not be told before; whether there
        was a batch.

        Raises:
            TrainctlError: Somebody could not be told, or the records were cut.
        """
        was_read = self._read()
        self._deliver(self._state())
        return was_read

    def _read(self) -> bool:
        """Have what the next batch of records is told by wait; whether there was a batch."""
        cursor, state = self.cursor, self._state()
        events: list[Event] = []
        offset, digest = cursor.offset, cursor.digest
        if self._run.events.exists():
            events, offset, digest = read_on(self._run.events, cursor)
        found = [*self._judge(events, state), *self._quiet(state)]
        self._add(found, state)
        if offset != cursor.offset or found:
            step = state["step"]
            attempt = max([cursor.attempt, *(event["attempt"] for event in events)])
            self._keep(
                replace(cursor, offset=offset, digest=digest, step=step, attempt=attempt), state
            )
        return offset != cursor.offset

    def end(self) -> None:
        """Tell what has not been told, and that the launch has ended.

        All of it waits before anyone is told: one who cannot be told keeps it from nobody else.

        Raises:
            TrainctlError: Somebody could not be told, or the records were cut.
        """
        while self._read():
            pass
        status, state = read_status(self._run), self._state()
        is_over = status is not None and status.state.is_final
        if status is not None and is_over and state["ended"] != status.updated:
            state["ended"] = status.updated
            why = f": {status.message}" if status.message else ""
            text = f"{status.state.value} at step {state['step']:,}{why}"
            told = self._alert(AlertKind.end, text, status.updated, status.attempt, state)
            self._add([told], state)
            self._keep(self.cursor, state)
        self._deliver(state)

    def give_up(self, problem: str) -> None:
        """Write down what is in the way.

        Raises:
            OSError: The disk is full.
        """
        self._config = None  # it may have another
        if problem != self.cursor.problem:
            self.cursor = replace(self.cursor, problem=problem)
            self.cursor.write(self._path)

    def close(self) -> None:
        """Nothing stays open."""

    def _state(self) -> dict[str, Any]:
        """What of the state is not there yet is of a new run."""
        return {
            "number": 0,
            "step": 0,
            "moved": 0.0,
            "is_quiet": False,
            "failed": 0,
            "ended": 0.0,
            "waiting": [],
            "tries": {},
            **(self.cursor.state or {}),
        }

    def _keep(self, cursor: Any, state: dict[str, Any], problem: str | None = None) -> None:
        self.cursor = replace(
            cursor,
            state=state,
            points=state["number"],
            problem=cursor.problem if problem is None else problem,
        )
        self.cursor.write(self._path)

    def _judge(self, events: list[Event], state: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the alerts in records."""
        for event in events:
            kind, attempt = event["event"], event["attempt"]
            now = float(event.get("time", 0.0))
            if kind == "step":
                state["step"], state["moved"], state["is_quiet"] = event["step"], now, False
                state["stepped"] = attempt
            elif kind != "logger" and state.get("stepped") != attempt:  # what comes before a step
                state["moved"], state["is_quiet"] = now, False
            if kind not in _TOLD or (kind == "failure" and state["failed"] == attempt):
                continue  # the other ranks fail for the first one's reason
            if not self._was_asked_for(attempt):
                continue
            state["failed"] = attempt if kind == "failure" else state["failed"]
            name, words = _TOLD[kind]
            yield self._alert(name, words(event), now, attempt, state)

    def _was_asked_for(self, attempt: int) -> bool:
        """Whether an attempt was launched with somebody to tell: what came before is no news."""
        if attempt not in self._asked:
            file = self._run.attempt(attempt).plan
            self._asked[attempt] = (
                not file.is_file() or read_plan(file).config.logging.alerts.are_wanted
            )
        return self._asked[attempt]

    def _quiet(self, state: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """That there was no step for too long; of a program of the user's only where it has told
        of steps before."""
        config = self._configuration()
        if state["is_quiet"] or not state["moved"]:
            return
        if not config.trains_itself and not state["step"]:
            return
        minutes = (time.time() - max(state["moved"], self._began)) / 60
        if minutes < config.logging.alerts.no_progress_minutes:
            return
        state["is_quiet"] = True
        text = f"no step for {minutes:.0f} minutes, the last was {state['step']:,}"
        attempt = self.cursor.attempt
        yield self._alert(AlertKind.no_progress, text, time.time(), attempt, state)

    def _alert(
        self, kind: AlertKind, text: str, when: float, attempt: int, state: dict[str, Any]
    ) -> dict[str, Any]:
        state["number"] += 1
        return {
            "text": f"{self._run.root.name}: {text}"[:_TEXT_LENGTH],
            "kind": kind.value,
            "run": self._run.root.name,
            "run_dir": str(self._run.root),
            "attempt": attempt,
            "step": state["step"],
            "time": when,
            "id": f"{self._id}-{state['number']}",
        }

    def _add(self, found: list[dict[str, Any]], state: dict[str, Any]) -> None:
        """Have alerts wait for all who are to be told."""
        wanted = {kind.value for kind in self._configuration().logging.alerts.kinds}
        names = [target.name for target in self._targets()]
        for alert in found:
            if alert["kind"] in wanted:
                state["waiting"] += [{"to": name, "alert": alert} for name in names]
        for name in names:
            of_it = [each for each in state["waiting"] if each["to"] == name]
            for old in of_it[:-MOST_WAITING]:
                state["waiting"].remove(old)

    def _deliver(self, state: dict[str, Any]) -> None:
        """Tell what waits, each in order; one who cannot be told keeps nobody else waiting."""
        problems = []
        # Those who could not be told last time may take long again.
        for target in sorted(self._targets(), key=lambda each: each.name in state["tries"]):
            for each in [each for each in state["waiting"] if each["to"] == target.name]:
                state["tries"][target.name] = tries = state["tries"].get(target.name, 0) + 1
                self._keep(self.cursor, state)
                try:
                    target.tell({**each["alert"], "tries": tries})
                except Refused as error:
                    problems.append(f"{target.name}: {error}")
                    if tries < MOST_REFUSALS:
                        break
                except (OSError, ValueError, TrainctlError) as error:
                    problems.append(f"{target.name}: {error}")
                    break
                state["waiting"].remove(each)
                del state["tries"][target.name]
                self._keep(self.cursor, state, "" if not problems else None)
        if problems:
            raise TrainctlError("; ".join(problems))

    def _configuration(self) -> RunConfig:
        if self._config is None:
            self._config = config_of(self._run)
        return self._config

    def _targets(self) -> list[_Target]:
        alerts = self._configuration().logging.alerts
        found = [_Target(url, partial(post, url)) for url in dict.fromkeys(alerts.urls)]
        if alerts.command:
            found.append(_Target("the command", partial(start, alerts.command)))
        return found
