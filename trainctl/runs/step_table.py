"""`steps/attempt-N.csv`: the steps of an attempt as a table, one row a step.

A column is a field of the step, with a dot before a part of it: `seconds.forward`, `samples.0`. An
empty cell is a value that was not measured. Floats have every digit (`repr`), texts are quoted, and
NaN and infinities are `NaN`, `Infinity` and `-Infinity`. A row is one `write`; its last cell is the
attempt, so a row that a killed writer cut off lacks it, and the next writer removes that row.

The columns of a file never change: a step with further ones begins `attempt-N-2.csv`, which has the
columns of the file before it, too.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from trainctl.config.reading import open_file
from trainctl.runs.files import ensure_folder, file_mode

FieldPath = tuple[str | int, ...]
"""Path of a value in a record: names, and indices of lists."""

EVENTS_SIZE, ATTEMPT = "events_size", "attempt"
"""The last columns: size of `events.jsonl`, in bytes, when the row was written, which says where
among the events the row belongs; and the attempt."""

_LATER = ("seconds.checkpoint", "seconds.evaluation")
"""Columns that a trainer's first step lacks, and a later one has."""

_NULLABLE = ("grad_norm", "mfu", ("peak_bytes", "allocated"))
"""Values that a trainer records as null where nobody can measure them; other empty cells are
values that the step does not have."""

MOST_FILES = 32
"""Most files of an attempt. They are many only if steps differ in their columns again and again."""

_MOST_HEADER, _MOST_INDEX = 1 << 22, 1 << 16
_FILE = re.compile(r"attempt-(\d+)(?:-(\d+))?\.csv")
_CELL = re.compile(r'(?:"((?:[^"]|"")*)"|([^,"]*))(?:,|$)')
_DECODER = json.JSONDecoder(parse_constant=str)
_CONSTANTS = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}


