"""Steps in the packed form of earlier versions, read only.

A step's line in `events.jsonl` held its numbers as a list (`row`), and the byte of the file (`at`)
at which a `columns` record names them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trainctl.config.reading import open_file, parse_json
from trainctl.runs.step_table import RowDecoder

COLUMNS = "columns"
"""Kind of the record that names the numbers of rows; readers do not return it."""

_MOST_NAMES = 1 << 22
"""Largest `columns` record, in bytes."""


class PackedRows:
    """Restores packed steps of one file. Columns are read where a row refers to them, and cached.

    Args:
        path: The run's `events.jsonl`.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known: dict[tuple[int, int], RowDecoder | None] = {}

    def complete(self, event: dict[str, Any]) -> dict[str, Any] | None:
        """Return a record with its numbers under their names; None if the names are lost.

        Raises:
            OSError: The file cannot be read now, but may have them.
        """
        at, row = event.pop("at", None), event.pop("row")
        if not isinstance(at, int) or not isinstance(row, list):
            return None
        try:
            key = (event["attempt"], at)
            if key not in self._known:
                self._known[key] = self._read(*key)
            decoder = self._known[key]
            named = None if decoder is None else decoder.fields(row)
        except (ValueError, AttributeError, LookupError, TypeError, OverflowError):
            return None  # the row has other columns
        return None if named is None else {"schema": 1, **event, **named}

    def _read(self, attempt: int, at: int) -> RowDecoder | None:
        with open_file(self._path) as stream:
            stream.seek(min(max(0, at), os.fstat(stream.fileno()).st_size))
            found = _decoder_in([stream.readline(_MOST_NAMES)], attempt, at)
            if found is None:  # a person has edited the file, or two machines wrote at once
                stream.seek(0)
                mark = f'"{COLUMNS}"'.encode()
                found = _decoder_in((line for line in stream if mark in line), attempt, at)
            return found


def _decoder_in(lines: Iterable[bytes], attempt: int, at: int) -> RowDecoder | None:
    """Return the decoder of the `columns` record of this attempt and byte; None without one."""
    place = {"event": COLUMNS, "attempt": attempt, "at": at}
    for line in lines:
        try:
            record = parse_json(line)
            if isinstance(record, dict) and place.items() <= record.items():
                return RowDecoder(_paths(record.get("names")))
        except (ValueError, TypeError, LookupError):
            continue
    return None


def _paths(plain: Any) -> list[tuple[tuple[str | int, ...], ...]]:
    names = [tuple(map(tuple, column)) for column in plain]
    paths = [path for column in names for path in column]
    parts = [part for path in paths for part in path]
    if all(names) and all(paths) and all(isinstance(part, str | int) for part in parts):
        return names
    raise ValueError("no columns")
