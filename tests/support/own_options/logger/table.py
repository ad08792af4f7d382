"""Tables `RUN/table/train.csv` and `RUN/table/evaluation.csv`: one row per step, one column per
metric.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainctl.options.logger import FollowedRun, Logger, Point

KINDS = ("train", "evaluation")


class Tables:
    """Sink with one table for each kind of point.

    Args:
        state: State of the last commit; None to start again.
    """

    def __init__(self, run: FollowedRun, state: Mapping[str, Any] | None) -> None:
        self._tables: dict[str, CsvTable] = {}
        for kind in KINDS:
            path = run.folder / f"{kind}.csv"
            if state is None:
                path.unlink(missing_ok=True)
            self._tables[kind] = CsvTable(path)

    def write(self, points: Sequence[Point]) -> None:
        for kind, table in self._tables.items():
            table.write([point for point in points if point.kind == kind])

    def go_back(self, step: int) -> None:
        for table in self._tables.values():
            table.cut(step)

    def commit(self) -> Mapping[str, Any]:
        for table in self._tables.values():
            table.sync()
        return {}

    def close(self) -> None:
        """Do nothing: no file stays open."""


class CsvTable:
    """A CSV file with ascending steps: a new row replaces all rows from its step on.

    Args:
        path: The file; created with its first row.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._columns: list[str] = []
        self._last = 0
        if path.exists():
            self._drop_torn_row()
            with path.open(newline="", encoding="utf-8") as stream:
                rows = csv.reader(stream)
                self._columns = next(rows, [])
                for row in rows:
                    self._last = int(row[0])

    def write(self, points: Sequence[Point]) -> None:
        """Append rows for points."""
        if not points:
            return
        names = dict.fromkeys(name for point in points for name in point.values)
        missing = [name for name in names if name not in self._columns]
        if missing:
            self._add_columns(missing)
        with self._path.open("a", newline="", encoding="utf-8") as stream:
            rows = csv.DictWriter(stream, self._columns, lineterminator="\n")
            for point in points:
                if point.step <= self._last:
                    stream.flush()
                    self.cut(point.step)
                rows.writerow({"step": point.step, "time": point.time, **point.values})
                self._last = point.step

    def cut(self, step: int) -> None:
        """Remove the rows from a step on."""
        if step > self._last:
            return
        with self._path.open("rb+") as stream:
            end = len(stream.readline())
            self._last = 0
            for line in stream:
                found = int(line.partition(b",")[0])
                if found >= step:
                    break
                self._last, end = found, end + len(line)
            stream.truncate(end)

    def sync(self) -> None:
        """Write the file to disk (fsync)."""
        if self._path.exists():
            with self._path.open("rb") as stream:
                os.fsync(stream.fileno())

    def _add_columns(self, names: Sequence[str]) -> None:
        """Rewrite the file with more columns, empty in existing rows."""
        before = self._columns or ["step", "time"]
        whole = self._path.with_suffix(".tmp")
        with whole.open("w", newline="", encoding="utf-8") as stream:
            rows = csv.writer(stream, lineterminator="\n")
            rows.writerow([*before, *names])
            if self._columns:
                with self._path.open(newline="", encoding="utf-8") as old:
                    next(old)
                    rows.writerows([*row, *("" for _ in names)] for row in csv.reader(old))
        whole.replace(self._path)
        self._columns = [*before, *names]

    def _drop_torn_row(self) -> None:
        """Remove an incomplete last row, left by a process that was killed."""
        with self._path.open("rb+") as stream:
            end = 0
            for line in stream:
                end += len(line) if line.endswith(b"\n") else 0
            stream.truncate(end)


SPEC = Logger(name="table", build=Tables)
