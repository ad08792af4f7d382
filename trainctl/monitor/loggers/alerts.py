"""Alerts about a run (`logging.alerts`), sent by a process like a logger's.

An alert is decided once, from the records, and written into the cursor before it is sent, by a POST
to a webhook or by a program of the user's; each successful delivery is written after it. A process
that is killed continues from there. Only if it is killed between a recipient's answer and that
write is the alert sent again: with the same `id`, and `tries` above 1.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from trainctl.config.schema import AlertKind, RunConfig
from trainctl.config.secrets import resolve_text
from trainctl.errors import TrainctlError
from trainctl.monitor.loggers.delivery import ALERTS, read_cursor, read_on
from trainctl.runs.attempts import config_of
from trainctl.runs.directory import read_plan, run_id
from trainctl.runs.event_descriptions import (
    describe_divergence,
    describe_intervention,
    describe_mirror_problem,
    describe_straggler,
)
from trainctl.runs.failures import describe_failure
from trainctl.runs.layout import RunPaths
from trainctl.runs.processes import PARENT_VARIABLE, pdeathsig_command
from trainctl.runs.records import Event
from trainctl.runs.status import read_status

MOST_WAITING = 100
"""Most alerts that wait for an unreachable recipient; the oldest beyond that are dropped."""
MOST_REFUSALS = 3
"""Most tries of an alert that its server refuses (HTTP 4xx)."""
_TEXT_LENGTH = 1000

_ALERTS_BY_EVENT: dict[str, tuple[AlertKind, Callable[[Event], str]]] = {
    "failure": (
        AlertKind.failure,
        lambda event: f"attempt {event['attempt']}: {describe_failure(event)}",
    ),
    "restart": (
        AlertKind.restart,
        lambda event: (
            f"restart {event['number']} of {event['of']} from step {event['step']:,}, "
            f"after: {event['cause']}"
        ),
    ),
    "intervention": (AlertKind.spike, describe_intervention),
    "divergence": (AlertKind.spike, describe_divergence),
    "straggler": (AlertKind.straggler, describe_straggler),
    "mirror": (AlertKind.failure, describe_mirror_problem),
}
"""Kinds of records that cause an alert: the alert's kind, and its text."""


@dataclass(frozen=True, slots=True)
class _Target:
    """One recipient of alerts."""

    name: str
    """Name in the cursor, without secrets."""
    tell: Callable[[dict[str, Any]], None]
    """Sends an alert; raises if that fails."""