class RowDecoder:
    """Restores the fields of rows; made once for the many rows with the same columns.

    Args:
        columns: Paths of each column's value; several paths may share a column.
        drops_empty: Whether None in a row is a value that the step does not have.

    Raises:
        ValueError: No record has such fields.
    """

    def __init__(
        self, columns: Sequence[Sequence[FieldPath]], *, drops_empty: bool = False
    ) -> None:
        self.width = len(columns)
        paths = [(path, index) for index, column in enumerate(columns) for path in column]
        fields: dict[str | int, list[tuple[FieldPath, int]]] = {}
        for path, index in paths:
            fields.setdefault(path[0], []).append((path, index))
        self._drops_empty = drops_empty
        self._single: list[tuple[str, int]] = []
        self._maps: list[tuple[str, list[str | int], list[int]]] = []
        self._others: list[tuple[FieldPath, int]] = []
        for field, own in fields.items():
            if [len(path) for path, _ in own] == [1]:
                self._single.append((str(field), own[0][1]))
            elif all(len(path) == 2 and isinstance(path[1], str) for path, _ in own):
                keys = [path[1] for path, _ in own]
                self._maps.append((str(field), keys, [index for _, index in own]))
            else:
                self._others += own
        # One column may fill several indices of a list, and lists must be filled in order.
        self._others.sort(key=lambda other: [p if isinstance(p, int) else -1 for p in other[0]])

    def fields(self, row: Sequence[Any]) -> dict[str, Any]:
        """Return the fields in a row.

        Raises:
            ValueError: The row is of other columns.
        """
        if len(row) != self.width:
            raise ValueError("a row of other columns")
        if self._drops_empty:
            return self._measured(row)
        found: dict[str, Any] = {name: row[index] for name, index in self._single}
        for name, keys, columns in self._maps:
            found[name] = {key: row[i] for key, i in zip(keys, columns, strict=True)}
        for path, index in self._others:
            _put_value(found, path, row[index])
        return found

    def _measured(self, row: Sequence[Any]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, index in self._single:
            value = row[index]
            if value is not None or name in _NULLABLE:
                found[name] = value
        for name, keys, columns in self._maps:
            parts = {
                key: row[i]
                for key, i in zip(keys, columns, strict=True)
                if row[i] is not None or (name, key) in _NULLABLE
            }
            if parts:
                found[name] = parts
        for path, index in self._others:
            if row[index] is not None:
                _put_value(found, path, row[index])
        return found


@dataclass(frozen=True)
class StepFile:
    """One of the files with an attempt's steps."""

    path: Path
    attempt: int
    part: int

    def whole_size(self) -> int:
        """Return its size in bytes without an incomplete last row, which a writer will remove.

        Raises:
            OSError: It cannot be read.
        """
        with open_file(self.path) as stream:
            return _whole_size(stream.fileno())

    def rows(self, lines: Iterable[bytes]) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yield place and fields of each row in lines of the file; other lines are skipped.

        The place is the size that `events.jsonl` had when the row was written.

        Raises:
            OSError: The header cannot be read now.
        """
        for line in lines:
            try:
                row = _split_cells(line.decode())
                if (
                    self._decoder is None
                    or len(row) != self._decoder.width
                    or row[-1] != self.attempt
                ):
                    continue
                fields = self._decoder.fields(row)
                place, step = fields.pop(EVENTS_SIZE), fields["step"]
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
                continue
            if type(place) is int and type(step) is int and "time" in fields:
                yield place, fields

    @cached_property
    def _decoder(self) -> RowDecoder | None:
        names = _header(self.path)
        if names is None:
            return None
        return RowDecoder([[_path(name)] for name in names], drops_empty=True)


class StepWriter:
    """Appends the steps of one attempt. Its caller keeps other writers away meanwhile.

    Args:
        folder: The run's folder of steps; made with the first step.
    """

    def __init__(self, folder: Path, attempt: int) -> None:
        self._folder, self._attempt = folder, attempt
        self._descriptor: int | None = None
        self._columns: dict[str, None] = {}

    def write(self, fields: Mapping[str, Any], events_size: int) -> bool:
        """Append a step; return False if there are too many files for columns that it adds.

        Raises:
            OSError: The disk is full, or the folder cannot be written.
        """
        cells: dict[str, str] = {}
        for name, value in fields.items():
            _flatten(cells, _column(name), value)
        last = {EVENTS_SIZE: str(events_size), ATTEMPT: str(self._attempt)}
        is_open = self._descriptor is not None and cells.keys() <= self._columns.keys()
        if not is_open and not self._open(cells):
            return False
        assert self._descriptor is not None
        cells |= last
        line = ",".join([cells.get(name, "") for name in self._columns]) + "\n"
        if _cut_torn(self._descriptor) == 0:
            line = ",".join(map(_header_cell, self._columns)) + "\n" + line
        data = line.encode(errors="backslashreplace")
        while data:
            data = data[os.write(self._descriptor, data) :]
        return True

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _open(self, cells: Mapping[str, str]) -> bool:
        """Open the attempt's newest file if it has these columns, or begin one that has them."""
        ensure_folder(self._folder)
        if self._descriptor is None:
            _cut_torn_files(self._folder)
        self.close()
        files = step_files(self._folder, self._attempt)
        known = (_header(files[-1].path) or []) if files else []
        wanted = dict.fromkeys(known[:-2] if len(known) > 2 else [])
        is_new = not cells.keys() <= wanted.keys()
        number = (files[-1].part if files else 0) + (is_new and (bool(known) or not files))
        if number > MOST_FILES:
            return False
        if is_new:
            wanted |= dict.fromkeys(cells)
            if "seconds.forward" in wanted:
                wanted |= dict.fromkeys(_LATER)
        self._columns = {**wanted, EVENTS_SIZE: None, ATTEMPT: None}
        name = (
            f"attempt-{self._attempt}.csv"
            if number < 2
            else f"attempt-{self._attempt}-{number}.csv"
        )
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._descriptor = os.open(self._folder / name, flags, file_mode(self._folder))
        return True


def step_files(folder: Path, attempt: int | None = None) -> list[StepFile]:
    """Return the files with steps, by attempt and in the order in which they were begun.

    Args:
        folder: The run's folder of steps; need not exist.
        attempt: Only files of this attempt.
    """
    try:
        names = os.listdir(folder)  # noqa: PTH208  (again and again while a run is followed)
    except OSError:
        return []
    found = [(int(m[1]), int(m[2] or 1), m[0]) for m in map(_FILE.fullmatch, names) if m]
    return [
        StepFile(folder / name, number, part)
        for number, part, name in sorted(found)
        if attempt in (None, number)
    ]


def _cut_torn(descriptor: int) -> int:
    """Cut off an incomplete last row, and return the size of the file."""
    end = _whole_size(descriptor)
    if end != os.fstat(descriptor).st_size:
        os.ftruncate(descriptor, end)
    return end


def _whole_size(descriptor: int) -> int:
    """Return the size of a file without an incomplete last row."""
    end = os.fstat(descriptor).st_size
    while end and os.pread(descriptor, 1, end - 1) != b"\n":
        start = max(0, end - 4096)
        end = start + os.pread(descriptor, end - start, start).rfind(b"\n") + 1
    return end


def _cut_torn_files(folder: Path) -> None:
    """Cut incomplete last lines off the files of earlier attempts, for readers of plain CSV."""
    for file in step_files(folder):
        with suppress(OSError):
            descriptor = os.open(file.path, os.O_RDWR | os.O_CLOEXEC)
            try:
                _cut_torn(descriptor)
            finally:
                os.close(descriptor)


def _header(path: Path) -> list[str] | None:
    """Return the names of a file's columns; None while they are not whole."""
    with open_file(path) as stream:
        line = stream.readline(_MOST_HEADER)
    if not line.endswith(b"\n"):
        return None
    return [quoted if quoted is not None else plain for quoted, plain in _split(line.decode())]


def _split_cells(text: str) -> list[Any]:
    """Return the values in a row.

    Raises:
        ValueError: It is no row.
    """
    if '"' in text:
        return [
            _unescape(quoted) if quoted is not None else _DECODER.decode(plain or "null")
            for quoted, plain in _split(text)
        ]
    # JSON's parser in C reads a row of numbers ten times as fast as a loop over its cells.
    filled = text.strip().replace(",,", ",null,").replace(",,", ",null,")
    row: list[Any] = _DECODER.decode(f"[{filled}]")
    return row


def _split(text: str) -> list[tuple[str | None, str]]:
    """Return the cells of a line: the text if it is quoted, and otherwise None and the cell.

    Raises:
        ValueError: It is no CSV.
    """
    found: list[tuple[str | None, str]] = []
    text, place = text.rstrip("\r\n"), 0
    while True:
        match = _CELL.match(text, place)
        if match is None:
            raise ValueError("no CSV")
        quoted, plain = match.groups()
        found.append((None if quoted is None else quoted.replace('""', '"'), plain))
        place = match.end()
        if not match[0].endswith(","):
            return found


def _flatten(cells: dict[str, str], name: str, value: Any) -> None:
    """Add the cells of a value, each under the name of its column."""
    if isinstance(value, float):
        text = float.__repr__(value)
        cells[name] = _CONSTANTS.get(text, text)
    elif isinstance(value, str):
        cells[name] = value if value in _CONSTANTS.values() else _quote(_escape(value))
    elif value is None:
        cells[name] = ""
    elif value and isinstance(value, dict):
        for part, item in value.items():
            _flatten(cells, f"{name}.{_column(part)}", item)
    elif value and isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _flatten(cells, f"{name}.{index}", item)
    else:
        cells[name] = json.dumps(value)


def _column(name: str) -> str:
    """Return a part of a column's name. It must not look like an index, or have dots."""
    escaped = _escape(name).replace(".", "\\.")
    return f"\\{escaped}" if escaped.isdecimal() else escaped


def _path(column: str) -> FieldPath:
    """Return the path that a column's name stands for."""
    parts = [""]
    for token in re.findall(r"\\.|[^\\]", column):
        if token == ".":
            parts.append("")
        else:
            parts[-1] += token
    return tuple(int(part) if part.isdecimal() else _unescape(part) for part in parts)


def _escape(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace("\r", "\\r")


def _unescape(text: str) -> str:
    if "\\" not in text:
        return text
    return re.sub(r"\\(.)", lambda match: {"n": "\n", "r": "\r"}.get(match[1], match[1]), text)


def _header_cell(name: str) -> str:
    return _quote(name) if re.search(r'[,"\s]', name) else name


def _quote(text: str) -> str:
    return '"' + text.replace('"', '""') + '"'


def _put_value(found: Any, path: FieldPath, value: Any) -> None:
    """Put a value at its path; a list may lack values before it, which are None then."""
    for part, following in zip(path, (*path[1:], None), strict=True):
        inner: Any = [] if isinstance(following, int) else {}
        last = following is None
        if isinstance(part, int):
            if not isinstance(found, list) or part > _MOST_INDEX:
                raise ValueError("no list, or one that is too long")
            found += [None] * (part - len(found))
            if part == len(found):
                found.append(value if last else inner)
            elif not last and found[part] is None:
                found[part] = inner
            found = found[part]
        else:
            found = found.setdefault(part, value if last else inner)
