"""Records of a run: events in `events.jsonl`, and steps in the tables of `steps/`.

`events.jsonl` has one JSON object per line, appended by launcher, agent and rank 0. Floats keep
every digit (`repr`). JSON has no NaN and no infinity, so these are written as the strings
``"NaN"``, ``"Infinity"`` and ``"-Infinity"``; `number` reads them back.

A reader here gets steps as records of kind `step`, each among the events where it was written. A
row says how long `events.jsonl` was at its time (`trainctl.runs.step_table`), so the order does not
depend on clocks. Earlier versions wrote steps into `events.jsonl`, packed or with all names; such
lines are read as well, also of a run that a later version continues.

A long run has millions of steps. So readers go from the end (`events_from_end`, `steps_from_end`),
or once over the files, one record at a time (`iter_events`), or read on from where they were
(`RecordReader`).
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Self

from trainctl.config.reading import open_file, parse_json
from trainctl.errors import RunStateError
from trainctl.runs.files import file_mode, open_lock
from trainctl.runs.packed_rows import COLUMNS, PackedRows
from trainctl.runs.step_table import StepFile, StepWriter, step_files

RECORD_SCHEMA = 1
"""Version of the lines of `events.jsonl`."""

_LOCK_SECONDS = 1.0
_LOCK_POLL_SECONDS = 0.002
_BLOCK_BYTES = 1 << 16
_SIEVE_BYTES = 1 << 20

_COMPACT = (",", ":")

Event = dict[str, Any]

OnEvent = Callable[[Event], None]
"""Called with each record of a run: a step, an evaluation, a save, a failure (docs/records.md)."""

Progress = Callable[[str, int, int], None]
"""Called with the name of a piece of work, the units of it that are done, and their total."""

OnUnits = Callable[[int, int], None]
"""Called with the units of one piece of work that are done, and their total."""


def ignore_progress(*_: object) -> None:
    """Take what an `OnEvent`, a `Progress` or an `OnUnits` takes, and do nothing."""


Placed = tuple[int, Event]
"""A record, and its byte in `events.jsonl`; of a step's row, the size that the file had before."""

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


def steps_folder(path: Path) -> Path:
    """Return the folder of the steps that belong to a run's `events.jsonl`."""
    return path.parent / "steps"


def record_files(path: Path) -> list[Path]:
    """Return the files with a run's records, those of steps in the order of their attempts."""
    return [path, *(file.path for file in step_files(steps_folder(path)))]


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
        self._steps = StepWriter(steps_folder(path), attempt)

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
        with _locked(self._lock, self._descriptor):
            if event == "step" and self._write_step(head, fields):
                return {**head, **fields}
            # This writer or another may have left a torn line.
            start = b"" if _ends_with_newline(self._descriptor) else b"\n"
            self._append(start + _line({**head, **_finite(fields)}))
        return {**head, **fields}

    def _write_step(self, head: Event, fields: Event) -> bool:
        """Append a step to its attempt's table; return False if it must be an event."""
        row = {"step": fields.get("step"), "time": head["time"], **fields}
        size = os.fstat(self._descriptor).st_size
        return type(row["step"]) is int and self._steps.write(row, size)

    def _append(self, data: bytes) -> None:
        while data:
            data = data[os.write(self._descriptor, data) :]

    def close(self) -> None:
        self._steps.close()
        os.close(self._descriptor)
        os.close(self._lock)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True, slots=True)
class Position:
    """Position in the files of a run's records: the bytes that were read of each."""

    events: int = 0
    """Bytes of `events.jsonl`."""
    rows: Mapping[str, int] = field(default_factory=dict)
    """Bytes of each file in `steps/`, by its name."""

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return self.events + sum(self.rows.values())

    @classmethod
    def of_end(cls, path: Path) -> Position:
        """Return the position after everything that is there now."""
        rows = {file.path.name: file.whole_size() for file in step_files(steps_folder(path))}
        return cls(path.stat().st_size if path.exists() else 0, rows)