class Alerter:
    """Reads a run's records from the cursor on, and sends alerts about them.

    Raises:
        TrainctlError: Its cursor is damaged.
    """

    def __init__(self, run: RunPaths) -> None:
        self._run, self._path = run, run.companion(ALERTS).cursor
        self._config: RunConfig | None = None
        self._asked: dict[int, bool] = {}
        self._id, self._began = run_id(run), time.time()
        self.cursor = read_cursor(self._path)

    def send(self) -> bool:
        """Read the next batch of records, and send new and undelivered alerts.

        Returns:
            Whether there was a batch.

        Raises:
            TrainctlError: A recipient could not be reached, or the records were cut.
        """
        was_read = self._read()
        self._deliver(self._state())
        return was_read

    def _read(self) -> bool:
        """Queue the alerts of the next batch of records; return True if there was a batch."""
        cursor, state = self.cursor, self._state()
        events: list[Event] = []
        position, digest = cursor.position, cursor.digest
        if self._run.events.exists():
            events, position, digest = read_on(self._run.events, cursor)
        found = [*self._judge(events, state), *self._quiet(state)]
        self._add(found, state)
        if position != cursor.position or found:
            attempt = max([cursor.attempt, *(event["attempt"] for event in events)])
            self._keep(cursor.moved(position, digest, step=state["step"], attempt=attempt), state)
        return position != cursor.position

    def end(self) -> None:
        """Send all undelivered alerts, and one about the end of the launch.

        All are queued before the first is sent: an unreachable recipient delays no other.

        Raises:
            TrainctlError: A recipient could not be reached, or the records were cut.
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
        """Write the problem to the cursor.

        Raises:
            OSError: The disk is full.
        """
        self._config = None  # a new attempt may have changed it
        if problem != self.cursor.problem:
            self.cursor = replace(self.cursor, problem=problem)
            self.cursor.write(self._path)

    def close(self) -> None:
        """Do nothing: no connection stays open."""

    def _state(self) -> dict[str, Any]:
        """Return the cursor's state, with the defaults of a new run for fields that it lacks."""
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
        """Yield the alerts that records cause."""
        for event in events:
            kind, attempt = event["event"], event["attempt"]
            now = float(event.get("time", 0.0))
            if kind == "step":
                state["step"], state["moved"], state["is_quiet"] = event["step"], now, False
                state["stepped"] = attempt
            elif (
                kind not in ("logger", "mirror") and state.get("stepped") != attempt
            ):  # before the first step
                state["moved"], state["is_quiet"] = now, False
            if kind not in _ALERTS_BY_EVENT or (kind == "failure" and state["failed"] == attempt):
                continue  # later failures of an attempt follow from the first
            if not self._was_asked_for(attempt) or (kind == "mirror" and not event["problem"]):
                continue
            state["failed"] = attempt if kind == "failure" else state["failed"]
            name, words = _ALERTS_BY_EVENT[kind]
            yield self._alert(name, words(event), now, attempt, state)

    def _was_asked_for(self, attempt: int) -> bool:
        """Return True if an attempt was launched with alerts; earlier attempts are no news."""
        if attempt not in self._asked:
            file = self._run.attempt(attempt).plan
            self._asked[attempt] = (
                not file.is_file() or read_plan(file).config.logging.alerts.are_wanted
            )
        return self._asked[attempt]

    def _quiet(self, state: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield an alert if there was no step for too long.

        For a user's program, only if it has reported steps before.
        """
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
        """Queue alerts for every recipient."""
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
        """Send queued alerts to each recipient, in order; an unreachable one delays no other."""
        problems = []
        # Recipients that failed last time come last: they may take long again.
        for target in sorted(self._targets(), key=lambda each: each.name in state["tries"]):
            for each in [each for each in state["waiting"] if each["to"] == target.name]:
                state["tries"][target.name] = tries = state["tries"].get(target.name, 0) + 1
                self._keep(self.cursor, state)
                try:
                    target.tell({**each["alert"], "tries": tries})
                except AlertRefused as error:
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
        found = [_Target(url, partial(post_alert, url)) for url in dict.fromkeys(alerts.urls)]
        if alerts.command:
            found.append(_Target("the command", partial(start_command, alerts.command)))
        return found


POST_SECONDS = 10.0
"""Time limit of a POST in all, however often its server sends a byte."""
COMMAND_SECONDS = 30.0


class AlertRefused(Exception):
    """The server understood the alert and refused it: trying again will rarely help."""


class _NoRedirectHandler(urllib.request.HTTPRedirectHandler):
    """Follows no redirect: it would be a GET without the alert, which would be lost."""

    def redirect_request(self, *_: Any) -> None:
        return None


class _InterruptibleHandler(urllib.request.HTTPSHandler, urllib.request.HTTPHandler):
    """HTTP connections that can be cut in the middle of an answer; their timeout is per read."""

    def __init__(self) -> None:
        super().__init__()
        self._connections: list[http.client.HTTPConnection] = []
        self.is_cut = False

    def http_open(self, request: urllib.request.Request) -> Any:
        return self._open(http.client.HTTPConnection, request)

    def https_open(self, request: urllib.request.Request) -> Any:
        return self._open(http.client.HTTPSConnection, request)

    def cut(self) -> None:
        """Shut down every connection, so that reading from it fails."""
        self.is_cut = True  # before the reader sees the end of what it reads
        for connection in self._connections:
            with suppress(OSError):
                if connection.sock is not None:
                    connection.sock.shutdown(socket.SHUT_RDWR)

    def _open(self, kind: type[http.client.HTTPConnection], request: urllib.request.Request) -> Any:
        def kept(*arguments: Any, **settings: Any) -> http.client.HTTPConnection:
            self._connections.append(kind(*arguments, **settings))
            return self._connections[-1]

        return self.do_open(kept, request)


def post_alert(url: str, alert: Mapping[str, Any]) -> None:
    """Send an alert as JSON to a webhook.

    Args:
        url: Reference to the variable that holds the URL. Error messages never contain its value.

    Raises:
        AlertRefused: The server answers with 3xx or 4xx, except for being overloaded.
        OSError: It cannot be reached, or answers with another error.
        TrainctlError: The variable is not set.
    """
    target = resolve_text(url, os.environ)
    if not target.startswith(("http://", "https://")):
        raise OSError("what it stands for is no URL of http or https")
    handler = _InterruptibleHandler()
    timer = threading.Timer(POST_SECONDS, handler.cut)
    timer.daemon = True
    timer.start()
    try:
        request = urllib.request.Request(
            target,
            data=json.dumps(alert, ensure_ascii=False).encode(errors="backslashreplace"),
            headers={"Content-Type": "application/json", "User-Agent": "trainctl"},
            method="POST",
        )
        opener = urllib.request.build_opener(_NoRedirectHandler, handler)
        opener.open(request, timeout=POST_SECONDS).close()
        if handler.is_cut:  # truncated headers look complete
            raise TimeoutError
    except urllib.error.HTTPError as error:
        told = f"the server answers {error.code}"
        if 300 <= error.code < 500 and error.code not in (408, 425, 429):
            raise AlertRefused(told) from None
        raise OSError(told) from None
    except urllib.error.URLError as error:
        reason = error.reason
        known = reason.strerror if isinstance(reason, OSError) else None
        raise OSError(known or f"it cannot be reached: {type(reason).__name__}") from None
    except Exception as error:  # of http.client; some messages contain the URL
        if handler.is_cut:
            raise OSError(f"it did not answer within {POST_SECONDS:g} s") from None
        raise OSError(f"it cannot be told: {type(error).__name__}") from None
    finally:
        timer.cancel()


def start_command(command: Sequence[str], alert: Mapping[str, Any]) -> None:
    """Run a program with an alert as JSON on its stdin; it ends with this process.

    Args:
        command: The program and its arguments, run without a shell.

    Raises:
        OSError: It cannot be started, fails, or takes too long.
    """
    process = subprocess.Popen(
        [*pdeathsig_command(), *command],
        stdin=subprocess.PIPE,
        stdout=sys.stderr,
        env={**os.environ, PARENT_VARIABLE: str(os.getpid())},
        start_new_session=True,
    )
    try:
        process.communicate(json.dumps(alert).encode(), timeout=COMMAND_SECONDS)
    except subprocess.TimeoutExpired:
        raise OSError(f"it did not end within {COMMAND_SECONDS:.0f} s") from None
    finally:
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.returncode:
        raise OSError(f"it ended with {process.returncode}")
