"""`events.jsonl`: one JSON object per line, appended by launcher, agent and rank 0.

Floats keep every digit (`repr`). JSON has no NaN and no infinity, so these are written as the
strings ``"NaN"``, ``"Infinity"`` and ``"-Infinity"``; `number` reads them back. Most numbers of a
step are written as a row without names (`trainctl.runs.rows`), and every reader here restores the
names; lines of older versions have all names in them.

A long run has millions of steps. So readers go from the end (`events_from_end`, `steps_from_end`),
or once over the file, one record at a time (`iter_events`) or a few numbers of each step
(`trainctl.monitor.report.history`).
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from trainctl.config.reading import open_file, parse_json
from trainctl.errors import ExitCode, TrainctlError
from trainctl.runs.access import file_mode, open_lock
from trainctl.runs.rows import COLUMNS, PACKED, Layout, Names, names_of, pack

RECORD_SCHEMA = 1
"""Version of the lines of `events.jsonl`."""

_LOCK_SECONDS = 1.0
_LOCK_POLL_SECONDS = 0.002
_BLOCK_BYTES = 1 << 16
_SIEVE_BYTES = 1 << 20

_MOST_SHAPES = 32
"""Most sets of columns in an attempt; steps with further sets are written with all their names."""

_MOST_NAMES = 1 << 22
"""Largest `columns` record, in bytes."""

_COMPACT = (",", ":")

Event = dict[str, Any]

_NUMBERED = {"step": ("step",)}
"""Fields, by kind of record, that must be integers for the record to count."""

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
"""Defaults for fields that a `failure` record lacks, from another version or after an edit."""


class RowColumns:
    """Columns of the rows of one file, each read where a row refers to it, and cached.

    Args:
        path: The run's `events.jsonl`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[tuple[int, int], Layout | None] = {}

    def of(self, attempt: int, at: int) -> Layout | None:
        """Return the columns of an attempt's record at a byte of the file; None if there are none.

        Raises:
            OSError: The file cannot be read now, but may have them.
        """
        key = (attempt, at)
        if key not in self._known:
            names = self._read(*key)
            self._known[key] = None if names is None else Layout(names)
        return self._known[key]

    def complete(self, event: Event) -> Event | None:
        """Return a record with its numbers under their names; None if the names are lost."""
        at, row = event.pop("at", None), event.pop("row")
        if not isinstance(at, int) or not isinstance(row, list):
            return None
        try:
            layout = self.of(event["attempt"], at)
            named = None if layout is None else layout.fields(row)
        except (ValueError, AttributeError, LookupError, TypeError, OverflowError):
            return None  # the row is of other columns
        return None if named is None else {"schema": RECORD_SCHEMA, **event, **named}

    def _read(self, attempt: int, at: int) -> Names | None:
        with open_file(self._path) as stream:
            stream.seek(min(max(0, at), os.fstat(stream.fileno()).st_size))
            found = _names_in(stream.readline(_MOST_NAMES), attempt, at)
            if found is not None:
                return found
            # A person has edited the file, or two machines wrote at once.
            stream.seek(0)
            lines = (line for line in sift(stream, (COLUMNS,)))
            every = (_names_in(line, attempt, at) for line in lines)
            return next((names for names in every if names is not None), None)


def _names_in(line: bytes, attempt: int, at: int) -> Names | None:
    """Return the names if the line is the `columns` record of this attempt and byte."""
    try:
        record = parse_json(line)
        place = {"event": COLUMNS, "attempt": attempt, "at": at}
        if isinstance(record, dict) and place.items() <= record.items():
            return names_of(record.get("names"))
    except (ValueError, TypeError):
        pass
    return None


