"""Processes that send a run's metrics to its loggers, besides the launcher: one per logger.

They read the run's records, and the run never waits for them. A process that dies is restarted. One
that has not sent everything a while after the run's end is killed; `trainctl runs sync` sends the
rest.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Self

from trainctl.config.schema import RunConfig
from trainctl.errors import TrainctlError
from trainctl.launch.processes import Process, start_with_pdeathsig
from trainctl.monitor.loggers.delivery import ALERTS, command, read_cursor
from trainctl.runs.files import ensure_folder
from trainctl.runs.layout import RunPaths
from trainctl.runs.processes import RunTag
from trainctl.runs.records import Event, EventWriter

_GRACE_SECONDS = 10.0
"""Time for sending the rest when the run has ended."""
_STOPPING_GRACE_SECONDS = 2.0
"""Time for sending the rest where a signal ended the run at once."""
_CHECK_SECONDS = 5.0
_RESTARTS = 5
_POLL_SECONDS = 0.05


def logger_process_names(config: RunConfig) -> list[str]:
    """Return the names of the processes: one for each logger, and one for alerts if wanted."""
    return [*config.logging.to, *([ALERTS] if config.logging.alerts.are_wanted else [])]


class Loggers:
    """Context in which the logger processes run. No method raises, or waits while the run goes on.

    Args:
        tag: Tag of their processes, without an attempt: they outlive attempts.
        on_event: Called with each record about a problem of theirs.
    """

    def __init__(
        self,
        run: RunPaths,
        config: RunConfig,
        tag: RunTag,
        on_event: Callable[[Event], None],
    ) -> None:
        self._loggers = [_Logger(run, name, config, tag) for name in logger_process_names(config)]
        self._run, self._on_event = run, on_event
        self._checked_at = time.monotonic()
        self._attempt = 1

    def on_event(self, event: Event) -> None:
        """Pass a record of the run on, and check the processes now and then."""
        self._on_event(event)
        self._attempt = event["attempt"]
        if self._loggers and time.monotonic() - self._checked_at > _CHECK_SECONDS:
            self._checked_at = time.monotonic()
            for logger in self._loggers:
                logger.keep_alive()
                self._record_problem(logger)

    def __enter__(self) -> Self:
        for logger in self._loggers:
            logger.start()
        return self

    def __exit__(self, *_: object) -> None:
        for logger in self._loggers:
            logger.kill()

    def finish(self, is_stopping: Callable[[], bool]) -> None:
        """Have the processes send the rest, and record what they could not send.

        Args:
            is_stopping: Returns True if the launch is to end now; called again and again.
        """
        for logger in self._loggers:
            logger.keep_alive()
            logger.ask_to_end()
        started = time.monotonic()
        while any(logger.is_alive for logger in self._loggers):
            grace = _STOPPING_GRACE_SECONDS if is_stopping() else _GRACE_SECONDS
            if time.monotonic() - started > grace:
                break
            time.sleep(_POLL_SECONDS)
        for logger in self._loggers:
            logger.kill()
            event = self._record_problem(logger)
            if event is not None:  # the launcher no longer reads the records itself
                self._on_event(event)

    def _record_problem(self, logger: _Logger) -> Event | None:
        """Record a change of a logger's problem, its end included; return the record, if any."""
        problem = logger.problem()
        if problem == logger.reported:
            return None
        logger.reported = problem
        with suppress(OSError), EventWriter(self._run.events, self._attempt) as events:
            return events.write("logger", name=logger.name, problem=problem)
        return None


class _Logger:
    """One of the logger processes."""

    def __init__(self, run: RunPaths, name: str, config: RunConfig, tag: RunTag) -> None:
        self.name = name
        self.reported = ""
        self._run, self._config, self._tag = run, config, tag
        self._paths = run.logger(name)
        self._process: Process | None = None
        self._failure = ""
        self._restarts = 0

    @property
    def is_alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Start the process. A failure to start it becomes the logger's problem."""
        argv = command(self._run, self.name, "--follow", config=self._config)
        try:
            ensure_folder(self._paths.folder)
            self._process = start_with_pdeathsig(
                argv, tag=self._tag, log=self._paths.log, has_input=True
            )
            self._failure = ""
        except OSError as error:
            self._failure = f"it cannot be started: {error.strerror}"

    def keep_alive(self) -> None:
        """Restart the process if it has died, at most `_RESTARTS` times."""
        if self.is_alive:
            return
        if self._restarts < _RESTARTS:
            self._restarts += 1
            self.start()
        else:
            self._failure = f"its process died {_RESTARTS + 1} times, see {self._paths.log}"

    def ask_to_end(self) -> None:
        """Have the process send the rest and end."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()

    def kill(self) -> None:
        """End the process if it is still running, and note that as a failure."""
        if self._process is None:
            return
        if self.is_alive:
            self._process.kill()
            self._failure = "it had not sent everything when it was ended"
        code = self._process.wait()
        if code and not self._failure:
            self._failure = f"its process ended with {code}, see {self._paths.log}"

    def problem(self) -> str:
        """Return why not everything was sent; empty if nothing is wrong."""
        try:
            return read_cursor(self._paths.cursor).problem or self._failure
        except TrainctlError as error:
            return error.message
