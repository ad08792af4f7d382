"""Display of a running launch: a live line in a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Self, TextIO

from trainctl.cli.console import print_data, print_json, print_message
from trainctl.cli.record_lines import Event, clock, event_lines, step_line
from trainctl.runs.layout import RunPaths
from trainctl.runs.status import Beat, Phase, read_beat

_AFTER_RECORD = {
    "waiting": "waiting for nodes",
    "start": "first step",
    "end": "ending",
    "restart": "starting again",
}
"""Activity that follows a record, until the next record or heartbeat."""


class Activity:
    """Current activity of a run, from its records and the heartbeats of its first rank.

    Without a run (None), heartbeats are not read and only records count.
    """

    def __init__(self, run: RunPaths | None, attempt: int) -> None:
        self._run, self._attempt = run, attempt
        self._after = "starting"
        self._shown, self._since = "", time.monotonic()
        self._is_compiling = False

    def see(self, event: Mapping[str, Any]) -> None:
        """Update the activity by a record."""
        self._attempt = int(event.get("attempt", self._attempt))
        if event["event"] == "build":
            self._is_compiling = event["seconds"] is None
            self._after = f"compiling {event['operator']}" if self._is_compiling else "starting"
        elif event["event"] == "step":
            self._after, self._is_compiling = "", False
        else:
            self._after = _AFTER_RECORD.get(event["event"], self._after)

    def now(self) -> tuple[str, float]:
        """Return the activity other than steps, empty during steps, and its seconds so far."""
        text = self._text()
        if text != self._shown:
            self._shown, self._since = text, time.monotonic()
        return text, time.monotonic() - self._since

    def _text(self) -> str:
        beat = self._beat()
        if beat is None or self._is_compiling:
            return self._after
        if beat.phase in (Phase.evaluate, Phase.save):
            return {Phase.evaluate: "evaluating", Phase.save: "saving a checkpoint"}[beat.phase]
        if beat.phase is Phase.end:
            return beat.doing or "ending"
        if beat.phase is Phase.start and self._after in ("starting", "starting again"):
            return beat.doing or "loading torch and DeepSpeed"
        return self._after

    def _beat(self) -> Beat | None:
        """Return the heartbeat of the first rank or, before there is one, of the preparation."""
        if self._run is None:
            return None
        attempt = self._run.attempt(self._attempt)
        return read_beat(attempt.heartbeat(0)) or read_beat(attempt.preparation)


_FALLBACK = 80
"""Columns if the terminal does not report them."""


class LiveLine:
    """Context manager of the live line; inside it stdout and stderr write above the line."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._text = self._drawn = ""
        self._lock = threading.RLock()
        self._replaced: dict[str, Any] = {}

    def __enter__(self) -> Self:
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if stream.isatty():
                self._replaced[name] = stream
                setattr(sys, name, _StreamAboveLine(stream, self))
        return self

    def __exit__(self, *_: object) -> None:
        for name, stream in self._replaced.items():
            setattr(sys, name, stream)
        self.show("")

    @property
    def columns(self) -> int:
        """Greatest length of the line, in characters."""
        try:
            return max(1, os.get_terminal_size(self._stream.fileno()).columns - 1)
        except (OSError, ValueError):
            return _FALLBACK - 1

    def show(self, text: str) -> None:
        """Replace the line's text; an OSError means that the terminal is gone."""
        with self._lock:
            self._text = text
            self._stream.write(self._erased() + self._fresh())
            self._stream.flush()

    def write_above(self, stream: TextIO, text: str) -> None:
        """Write text of any stream in place of the line, and redraw the line below it."""
        with self._lock:
            self._stream.write(self._erased())
            self._stream.flush()
            stream.write(text)
            stream.flush()
            if text.endswith("\n"):
                self._stream.write(self._fresh())
                self._stream.flush()

    def _erased(self) -> str:
        """Return the escape codes that erase the line, in all rows that it takes at the current
        width.
        """
        if not self._drawn:
            return ""
        rows = -(-len(self._drawn) // (self.columns + 1))
        self._drawn = ""
        return "\r" + "\x1b[A" * (rows - 1) + "\x1b[J"

    def _fresh(self) -> str:
        self._drawn = self._text[: self.columns]
        return self._drawn


class _StreamAboveLine:
    def __init__(self, stream: TextIO, line: LiveLine) -> None:
        self._stream = stream
        self._line = line

    def write(self, text: str) -> int:
        self._line.write_above(self._stream, text)
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def _repeated(work: Callable[[], None], seconds: float, name: str) -> Iterator[None]:
    """Call a function every `seconds`, in a thread of that name, until the context ends."""
    end = threading.Event()

    def repeat() -> None:
        while not end.wait(seconds):
            work()

    thread = threading.Thread(target=repeat, name=name, daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


_REFRESH_SECONDS = 0.5
_BAR = 11
"""Characters of the bar and a space, if there is room for it."""

PLAIN_TERMINALS = ("dumb", "unknown")
"""Values of TERM of terminals that cannot redraw a line, such as an editor's."""


class Progress:
    """Display of a run's records as they are written; see `trainctl.runs.records`.

    A reader that goes away (`| head`, a closed terminal) ends the display, never the training.

    Args:
        stop_step: Step at which this launch ends.
        every_steps: Interval of the plain lines (`logging.every_steps`).
        as_json: Print each record as a line of JSON on stdout, and nothing else there.
        run: Run whose heartbeats give the activity between records; None reads none.
        attempt: Number of its running attempt.
    """

    def __init__(
        self,
        *,
        stop_step: int,
        every_steps: int,
        as_json: bool = False,
        run: RunPaths | None = None,
        attempt: int = 1,
    ) -> None:
        self._stop_step = stop_step
        self._every_steps = every_steps
        self._as_json = as_json
        self._broken = False
        self._activity = Activity(run, attempt)
        self._step: Event | None = None
        self._left: float | None = None
        self._live: LiveLine | None = None
        if sys.stdout.isatty() and not as_json and os.environ.get("TERM") not in PLAIN_TERMINALS:
            self._live = LiveLine(sys.stdout)
        self._shown = ExitStack()
        self._seconds_per_step = 0.0
        self._last_time: float | None = None

    def __enter__(self) -> Self:
        if self._live is not None:
            self._shown.enter_context(self._live)
            self._shown.enter_context(_repeated(self._refresh, _REFRESH_SECONDS, "live line"))
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # the terminal is closed, and the launch has its own exit code
            self._shown.close()

    def __call__(self, event: Event) -> None:
        """Show one record."""
        if self._broken:
            return
        try:
            self._show(event)
        except OSError:
            self._broken = True

    def _refresh(self) -> None:
        assert self._live is not None
        with suppress(OSError, ValueError):  # the terminal is closed
            self._live.show(self._live_text(self._live.columns))

    def _show(self, event: Event) -> None:
        if self._as_json:
            print_json(event, indent=None)
            return
        self._activity.see(event)
        if event["event"] == "step":
            self._show_step(event)
        else:
            for line in event_lines(event):
                print_data(line)
        if self._live is not None:
            self._live.show(self._live_text(self._live.columns))

    def _show_step(self, event: Event) -> None:
        step, self._step, self._left = event["step"], event, self._seconds_left(event)
        if step % self._every_steps == 0 or step == self._stop_step:
            print_data(step_line(event, stop_step=self._stop_step, seconds_left=self._left))

    def _live_text(self, columns: int) -> str:
        """Return the live line: the last step or the current activity, cut to the columns."""
        doing, seconds = self._activity.now()
        what = f"{doing} {clock(seconds)}" if doing else ""
        if self._step is None:
            return what
        if what:
            return f"step {self._step['step']}/{self._stop_step}: {what}"
        line = step_line(self._step, stop_step=self._stop_step, seconds_left=self._left)
        for part in (r" grad_norm \S+", r" lr \S+", r" MFU \S+"):
            line = line if len(line) <= columns else re.sub(part, "", line)
        return line if len(line) + _BAR >= columns else f"{self._bar(_BAR - 1)} {line}"

    def _bar(self, width: int) -> str:
        done = round(width * int(self._step["step"]) / self._stop_step) if self._step else 0
        return "#" * done + "." * (width - done)

    def _seconds_left(self, event: Event) -> float | None:
        """Estimate the seconds left by a running mean of the time between records.

        Evaluations and saves count too.
        """
        previous, now = self._last_time, float(event["time"])
        self._last_time = now
        if previous is None:
            return None
        seconds = max(now - previous, 0.0)
        weight = 0.1 if self._seconds_per_step else 1.0
        self._seconds_per_step += weight * (seconds - self._seconds_per_step)
        return self._seconds_per_step * (self._stop_step - int(event["step"]))


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
        self._copying = _repeated(self._copy, _POLL_SECONDS, "follower")

    def __enter__(self) -> Self:
        self._copying.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._copying.__exit__(None, None, None)
        self._copy()

    def __call__(self, event: Event) -> None:
        """Handle a record: a new attempt has a new log."""
        with suppress(OSError):
            if event["event"] == "program":
                attempt = self._run.attempt(int(event["attempt"]))
                print_message(f"logs of all ranks: {attempt.logs}")
                self._copy()  # the rest of the previous attempt's log
                with self._lock:
                    self._log, self._copied = attempt.rank_log(0), 0
            for line in event_lines(event):
                print_message(line)

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
