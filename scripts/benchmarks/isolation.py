"""Run a function in a process of its own, forked from this one, that ends by a deadline."""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from trainctl.errors import TrainctlError
from trainctl.runs.failures import error_line

POLL_SECONDS = 0.02
LONGEST_CAUSE = 200
"""Characters of a cause: a table's cell."""


def run_isolated(work: Callable[[], None], *, limit: float, log: Path) -> str:
    """Run a function in a forked process; return why it failed, or an empty string.

    The process leads a group of its own, which is killed after `limit` seconds, and again when the
    process has ended, so that no process that it started outlives it. Its output goes to `log`.
    """
    deadline = time.monotonic() + limit
    sys.stdout.flush()
    sys.stderr.flush()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # forks while numpy has threads
        pid = os.fork()
    if pid == 0:
        _become(work, log)
    with suppress(OSError):
        os.setpgid(pid, pid)  # here too: a kill must not come before the child's own call
    status = None
    while status is None and time.monotonic() < deadline:
        ended, code = os.waitpid(pid, os.WNOHANG)
        if ended:
            status = code
        else:
            time.sleep(POLL_SECONDS)
    with suppress(OSError):
        os.killpg(pid, signal.SIGKILL)
    if status is None:
        os.waitpid(pid, 0)
        return f"not done after {limit:.0f} s"
    code = os.waitstatus_to_exitcode(status)
    if code == 0:
        return ""
    cause = error_line(log) if log.is_file() else ""
    return (cause or f"ended with {code} and no error in its output")[:LONGEST_CAUSE]


def describe(error: TrainctlError) -> str:
    """Return the line of an error that a log's reader looks for, with the first finding."""
    first = error.findings[0] if error.findings else None
    return f"error: {first.rule}: {first.message}" if first else f"error: {error.message}"


def _become(work: Callable[[], None], log: Path) -> None:
    """Do the work as the forked process, and exit."""
    code = 1
    try:
        os.setpgid(0, 0)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout = sys.stderr = os.fdopen(output, "w", buffering=1)  # may be others than 1 and 2
        work()
        code = 0
    except TrainctlError as error:
        print(describe(error), file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        with suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)  # unloading what was imported takes a second, and may crash
