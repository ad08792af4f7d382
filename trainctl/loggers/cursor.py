"""How far a logger has come: `RUN/loggers/NAME.json`, replaced as a whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainctl.config.codec import from_plain
from trainctl.config.reading import read_json
from trainctl.errors import ExitCode, TrainctlError
from trainctl.runs.atomic import write_json


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """What was sent, and is not sent again.

    Attributes:
        offset: Bytes of `events.jsonl` that were read.
        attempt: The newest attempt in them.
        step: The last step of the run's curve in them; -1 before the first.
        points: How many points were sent, those that others have replaced among them.
        ended: Offset, and time of the run's status, at which the logger was told that it has all.
        state: What the logger needs to go on; None before its first commit.
        problem: Why it could not send what follows; empty if nothing is in its way.
    """

    offset: int = 0
    attempt: int = 0
    step: int = -1
    points: int = 0
    ended: str = ""
    state: dict[str, Any] | None = None
    problem: str = ""

    def write(self, path: Path) -> None:
        """Replace the file.

        Raises:
            OSError: The disk is full, or the folder cannot be written.
        """
        write_json(path, asdict(self))


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
