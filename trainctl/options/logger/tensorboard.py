"""TensorBoard's event files, in `RUN/tensorboard/`: `tensorboard --logdir RUN`, or runs' folder.

A file is appended to by one process; the next one begins another, after it has cut the last one to
what was committed. Of steps that come again TensorBoard shows the last: its default server by
itself, and what reads whole files (`EventAccumulator`, `--load_fast=false`) by the mark that
`go_back` leaves.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainctl.options.logger import Followed, Logger, Point

SPEC = Logger(
    name="tensorboard",
    build="trainctl.options.logger.tensorboard:EventFile",
    extra="tensorboard",
    modules=("tensorboard",),
)

FORMAT = "brain.Event:2"
"""What the first record of a file says of those that follow."""


class EventFile:
    """The event file of this process.

    Args:
        run: The run.
        state: Name and size of the last process's file; None to begin anew.
    """

    def __init__(self, run: Followed, state: Mapping[str, Any] | None) -> None:
        # What torch.utils.tensorboard writes with, too; without numpy's and torch's part of it.
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.record_writer import RecordWriter

        self._event, self._session, self._summary = Event, SessionLog, Summary
        self._path = _begin(run.folder, state)
        self._stream = self._path.open("xb")
        self._records = RecordWriter(self._stream)
        self._write(Event(wall_time=time.time(), file_version=FORMAT))

    def write(self, points: Sequence[Point]) -> None:
        for point in points:
            values = [
                self._summary.Value(tag=name, simple_value=value)
                for name, value in point.values.items()
            ]
            summary = self._summary(value=values)
            self._write(self._event(wall_time=point.time, step=point.step, summary=summary))

    def go_back(self, step: int) -> None:
        log = self._session(status=self._session.START)
        self._write(self._event(wall_time=time.time(), step=step, session_log=log))

    def commit(self) -> Mapping[str, Any]:
        self._stream.flush()
        os.fsync(self._stream.fileno())
        return {"file": self._path.name, "bytes": self._stream.tell()}

    def close(self) -> None:
        self._stream.close()

    def _write(self, event: Any) -> None:
        self._records.write(event.SerializeToString())


def _event_files(folder: Path) -> list[Path]:
    """Those of this logger, in the order in which they were begun, which is how they are read."""
    return sorted(folder.glob("events.out.tfevents.*.trainctl"))


def _begin(folder: Path, state: Mapping[str, Any] | None) -> Path:
    """A new file behind those that were committed; what came after the commit is taken back."""
    last, size = (state["file"], state["bytes"]) if state is not None else ("", 0)
    for path in _event_files(folder):
        if path.name > last:
            path.unlink()
        elif path.name == last and path.stat().st_size > size:
            os.truncate(path, size)
    number = int(last.split(".")[3]) + 1 if last else 1
    return folder / f"events.out.tfevents.{number:010}.trainctl"