class EventWriter:
    """Appends records of one attempt; a context manager.

    A line is one `write` to a file opened for appending, under a lock, so lines of several
    processes or machines never mix. If a killed writer left a torn line, the next writer ends it
    with a newline first, and readers skip it.

    Args:
        path: The run's `events.jsonl`; made if missing.
        attempt: Number of the attempt, written to every line.
    """

    def __init__(self, path: Path, attempt: int) -> None:
        self._attempt = attempt
        self._lock = open_lock(path.with_suffix(".lock"))
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, file_mode(path.parent))
        self._places: dict[Names, int] = {}

    def write(self, event: str, **fields: Any) -> Event:
        """Append one record and return it.

        Args:
            event: Kind of the record, such as ``step``.
            fields: Its other fields: plain JSON values, and floats that may not be finite.

        Raises:
            OSError: The disk is full; the next record starts on a line of its own.
        """
        head = {
            "schema": RECORD_SCHEMA,
            "attempt": self._attempt,
            "time": round(time.time(), 6),
            "event": event,
        }
        written = _finite(fields)
        with _locked(self._lock, self._descriptor):
            # This writer or another may have left a torn line.
            start = b"" if _ends_with_newline(self._descriptor) else b"\n"
            if event == "step":
                self._write_step(head, written, start)
            else:
                self._append(start + _line({**head, **written}))
        return {**head, **fields}

    def _write_step(self, head: Event, fields: Event, start: bytes) -> None:
        """Append a step as a row, after the names of its columns if they are new."""
        names, row = pack(fields)
        at = self._places.get(names)
        if not names or (at is None and len(self._places) == _MOST_SHAPES):
            self._append(start + _line({**head, **fields}))
            return
        if at is None:
            at = os.fstat(self._descriptor).st_size + len(start)
            start += _line({**head, "event": COLUMNS, "at": at, "names": names})
        named = {
            name: value
            for name, value in {**head, **fields}.items()
            if name != "schema" and name not in PACKED
        }
        self._append(start + _line({**named, "at": at, "row": row}))
        self._places[names] = at

    def _append(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._descriptor, data) :]

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
        attempt: Only records of this attempt; None returns records of all.
        from_start: Begin with the first record instead of what is appended from now on.
    """

    def __init__(self, path: Path, attempt: int | None = None, *, from_start: bool = False) -> None:
        self._path = path
        self._attempt = attempt
        self._offset = path.stat().st_size if path.exists() and not from_start else 0
        self._most = _SIEVE_BYTES if from_start else None
        self._columns = RowColumns(path)

    def poll(self) -> list[Event]:
        """Return complete records since the last call, or since the follower was made.

        Where there is much to catch up with, a call returns a part of it; an empty list means that
        nothing is left.

        A file that cannot be read now gives an empty list: a network file system may fail for a
        moment (ESTALE, EIO), which must not end a process that only watches a run.
        """
        while True:
            before = self._offset
            try:
                events, self._offset = events_after(self._path, before, self._most, self._columns)
            except OSError:
                return []
            found = [event for event in events if self._attempt in (None, event.get("attempt"))]
            if found or self._offset == before:
                return found


def events_after(
    path: Path, offset: int, most_bytes: int | None = None, columns: RowColumns | None = None
) -> tuple[list[Event], int]:
    """Return complete records from a byte of the file on, and the byte after the last of them.

    Args:
        offset: The byte: 0, or one that was returned before.
        most_bytes: Bytes to read at a time, but at least a whole line; None reads to the end.
        columns: Columns of the file, to keep over many calls.

    Raises:
        OSError: The file is missing, or cannot be read.
    """
    with open_file(path) as stream:
        stream.seek(offset)
        data = stream.read(-1 if most_bytes is None else most_bytes)
        if most_bytes is not None and b"\n" not in data:
            data += stream.readline()
    whole, newline, _ = data.rpartition(b"\n")
    events = list(parse_events(whole.split(b"\n"), columns or RowColumns(path)))
    return events, offset + len(whole) + len(newline)


def read_events(path: Path, *kinds: str) -> list[Event]:
    """Return the records of `iter_events` as a list."""
    return list(iter_events(path, *kinds))


def iter_events(path: Path, *kinds: str) -> Iterator[Event]:
    """Yield complete records in file order; none if there is no file. Torn lines are skipped.

    Args:
        kinds: Only records of these kinds. A long run has millions of `step` lines, so lines of
            other kinds are not even parsed.

    Raises:
        TrainctlError: The file cannot be read (exit code 5).
    """
    with readable(path), open_file(path) as stream:
        for event in parse_events(sift(stream, kinds), RowColumns(path)):
            if not kinds or event["event"] in kinds:
                yield event


def sift(stream: BinaryIO, kinds: Sequence[str]) -> Iterator[bytes]:
    """Yield the lines that may be records of these kinds.

    Searches whole blocks for the kinds first, and single lines only in blocks that have one.
    """
    if not kinds:
        yield from stream
        return
    marks = [f'"{kind}"'.encode() for kind in kinds]
    while block := stream.read(_SIEVE_BYTES):
        block += stream.readline()
        if any(mark in block for mark in marks):
            yield from (line for line in block.split(b"\n") if any(mark in line for mark in marks))


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Ignore a missing file, and turn other read errors into TrainctlError (exit code 5)."""
    try:
        yield
    except FileNotFoundError:
        return
    except OSError as error:
        raise TrainctlError(
            f"{path} cannot be read: {error.strerror}", exit_code=ExitCode.run_state
        ) from None