class RecordReader:
    """Reads records from a position on, as they are appended.

    Args:
        path: The run's `events.jsonl`.
        position: Where to begin.
        attempt: Only steps of this attempt; None reads steps of all.

    Attributes:
        position: The position after the last record that was read.
    """

    def __init__(
        self, path: Path, position: Position | None = None, *, attempt: int | None = None
    ) -> None:
        self.position = position or Position()
        self._path, self._attempt = path, attempt
        self._packed = PackedRows(path)
        self._files: dict[str, StepFile] = {}

    @property
    def is_cut(self) -> bool:
        """Whether a file became shorter than what was read of it.

        Raises:
            OSError: `events.jsonl` is missing, or cannot be read.
        """
        read = [(self._path, self.position.events)] if self.position.events else []
        folder = steps_folder(self._path)
        read += [(folder / name, size) for name, size in self.position.rows.items() if size]
        return any(file.stat().st_size < size for file, size in read)

    def read(self, most_bytes: int | None = None) -> list[Event]:
        """Return complete records since the last call, in order.

        Args:
            most_bytes: Bytes of a file to read at a time, but at least a whole line; None reads to
                the end.

        Raises:
            OSError: A file is missing, or cannot be read; the position stays.
        """
        events, end = self._read_events(most_bytes)
        rows, sizes, is_all = self._read_rows(end, most_bytes)
        if not is_all:  # events after the last of these rows wait for the rows before them
            last = rows[-1][0] if rows else 0
            later = next((start for start, _ in events if start >= last), None)
            if later is not None:
                events, end = [placed for placed in events if placed[0] < later], later
        self.position = Position(end, sizes)
        return list(_merged(iter(events), iter(rows)))

    def _read_events(self, most_bytes: int | None) -> tuple[list[Placed], int]:
        offset = self.position.events
        with open_file(self._path) as stream:
            lines, end = _whole_lines(stream, offset, most_bytes)
        return list(parse_events(lines, self._packed)), end

    def _read_rows(
        self, events_end: int, most_bytes: int | None
    ) -> tuple[list[Placed], dict[str, int], bool]:
        """Return the rows that belong before a byte of `events.jsonl`.

        Returns:
            The rows, the position after them, and whether these are all that belong there.
        """
        found: list[Placed] = []
        sizes, left = dict(self.position.rows), most_bytes
        for file in step_files(steps_folder(self._path), self._attempt):
            file = self._files.setdefault(file.path.name, file)
            offset = sizes.get(file.path.name, 0)
            if file.path.stat().st_size <= offset:
                continue
            if left is not None and left <= 0:
                return found, sizes, False
            with open_file(file.path) as stream:
                lines, end = _whole_lines(stream, offset, left)
                is_all = left is None or end - offset + len(stream.read(left)) < left
            for start, line in lines:
                for place, row in _steps(file, [line]):
                    if place > events_end and place <= self._path.stat().st_size:
                        sizes[file.path.name] = start  # events before it were not read yet
                        return found, sizes, True
                    found.append((place, row))
            sizes[file.path.name] = end
            left = None if left is None else left - (end - offset)
            if not is_all:
                return found, sizes, False
        return found, sizes, True


class EventFollower:
    """Reads records as they are appended.

    Args:
        path: The run's `events.jsonl`; need not exist yet.
        attempt: Only records of this attempt; None returns records of all.
        from_start: Begin with the first record instead of what is appended from now on.
    """

    def __init__(self, path: Path, attempt: int | None = None, *, from_start: bool = False) -> None:
        self._attempt = attempt
        begin = Position() if from_start else Position.of_end(path)
        self._reader = RecordReader(path, begin, attempt=attempt)
        self._most_bytes = _SIEVE_BYTES if from_start else None

    def poll(self) -> list[Event]:
        """Return complete records since the last call, or since the follower was made.

        Where there is much to catch up with, a call returns a part of it; an empty list means that
        nothing is left.

        A file that cannot be read now gives an empty list: a network file system may fail for a
        moment (ESTALE, EIO), which must not end a process that only watches a run.
        """
        while True:
            before = self._reader.position
            try:
                events = self._reader.read(self._most_bytes)
            except OSError:
                return []
            found = [event for event in events if self._attempt in (None, event.get("attempt"))]
            if found or self._reader.position == before:
                return found


def read_events(path: Path, *kinds: str) -> list[Event]:
    """Return the records of `iter_events` as a list."""
    return list(iter_events(path, *kinds))


def iter_events(path: Path, *kinds: str) -> Iterator[Event]:
    """Yield complete records in the order in which they were written; none if there is no file.

    Torn lines are skipped.

    Args:
        kinds: Only records of these kinds; lines of other kinds are not even parsed.

    Raises:
        TrainctlError: A file cannot be read (exit code 5).
    """
    rows = _all_rows(path) if not kinds or "step" in kinds else iter(())
    for event in _merged(_all_events(path, kinds), rows):
        if not kinds or event["event"] in kinds:
            yield event


def _all_events(path: Path, kinds: Sequence[str]) -> Iterator[Placed]:
    with readable(path), open_file(path) as stream:
        yield from parse_events(_sift_lines(stream, kinds), PackedRows(path))


def _all_rows(path: Path) -> Iterator[Placed]:
    for file in step_files(steps_folder(path)):
        with readable(file.path), open_file(file.path) as stream:
            yield from _steps(file, (line for line in stream if line.endswith(b"\n")))


