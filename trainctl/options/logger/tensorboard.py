"""TensorBoard's event files in `RUN/tensorboard/`, for `tensorboard --logdir` RUN or the runs'
folder.

One process appends to a file. The next process truncates that file to what was committed, and
starts another one. TensorBoard shows the last value of a repeated step: its default server does so
by itself, and readers of whole files (`EventAccumulator`, `--load_fast=false`) do so by the record
that `go_back` writes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainctl.options.logger import FollowedRun, Logger, Point, markdown
from trainctl.options.logger._event_file import (
    scalars_record,
    session_start_record,
    text_record,
    version_record,
)


class EventFile:
    """Sink that writes the event file of this process.

    Args:
        state: Name and size of the last process's file; None to start again.
    """

    def __init__(self, run: FollowedRun, state: Mapping[str, Any] | None) -> None:
        self._path, self._tables = _begin_file(run.folder, state), run.tables
        self._stream = self._path.open("xb")
        self._stream.write(version_record(time.time()))

    def write(self, points: Sequence[Point]) -> None:
        for point in points:
            self._stream.write(scalars_record(point.time, point.step, point.values))
            for name, table in self._tables(point).items():
                text = markdown(table)
                self._stream.write(text_record(point.time, point.step, name, text))

    def go_back(self, step: int) -> None:
        self._stream.write(session_start_record(time.time(), step))

    def commit(self) -> Mapping[str, Any]:
        self._stream.flush()
        os.fsync(self._stream.fileno())
        return {"file": self._path.name, "bytes": self._stream.tell()}

    def close(self) -> None:
        self._stream.close()


def _event_files(folder: Path) -> list[Path]:
    """Return this logger's files in the order of their creation, in which they are read."""
    return sorted(folder.glob("events.out.tfevents.*.trainctl"))


def _begin_file(folder: Path, state: Mapping[str, Any] | None) -> Path:
    """Return the path of a new file after the committed ones; remove what followed the commit."""
    last, size = (state["file"], state["bytes"]) if state is not None else ("", 0)
    for path in _event_files(folder):
        if path.name > last:
            path.unlink()
        elif path.name == last and path.stat().st_size > size:
            os.truncate(path, size)
    number = int(last.split(".")[3]) + 1 if last else 1
    return folder / f"events.out.tfevents.{number:010}.trainctl"


SPEC = Logger(name="tensorboard", build=EventFile)
