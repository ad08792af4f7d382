"""`python -m trainctl.monitor.loggers RUN_DIR NAME [--follow | --again]`: send metrics to a logger.

Without `--follow` it sends the metrics that exist now. With it, it sends until its stdin ends: its
launcher closes it when the run has ended, and the rest is then sent. After any error of the logger
it tries again, with growing pauses. It has the lowest CPU priority, and may be killed at any time.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import select
import sys
import time
import traceback
from contextlib import suppress
from pathlib import Path

from trainctl.errors import ExitCode, TrainctlError
from trainctl.monitor.loggers.alerts import Alerter
from trainctl.monitor.loggers.delivery import ALERTS
from trainctl.monitor.loggers.follower import Follower
from trainctl.runs.directory import open_run
from trainctl.runs.files import ensure_folder, open_lock, remove_stale_temporary
from trainctl.runs.layout import LoggerPaths, RunPaths

_POLL_SECONDS = 0.5
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 1.0, 60.0
_NICENESS = 19


def main() -> int:
    """Send metrics. Return 0 if all were sent, 4 if not, 5 if another process is sending them."""
    parser = argparse.ArgumentParser(prog="python -m trainctl.monitor.loggers")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("name")
    parser.add_argument("--follow", action="store_true", help="until stdin ends")
    parser.add_argument("--again", action="store_true", help="what was sent already too")
    given = parser.parse_args()
    os.nice(_NICENESS)
    try:
        run = open_run(given.run_dir)
        os.umask(0o777 & ~run.root.stat().st_mode)  # a logger's files get the run's permissions
        paths = run.logger(given.name)
        ensure_folder(paths.folder)
        if not _lock(paths, waits=given.follow):
            return ExitCode.run_state
        remove_stale_temporary(paths.folder, paths.cursor.name)
        if given.again:
            paths.cursor.unlink(missing_ok=True)
        return _send(run, given.name, follows=given.follow)
    except (TrainctlError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return ExitCode.environment


def _lock(paths: LoggerPaths, *, waits: bool) -> bool:
    """Take the logger's lock until this process ends; False if another process has it."""
    descriptor = open_lock(paths.lock)
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if not waits or _has_ended(_POLL_SECONDS):
                return False


def _send(run: RunPaths, name: str, *, follows: bool) -> int:
    follower = Alerter(run) if name == ALERTS else Follower(run, name)
    pause, is_last = _FIRST_PAUSE_SECONDS, not follows
    while True:
        try:
            while not (is_last and name == ALERTS) and follower.send():
                pause = _FIRST_PAUSE_SECONDS
            if is_last:
                follower.end()
                follower.close()
                return ExitCode.success
            is_last = _has_ended(_POLL_SECONDS)
        except Exception as error:  # any error of the logger, its library or its server
            traceback.print_exc()
            with suppress(Exception):
                follower.give_up(_told(error))
            if is_last:
                return ExitCode.environment
            is_last = _has_ended(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


def _told(error: Exception) -> str:
    """Return the error in one line."""
    text = " ".join(str(error).split())
    if isinstance(error, TrainctlError):
        return f"{text} ({error.hint})" if error.hint else text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _has_ended(seconds: float) -> bool:
    """Wait for some seconds, or until stdin ends; return True if it has ended."""
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        if select.select([sys.stdin], [], [], left)[0] and not os.read(sys.stdin.fileno(), 1024):
            return True
    return False


if __name__ == "__main__":
    sys.exit(main())
