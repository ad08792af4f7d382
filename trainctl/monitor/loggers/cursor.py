"""How far a logger has come: `RUN/loggers/NAME.json`, replaced as a whole."""

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
"""Read and committed at a time: about 1,700 steps."""
_COMPARED_BYTES = 4096
"""Several lines, so that the last one is among them; a `time` in each makes them unlike others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """What was sent, and is not sent again."""

    offset: int = 0
    """Bytes of `events.jsonl` that were read."""
    digest: str = ""
    """SHA-256 of the end of these bytes: tells whether the file still has them."""
    attempt: int = 0
    """The newest attempt in them."""
    step: int = -1
    """The last step of the run's curve in them; -1 before the first."""
    points: int = 0
    """How many points were sent, those that others have replaced among them."""
    ended: str = ""
    """Offset, and time of the run's status, at which the logger was told that it has all."""
    state: dict[str, Any] | None = None
    """What the logger needs to go on; None before its first commit."""
    problem: str = ""
    """Why it could not send what follows; empty if nothing is in its way."""

    def write(self, path: Path) -> None:
        """Replace the file.

        Raises:
            OSError: The disk is full, or the folder cannot be written.
        """
        write_json(path, asdict(self))


def read_on(records: Path, cursor: Cursor) -> tuple[list[Event], int, str]:
    """Read the next batch of records behind a cursor.

    Returns:
        The records; offset and digest of a cursor behind them.

    Raises:
        TrainctlError: What the cursor has passed is not in the file any more: it was cut or
            replaced, and what follows may be anything, however long the file is.
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
    """How far it has come; the beginning where there is no file.

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
