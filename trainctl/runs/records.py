"""`events.jsonl`: one JSON object a line, appended by launcher, agent and rank 0.

Floats keep every digit (`repr`). JSON has no NaN and no infinity, so these are written as the
strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``; `number` reads them back.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from trainctl.config.reading import open_file, parse_json
from trainctl.errors import ExitCode, TrainctlError
from trainctl.runs.access import file_mode, open_lock

RECORD_SCHEMA = 1
"""Version of the lines of `events.jsonl`."""

_LOCK_SECONDS = 1.0
_LOCK_POLL_SECONDS = 0.002
_BLOCK_BYTES = 1 << 16

Event = dict[str, Any]

_NUMBERED = {"step": ("step",)}
"""Kinds of records that are nothing without these numbers."""

_FAILURE: Event = {
    "rank": None,
    "node": 0,
    "host": "",
    "pid": None,
    "cause": "reported",
    "exit_code": None,
    "signal": None,
    "message": "a failure whose record does not say what it was",
    "hint": "",
    "log": "",
    "log_tail": [],
}
"""What a `failure` record says where another version, or a person, has left something out."""


class EventWriter:
    """Appends records of one attempt; a context manager.

    A line is one `write` to a file opened for appending, under a lock, so lines of several
    processes never mix, nor those of several machines. What a killed writer left unfinished is
    closed with a newline first and stays a torn line of its own, which readers skip.

    Args:
        path: The run's `events.jsonl`; made if missing.
        attempt: Number that every line carries.
    """

    def __init__(self, path: Path, attempt: int) -> None:
        self._attempt = attempt
        self._lock = open_lock(path.with_suffix(".lock"))
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, file_mode(path.parent))

    def write(self, event: str, **fields: Any) -> Event:
        """Append one record and return it.

        Args:
            event: Its kind, such as ``step``.
            fields: The rest: plain JSON values.

        Raises:
            OSError: The disk is full; the next record starts on a line of its own.
        """
        record = {
            "schema": RECORD_SCHEMA,
            "attempt": self._attempt,
            "time": time.time(),
            "event": event,
            **fields,
        }
        line = json.dumps(_finite(record), ensure_ascii=False, allow_nan=False) + "\n"
        data = line.encode(errors="backslashreplace")
        with _locked(self._lock, self._descriptor):
            if not _ends_with_newline(self._descriptor):
                data = b"\n" + data  # this writer or another was cut short in its line
            while data:
                data = data[os.write(self._descriptor, data) :]
        return record

    def close(self) -> None:
        os.close(self._descriptor)
        os.close(self._lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class EventFollower:
    """Reads records as they are appended.

    Args:
        path: The run's `events.jsonl`; need not exist yet.
        attempt: Records of other attempts are passed over; None gives those of all.
    """

    def __init__(self, path: Path, attempt: int | None = None) -> None:
        self._path = path
        self._attempt = attempt
        self._offset = path.stat().st_size if path.exists() else 0

    def poll(self) -> list[Event]:
        """Complete records since the last call, or since the follower was made.

        None where the file cannot be read now: a network file system may fail for a moment (ESTALE,
        EIO), and nobody who only watches a run is to end it for that.
        """
        try:
            events, self._offset = events_after(self._path, self._offset)
        except OSError:
            return []
        return [event for event in events if self._attempt in (None, event.get("attempt"))]


def events_after(path: Path, offset: int, most_bytes: int | None = None) -> tuple[list[Event], int]:
    """Complete records from a byte of the file on, and the byte after the last of them.

    Args:
        path: The run's `events.jsonl`.
        offset: The byte: 0, or one that was returned.
        most_bytes: How much is read at a time, but always a whole line; None reads to the end.

    Raises:
        OSError: The file is not there, or cannot be read.
    """
    with open_file(path) as stream:
        stream.seek(offset)
        data = stream.read(-1 if most_bytes is None else most_bytes)
        if most_bytes is not None and b"\n" not in data:
            data += stream.readline()
    whole, newline, _ = data.rpartition(b"\n")
    return list(parse_events(whole.split(b"\n"))), offset + len(whole) + len(newline)


def read_events(path: Path, *kinds: str) -> list[Event]:
    """As `iter_events`, in a list."""
    return list(iter_events(path, *kinds))


def iter_events(path: Path, *kinds: str) -> Iterator[Event]:
    """Complete records in file order; none when there is no file. Torn lines are skipped.

    Args:
        path: The run's `events.jsonl`.
        kinds: Only records of these. A long run has millions of lines of `step`, so a line of
            another kind is not even parsed.

    Raises:
        TrainctlError: It is there and cannot be read (exit code 5).
    """
    marks = [f'"{kind}"'.encode() for kind in kinds]
    with _readable(path), open_file(path) as stream:
        lines = (line for line in stream if not marks or any(mark in line for mark in marks))
        for event in parse_events(lines):
            if not kinds or event["event"] in kinds:
                yield event


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    """Within it no file is an empty one, and one that cannot be read an error (exit code 5)."""
    try:
        yield
    except FileNotFoundError:
        return
    except OSError as error:
        raise TrainctlError(
            f"{path} cannot be read: {error.strerror}", exit_code=ExitCode.run_state
        ) from None


def parse_events(lines: Iterable[bytes]) -> Iterator[Event]:
    """The records in lines of a file; torn ones are skipped."""
    for line in lines:
        try:
            event = parse_json(line)
        except ValueError:
            continue
        if not isinstance(event, dict) or not isinstance(event.get("event"), str):
            continue
        numbers = ("attempt", *_NUMBERED.get(event["event"], ()))
        if all(isinstance(event.get(name), int) for name in numbers):
            yield {**_FAILURE, **event} if event["event"] == "failure" else event


def step_curve(events: Iterable[Event]) -> dict[int, Event]:
    """The `step` records of the run as it stands, by step, ascending.

    A resume goes back to a checkpoint and replays. The last attempt wins: from its first step on
    nothing of an earlier attempt is left, also where it has not come as far yet.
    """
    curve: dict[int, Event] = {}
    steps = [event for event in events if event["event"] == "step"]
    for event in sorted(steps, key=lambda event: int(event["attempt"])):
        while curve and next(reversed(curve)) >= event["step"]:
            curve.popitem()
        curve[event["step"]] = event
    return curve


def steps_from_end(path: Path, wanted: Iterable[int]) -> dict[int, Event]:
    """The `step` records of some steps of the run as it stands; those without one are left out.

    What `step_curve` has of them, where the attempts are one after the other in the file. It is
    read from its end: in a long run these are the last of millions of lines.

    Args:
        path: The run's `events.jsonl`.
        wanted: Steps, from 1.

    Raises:
        TrainctlError: It is there and cannot be read (exit code 5).
    """
    missing, found = set(wanted), dict[int, Event]()
    first = max(missing, default=0) + 1
    with _readable(path):
        for line in _lines_from_end(path):
            if not missing or first <= min(missing):  # done again: nothing before this counts
                break
            if b'"step"' not in line:
                continue
            for event in parse_events([line]):
                if event["event"] == "step" and event["step"] in missing and event["step"] < first:
                    found[event["step"]] = event
                    missing.remove(event["step"])
                if event["event"] == "step":
                    first = min(first, event["step"])
    return dict(sorted(found.items()))


def _lines_from_end(path: Path) -> Iterator[bytes]:
    """The lines of a file, the last one first."""
    with open_file(path) as stream:
        end, rest = stream.seek(0, os.SEEK_END), b""
        while end:
            start = max(0, end - _BLOCK_BYTES)
            stream.seek(start)
            rest, *lines = (stream.read(end - start) + rest).split(b"\n")
            yield from reversed(lines)
            end = start
        yield rest


def number(value: Any) -> float:
    """A number of a record as a float; also the strings that stand for NaN and infinities."""
    return float(value)


@contextmanager
def _locked(lock: int, descriptor: int) -> Iterator[None]:
    """Keep the other writers of a file out, for as long as it takes to append to it.

    On NFS each machine appends where it believes the end to be. Taking a lock on the file makes it
    look, and giving it back makes it write out; nobody waits for that one, which a reader could
    hold. Where there are no locks, or whoever has the writers' is stopped, it goes on without: a
    record that may be overwritten is better than a rank that waits.

    Args:
        lock: Of a file that only writers may open.
        descriptor: Of the records.
    """
    deadline = time.monotonic() + _LOCK_SECONDS
    is_held = False
    while not is_held and time.monotonic() < deadline:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_held = True
        except BlockingIOError:
            time.sleep(_LOCK_POLL_SECONDS)
        except OSError:
            break
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    try:
        yield
    finally:
        for held in (descriptor, lock):
            with suppress(OSError):
                fcntl.flock(held, fcntl.LOCK_UN)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def _ends_with_newline(descriptor: int) -> bool:
    size = os.fstat(descriptor).st_size
    return size == 0 or os.pread(descriptor, 1, size - 1) == b"\n"
