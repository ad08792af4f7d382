"""Cursor of a logger in a run's records: `RUN/loggers/NAME.json`, replaced as a whole."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainctl.config.codec import from_plain
from trainctl.config.reading import open_file, read_json
from trainctl.errors import ExitCode, TrainctlError
from trainctl.runs.atomic import write_json
from trainctl.runs.records import Event, events_after

BATCH_BYTES = 1 << 20
"""Bytes that are read and committed at a time: about 1,700 steps."""
_COMPARED_BYTES = 4096
"""Bytes under the digest: several lines, so that the last one is among them. The `time` in each
line makes them unique.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """Progress of a logger: everything before it was sent."""

    offset: int = 0
    """Bytes of `events.jsonl` that were read."""
    digest: str = ""
    """SHA-256 of the end of these bytes, to notice if the file was cut or replaced."""
    attempt: int = 0
    """The newest attempt in these bytes."""
    step: int = -1
    """Last step of the run's curve in these bytes; -1 before the first."""
    points: int = 0
    """Number of points sent, those that later ones have replaced included."""
    ended: str = ""
    """Offset, and time of the run's status, when the logger was last told that it has everything.
    """
    state: dict[str, Any] | None = None
    """State that the logger continues from; None before its first commit."""
    problem: str = ""
    """Reason why the rest could not be sent; empty if there is none."""

    def write(self, path: Path) -> None:
        """Replace the file.

        Raises:
            OSError: The disk is full, or the folder cannot be written.
        """
        write_json(path, asdict(self))


def read_on(records: Path, cursor: Cursor) -> tuple[list[Event], int, str]:
    """Read the next batch of records after a cursor.

    Returns:
        The records, and offset and digest of the cursor after them.

    Raises:
        TrainctlError: The file was cut or replaced before the cursor, so that the records after it
            may be anything.
        OSError: The file cannot be read.
    """
    is_cut = records.stat().st_size < cursor.offset
    # A cursor of an earlier version has no digest.
    if is_cut or (cursor.digest and _digest(records, cursor.offset) != cursor.digest):
        raise TrainctlError(
            f"{records} was cut or replaced: what was sent of it is not there any more",
            hint="`trainctl runs sync --again` sends it from its beginning",
        )
    events, offset = events_after(records, cursor.offset, BATCH_BYTES)
    return events, offset, _digest(records, offset)


def _digest(records: Path, offset: int) -> str:
    start = max(0, offset - _COMPARED_BYTES)
    with open_file(records) as stream:
        stream.seek(start)
        return hashlib.sha256(stream.read(offset - start)).hexdigest()


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
        raise TrainctlError(
            f"{path} cannot be read: {error}",
            hint="`trainctl runs sync --again` sends everything anew",
            exit_code=ExitCode.run_state,
        ) from None
