"""What a running launch is asked to do: files in its run's `requests/` folder.

Anyone who may write there can ask; the first rank looks once a step and all ranks agree, so a
request is never half followed. A file is renamed into place and its name is the request.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from enum import StrEnum

from trainctl.runs.access import ensure_folder
from trainctl.runs.atomic import sweep_temporary, write_json
from trainctl.runs.layout import RunPaths


class Request(StrEnum):
    """What can be asked for."""

    checkpoint = "checkpoint"
    """Save at the next step and go on."""
    stop = "stop"
    """Save at the next step and end in good order."""
    end = "end"
    """End at once, without saving: for the launcher, as SIGTERM to it would be."""


def file_request(run: RunPaths, request: Request, reason: str = "") -> None:
    """Ask the launch that holds the run; asking again before it is followed changes nothing.

    Args:
        reason: Why, for a person who looks.

    Raises:
        OSError: The folder cannot be written.
    """
    ensure_folder(run.requests)
    write_json(
        run.requests / request.value, {"time": time.time(), "pid": os.getpid(), "reason": reason}
    )


def pending_requests(run: RunPaths) -> set[Request]:
    """What has been asked for and not been followed yet; one look into one folder."""
    try:
        names = os.listdir(run.requests)  # noqa: PTH208  (once a step: no object for each name)
    except OSError:
        return set()
    return {Request(name) for name in names if name in Request.__members__}


def is_requested(run: RunPaths, request: Request) -> bool:
    """Whether this is asked for and has not been followed yet; no, if the folder cannot be read."""
    return request in pending_requests(run)


def withdraw_earlier(run: RunPaths, moment: float) -> None:
    """Take back what was asked before a moment, in seconds since 1970: it was of another launch."""
    sweep_temporary(run.requests, before=moment)
    for request in pending_requests(run):
        with suppress(FileNotFoundError):
            if (run.requests / request.value).stat().st_mtime < moment:
                withdraw_request(run, request)


def withdraw_request(run: RunPaths, request: Request) -> None:
    """Take a request back, or mark it as followed."""
    (run.requests / request.value).unlink(missing_ok=True)
