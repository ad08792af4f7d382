"""Display of a user's own program: a copy of its first rank's log."""

from __future__ import annotations

import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from trainctl.cli.console import say
from trainctl.cli.progress import Event, event_lines
from trainctl.runs.layout import RunPaths

_POLL_SECONDS = 0.1


class LiveFollower:
    """Context manager that copies the log of rank 0 of the running attempt to stdout, in a thread.

    A reader that goes away (`| head`, a closed terminal) ends the copying, never the program.
    """

    def __init__(self, run: RunPaths) -> None:
        self._run = run
        self._log: Path | None = None
        self._copied = 0
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="follower", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end.set()
        self._thread.join()
        self._copy()

    def __call__(self, event: Event) -> None:
        """Handle a record: a new attempt has a new log."""
        with suppress(OSError):
            if event["event"] == "program":
                attempt = self._run.attempt(int(event["attempt"]))
                say(f"logs of all ranks: {attempt.logs}")
                self._copy()  # the rest of the previous attempt's log
                with self._lock:
                    self._log, self._copied = attempt.rank_log(0), 0
            for line in event_lines(event):
                say(line)

    def _follow(self) -> None:
        while not self._end.wait(_POLL_SECONDS):
            self._copy()

    def _copy(self) -> None:
        with self._lock:
            if self._log is None:
                return
            try:
                with self._log.open("rb") as stream:
                    stream.seek(self._copied)
                    data = stream.read()
            except OSError:  # not there yet, or a network file system fails for a moment
                return
            self._copied += len(data)
            try:
                sys.stdout.buffer.write(data)
                sys.stdout.buffer.flush()
            except OSError:
                self._log = None
