"""Delivery of a run's metrics to a logger: the process that sends them, and its cursor.

The cursor is `RUN/loggers/NAME.json`, replaced as a whole.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from trainctl.config.codec import from_plain
from trainctl.config.reading import open_file, read_json
from trainctl.config.schema import RunConfig
from trainctl.errors import RunStateError, TrainctlError
from trainctl.monitor import loggers
from trainctl.options.logger import python_of
from trainctl.runs.files import write_json
from trainctl.runs.layout import RunPaths
from trainctl.runs.records import Event, Position, RecordReader, record_files

ALERTS = "alerts"
"""Name of the process that sends alerts, in place of a logger's."""


def command(run: RunPaths, name: str, *options: str, config: RunConfig) -> list[str]:
    """Return the command line of the process.

    Args:
        config: The configuration, which may name another Python for this logger.
    """
    python = sys.executable if name == ALERTS else python_of(name, config)
    ours = ["-P", "-m", "trainctl.monitor.loggers"]
    start = ours if python == sys.executable else ["-P", loggers.__file__]
    return [python, *start, str(run.root), name, *options]


BATCH_BYTES = 1 << 20
"""Bytes of a file that are read and committed at a time: about 3,000 steps."""
_COMPARED_BYTES = 4096
"""Bytes of a file under the digest: several lines, so that the last one is among them. The time in
each line makes them unique.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """Progress of a logger: everything before it was sent."""

    offset: int = 0
    """Bytes of `events.jsonl` that were read."""
    rows: dict[str, int] = field(default_factory=dict)
    """Bytes of each file in `steps/` that were read, by its name."""
    digest: str = ""
    """SHA-256 of the end of these bytes, to notice if a file was cut or replaced."""
    attempt: int = 0
    """The newest attempt in these bytes."""
    step: int = -1
    """Last step of the run's curve in these bytes; -1 before the first."""
    points: int = 0
    """Number of points sent, those that later ones have replaced included."""
    ended: str = ""
    """Bytes read, and time of the run's status, when the logger was last told that it has
    everything.
    """
    state: dict[str, Any] | None = None
    """State that the logger continues from; None before its first commit."""
    problem: str = ""
    """Reason why the rest could not be sent; empty if there is none."""

    @property
    def position(self) -> Position:
        return Position(self.offset, self.rows)

    def moved(self, position: Position, digest: str, **changes: Any) -> Cursor:
        """Return the cursor after records up to a position."""
        rows = dict(position.rows)
        return replace(self, offset=position.events, rows=rows, digest=digest, **changes)

    def write(self, path: Path) -> None:
        """Replace the file.

        Raises:
            OSError: The disk is full, or the folder cannot be written.
        """
        write_json(path, asdict(self))


def read_on(records: Path, cursor: Cursor) -> tuple[list[Event], Position, str]:
    """Read the next batch of records after a cursor.

    Returns:
        The records, and position and digest of the cursor after them.

    Raises:
        TrainctlError: A file was cut or replaced before the cursor, so that the records after it
            may be anything.
        OSError: A file cannot be read.
    """
    reader = RecordReader(records, cursor.position)
    # A cursor of an earlier version has no digest.
    if reader.is_cut or (cursor.digest and _digest(records, cursor.position) != cursor.digest):
        raise TrainctlError(
            f"{records} was cut or replaced: what was sent of it is not there any more",
            hint="`trainctl runs sync --again` sends it from its beginning",
        )
    events = reader.read(BATCH_BYTES)
    return events, reader.position, _digest(records, reader.position)


def _digest(records: Path, position: Position) -> str:
    """Return the digest of what was read last of `events.jsonl` and of the newest steps."""
    found = hashlib.sha256(_end(records, position.events))
    newest = [file for file in record_files(records) if file.name in position.rows][-1:]
    for file in newest:
        found.update(_end(file, position.rows[file.name]))
    return found.hexdigest()


def _end(file: Path, size: int) -> bytes:
    start = max(0, size - _COMPARED_BYTES)
    with open_file(file) as stream:
        stream.seek(start)
        return stream.read(size - start)


def read_cursor(path: Path) -> Cursor:
    """Read a cursor; a new one at the beginning if there is no file.

    Raises:
        TrainctlError: The file is damaged (exit code 5).
    """
    try:
        plain: Mapping[str, Any] = read_json(path)
        return from_plain(Cursor, plain)
    except FileNotFoundError:
        return Cursor()
    except (OSError, ValueError) as error:
        raise RunStateError(
            f"{path} cannot be read: {error}",
            hint="`trainctl runs sync --again` sends everything anew",
        ) from None
