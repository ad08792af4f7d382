"""Processes beside a run: one sends metrics to a logger, another copies checkpoints to a store.

The launcher starts them and never waits for them. A companion works until its stdin ends, which its
launcher closes when the run has ended; what is left is then sent. After any error it tries again,
with growing pauses. It has the lowest CPU priority, and may be killed at any time.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import select
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from trainctl.config.secrets import redact_text
from trainctl.errors import ExitCode, MachineError, TrainctlError
from trainctl.runs.directory import open_run
from trainctl.runs.files import ensure_folder, open_as_its_folder, open_lock, remove_stale_temporary
from trainctl.runs.layout import CompanionPaths, RunPaths

_POLL_SECONDS = 0.5
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 1.0, 60.0
_NICENESS = 19


class Sender(Protocol):
    """Work of a companion. `send` and `end` may raise any error, and are then called again."""

    def send(self) -> bool:
        """Send the next piece, and return True if there was one."""

    def end(self) -> None:
        """Send what is left when the run has ended."""

    def give_up(self, problem: str) -> None:
        """Record why the rest cannot be sent now."""

    def close(self) -> None:
        """Release connections."""


def serve(
    argv: Sequence[str] | None,
    make: Callable[[RunPaths, str], Sender],
    *,
    prog: str,
    ends_by_itself: Callable[[str], bool] = lambda _: False,
) -> int:
    """Run a companion: `RUN_DIR NAME [--follow | --again]`.

    Without `--follow` it sends what exists now.

    Args:
        make: Makes the sender from the run and the companion's name.
        ends_by_itself: Returns True for a companion whose `end` needs no `send` before it.

    Returns:
        0 if everything was sent, 4 if not, 5 if another process is sending.
    """
    parser = argparse.ArgumentParser(prog=prog)
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("name")
    parser.add_argument("--follow", action="store_true", help="until stdin ends")
    parser.add_argument("--again", action="store_true", help="what was sent already too")
    given = parser.parse_args(argv)
    os.nice(_NICENESS)
    try:
        run = open_run(given.run_dir)
        os.umask(0o777 & ~run.root.stat().st_mode)  # its files get the run's permissions
        paths = run.companion(given.name)
        ensure_folder(paths.folder)
        if not _lock(paths, waits=given.follow):
            return ExitCode.run_state
        remove_stale_temporary(paths.folder, paths.cursor.name)
        if given.again:
            paths.cursor.unlink(missing_ok=True)
        sender = make(run, given.name)
        return _send(sender, follows=given.follow, drains=not ends_by_itself(given.name))
    except (TrainctlError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return ExitCode.environment


def _lock(paths: CompanionPaths, *, waits: bool) -> bool:
    """Take the companion's lock until this process ends; False if another process has it."""
    descriptor = open_lock(paths.lock)
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if not waits or _has_ended(_POLL_SECONDS):
                return False


def _send(sender: Sender, *, follows: bool, drains: bool) -> int:
    pause, is_last = _FIRST_PAUSE_SECONDS, not follows
    while True:
        try:
            while (drains or not is_last) and sender.send():
                pause = _FIRST_PAUSE_SECONDS
            if is_last:
                sender.end()
                sender.close()
                return ExitCode.success
            is_last = _has_ended(_POLL_SECONDS)
        except Exception as error:  # any error of a library or a server
            traceback.print_exc()
            with suppress(Exception):
                sender.give_up(_in_one_line(error))
            if is_last:
                return ExitCode.environment
            is_last = _has_ended(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)


def _in_one_line(error: Exception) -> str:
    """Return the error's text, without secrets of a URL in it."""
    text = redact_text(" ".join(str(error).split()))
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


def run_companion(run: RunPaths, name: str, argv: Sequence[str]) -> int:
    """Run a companion without `--follow`, and return its exit code.

    Args:
        argv: Its command line.

    Raises:
        TrainctlError: The run directory cannot be written (exit code 4).
    """
    paths = run.companion(name)
    try:
        ensure_folder(paths.folder)
        with open(paths.log, "ab", opener=open_as_its_folder) as log:
            return subprocess.run(argv, stdout=log, stderr=log).returncode
    except OSError as error:
        raise MachineError(
            f"{run.root} cannot be written: {error.strerror}",
            hint="what was sent is noted there; copy the run to send it from elsewhere",
        ) from None