def parse_events(lines: Iterable[bytes], columns: RowColumns) -> Iterator[Event]:
    """Yield the records in lines of a file; torn lines are skipped.

    Args:
        columns: Columns of the file that the lines are from.
    """
    for line in lines:
        try:
            event = parse_json(line)
        except ValueError:
            continue
        if not isinstance(event, dict) or not isinstance(event.get("event"), str):
            continue
        numbers = ("attempt", *_NUMBERED.get(event["event"], ()))
        if not all(isinstance(event.get(name), int) for name in numbers):
            continue
        if "row" in event:
            event = columns.complete(event)
        if event is not None and event["event"] != COLUMNS:
            yield {**_FAILURE, **event} if event["event"] == "failure" else event


def step_curve(events: Iterable[Event]) -> dict[int, Event]:
    """Return the `step` records that count after all resumes, by step, ascending.

    A resume goes back to a checkpoint and repeats steps. The last attempt wins: from its first step
    on, records of earlier attempts do not count, even where it has not come as far yet.
    """
    curve: dict[int, Event] = {}
    steps = [event for event in events if event["event"] == "step"]
    for event in sorted(steps, key=lambda event: int(event["attempt"])):
        while curve and next(reversed(curve)) >= event["step"]:
            curve.popitem()
        curve[event["step"]] = event
    return curve


def steps_from_end(path: Path, wanted: Iterable[int]) -> dict[int, Event]:
    """Return the `step` records of some steps that count after all resumes; omit missing ones.

    Equals `step_curve` where the attempts follow one another in the file. Reads from the file's
    end: in a long run the wanted steps are the last of millions of lines.

    Args:
        wanted: Steps, from 1.

    Raises:
        TrainctlError: The file cannot be read (exit code 5).
    """
    missing, found = set(wanted), dict[int, Event]()
    first = max(missing, default=0) + 1
    for event in events_from_end(path, "step"):
        if event["step"] in missing and event["step"] < first:
            found[event["step"]] = event
            missing.remove(event["step"])
        first = min(first, event["step"])
        if not missing or first <= min(missing):  # later steps replaced all records before this one
            break
    return dict(sorted(found.items()))


def events_from_end(path: Path, *kinds: str, most_bytes: int | None = None) -> Iterator[Event]:
    """Yield complete records, the last one first; none if there is no file.

    Args:
        kinds: Only records of these kinds.
        most_bytes: Bytes to read from the end; None reads to the beginning.

    Raises:
        TrainctlError: The file cannot be read (exit code 5).
    """
    marks, columns = [f'"{kind}"'.encode() for kind in kinds], RowColumns(path)
    with readable(path):
        lines = _lines_from_end(path, most_bytes)
        chosen = (line for line in lines if not marks or any(mark in line for mark in marks))
        for event in parse_events(chosen, columns):
            if not kinds or event["event"] in kinds:
                yield event


def _lines_from_end(path: Path, most_bytes: int | None) -> Iterator[bytes]:
    """Yield the lines of a file, the last one first."""
    with open_file(path) as stream:
        end, parts = stream.seek(0, os.SEEK_END), list[bytes]()
        least = 0 if most_bytes is None else max(0, end - most_bytes)
        while end > least:
            start = max(least, end - _BLOCK_BYTES)
            stream.seek(start)
            first, *lines = stream.read(end - start).split(b"\n")
            if lines:
                parts.append(lines.pop())
                yield b"".join(reversed(parts))
                yield from reversed(lines)
                parts = []
            parts.append(first)  # joined once the line's beginning is found: a line may be long
            end = start
        yield b"".join(reversed(parts))


def short(measured: float) -> float:
    """Round to eight digits: more than a clock measures, in half the characters."""
    return float(f"{measured:.8g}")


def number(value: Any) -> float:
    """Return a number of a record as a float; the strings for NaN and infinities included.

    An integer beyond all floats, as only a user's program would write, becomes infinite.
    """
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


@contextmanager
def _locked(lock: int, descriptor: int) -> Iterator[None]:
    """Exclude other writers of a file while one appends to it.

    On NFS each machine appends where it believes the end to be. Locking the file itself makes it
    look, and unlocking makes it write out; this lock is only tried, since a reader could hold it.
    Where there are no locks, or a stopped process holds the writers' lock, the writer continues
    without: a record that may be overwritten is better than a rank that waits.

    Args:
        lock: Descriptor of the lock file, which only writers may open.
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


def _line(record: Event) -> bytes:
    text = json.dumps(record, ensure_ascii=False, allow_nan=False, separators=_COMPACT)
    return text.encode(errors="backslashreplace") + b"\n"


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