def _steps(file: StepFile, lines: Iterable[bytes]) -> Iterator[Placed]:
    head = {"schema": RECORD_SCHEMA, "attempt": file.attempt}
    for place, fields in file.rows(lines):
        yield place, {**head, "time": fields.pop("time"), "event": "step", **fields}


def _merged(events: Iterator[Placed], rows: Iterator[Placed]) -> Iterator[Event]:
    """Yield each row after the events that begin before its place."""
    event = next(events, None)
    for place, row in rows:
        while event is not None and event[0] < place:
            yield event[1]
            event = next(events, None)
        yield row
    while event is not None:
        yield event[1]
        event = next(events, None)


def _whole_lines(
    stream: BinaryIO, offset: int, most_bytes: int | None
) -> tuple[list[tuple[int, bytes]], int]:
    """Return the complete lines from a byte on, each with its own, and the byte after them."""
    stream.seek(offset)
    data = stream.read(-1 if most_bytes is None else most_bytes)
    if most_bytes is not None and b"\n" not in data:
        data += stream.readline()
    lines, found = data.split(b"\n")[:-1], []
    for line in lines:
        found.append((offset, line))
        offset += len(line) + 1
    stream.seek(offset)
    return found, offset


def _sift_lines(stream: BinaryIO, kinds: Sequence[str]) -> Iterator[tuple[int, bytes]]:
    """Yield the lines that may be records of these kinds, each with its byte.

    Searches whole blocks for the kinds first, and single lines only in blocks that have one.
    """
    marks = [f'"{kind}"'.encode() for kind in kinds]
    start = 0
    while block := stream.read(_SIEVE_BYTES):
        block += stream.readline()
        after = start + len(block)
        if not marks or any(mark in block for mark in marks):
            for line in block.split(b"\n"):
                if not marks or any(mark in line for mark in marks):
                    yield start, line
                start += len(line) + 1
        start = after


@contextmanager
def readable(path: Path) -> Iterator[None]:
    """Ignore a missing file, and turn other read errors into TrainctlError (exit code 5)."""
    try:
        yield
    except FileNotFoundError:
        return
    except OSError as error:
        raise RunStateError(f"{path} cannot be read: {error.strerror}") from None


def parse_events(lines: Iterable[tuple[int, bytes]], packed: PackedRows) -> Iterator[Placed]:
    """Yield the records in lines of `events.jsonl`; torn lines are skipped.

    Args:
        packed: Restores packed steps of the file that the lines are from.
    """
    for start, line in lines:
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
            event = packed.complete(event)
        if event is not None and event["event"] != COLUMNS:
            yield start, {**_FAILURE, **event} if event["event"] == "failure" else event


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
    rows = _rows_from_end(path, most_bytes) if not kinds or "step" in kinds else iter(())
    events = _events_from_end(path, kinds, most_bytes)
    event = next(events, None)
    for place, row in rows:
        while event is not None and event[0] >= place:
            yield event[1]
            event = next(events, None)
        yield row
    while event is not None:
        yield event[1]
        event = next(events, None)


def _events_from_end(path: Path, kinds: Sequence[str], most_bytes: int | None) -> Iterator[Placed]:
    marks = [f'"{kind}"'.encode() for kind in kinds]
    with readable(path):
        lines = _lines_from_end(path, most_bytes)
        chosen = (
            (start, line)
            for start, line in lines
            if not marks or any(mark in line for mark in marks)
        )
        for place, event in parse_events(chosen, PackedRows(path)):
            if not kinds or event["event"] in kinds:
                yield place, event


def _rows_from_end(path: Path, most_bytes: int | None) -> Iterator[Placed]:
    left = most_bytes
    for file in reversed(step_files(steps_folder(path))):
        if left is not None and left <= 0:
            return
        with readable(file.path):
            lines = _lines_from_end(file.path, left)
            next(lines, None)  # empty, or a row that is not whole
            yield from _steps(file, (line for _, line in lines))
            left = None if left is None else left - file.path.stat().st_size


def _lines_from_end(path: Path, most_bytes: int | None) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file, the last one first, each with its byte."""
    with open_file(path) as stream:
        end, parts = stream.seek(0, os.SEEK_END), list[bytes]()
        after = end + 1
        least = 0 if most_bytes is None else max(0, end - most_bytes)
        while end > least:
            start = max(least, end - _BLOCK_BYTES)
            stream.seek(start)
            first, *lines = stream.read(end - start).split(b"\n")
            if lines:
                parts.append(lines.pop())
                for line in (b"".join(reversed(parts)), *reversed(lines)):
                    after -= len(line) + 1
                    yield after, line
                parts = []
            parts.append(first)  # joined once the line's beginning is found: a line may be long
            end = start
        line = b"".join(reversed(parts))
        yield after - len(line) - 1, line


def round_measured(measured: float) -> float:
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
