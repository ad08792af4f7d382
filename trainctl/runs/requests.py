"""Requests to a running launch: files in its run's `requests/` folder.

Anyone who may write there can make one. Rank 0 looks once a step and all ranks agree, so a request
is never followed by only some ranks. A file is renamed into place; its name is the request.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from enum import StrEnum

from trainctl.runs.files import ensure_folder, remove_stale_temporary, write_json
from trainctl.runs.layout import RunPaths


class Request(StrEnum):
    """Kind of request."""

    checkpoint = "checkpoint"
    """Save at the next step and continue."""
    stop = "stop"
    """Save at the next step and end in good order."""
    end = "end"
    """End at once without saving. The launcher follows it, as if it got SIGTERM."""


def file_request(run: RunPaths, request: Request, reason: str = "") -> None:
    """Make a request to the launch that holds the run; repeating a pending request changes nothing.

    Args:
        reason: Reason, for a person who looks.

    Raises:
        OSError: The folder cannot be written.
    """
    ensure_folder(run.requests)
    write_json(
        run.requests / request.value, {"time": time.time(), "pid": os.getpid(), "reason": reason}
    )


def pending_requests(run: RunPaths) -> set[Request]:
    """Return the requests that have not been followed yet. Lists one folder."""
    try:
        names = os.listdir(run.requests)  # noqa: PTH208  (once a step: no object for each name)
    except OSError:
        return set()
    return {Request(name) for name in names if name in Request.__members__}


def is_requested(run: RunPaths, request: Request) -> bool:
    """Return True if the request is pending; False if the folder cannot be read."""
    return request in pending_requests(run)


def withdraw_earlier(run: RunPaths, moment: float) -> None:
    """Withdraw requests made before a moment, in Unix seconds: they were for another launch."""
    remove_stale_temporary(run.requests, before=moment)
    for request in pending_requests(run):
        with suppress(FileNotFoundError):
            if (run.requests / request.value).stat().st_mtime < moment:
                withdraw_request(run, request)


def withdraw_request(run: RunPaths, request: Request) -> None:
    """Withdraw a request, or mark it as followed."""
    (run.requests / request.value).unlink(missing_ok=True)
