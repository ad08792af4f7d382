"""Ends a node's processes on a signal, or when the launcher is gone, at any moment.

The main thread may be deep in C code (an import, a tokenizer) and run no Python signal handler for
seconds. The signal still reaches the wakeup pipe at once, and a thread that reads it does the work.

DeepSpeed compiles operators for minutes, in which the ranks seem to hang: `BuildWatch` reports it,
and the locks of builds that are ended are removed.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from trainctl.hardware.builds import build_folders, is_stale_lock, locks_held_by
from trainctl.runs.layout import AttemptPaths
from trainctl.runs.processes import (
    LEASE_END,
    RunTag,
    die_with_parent,
    processes_of,
    terminate_processes,
)
from trainctl.runs.status import Phase, read_beat

_STDIN = 0
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class SignalGuard:
    """A thread that waits for a signal to end this attempt's processes on this node.

    The death of the launcher arrives as SIGTERM too. Until `start`, a signal simply kills this
    process, which is right as long as it has started no other.

    An agent on another machine than its launcher's has a lease as well: stdin, on which the
    launcher writes again and again. Its end means that the launcher is gone, and so does too long a
    silence, since a cut cable ends no connection.

    Args:
        launcher_pid: The parent of this process.
        on_orphaned: Called with a description of the loss, once all processes are ended, if the
            launcher is gone and cannot report.
        lease_seconds: Longest silence on stdin; None does not read it.
        on_preempted: Called for the first SIGTERM instead of ending: a scheduler sent it, and will
            end this process later. None where SIGTERM comes from the launcher.
    """

    def __init__(
        self,
        tag: RunTag,
        *,
        grace_seconds: float,
        launcher_pid: int,
        on_orphaned: Callable[[str], None],
        lease_seconds: float | None = None,
        on_preempted: Callable[[], None] | None = None,
    ) -> None:
        self._tag = tag
        self._grace_seconds = grace_seconds
        self._launcher_pid = launcher_pid
        self._on_orphaned = on_orphaned
        self._lease_seconds = lease_seconds
        self._on_preempted = on_preempted
        self._stopping = threading.Event()
        self._wake_up, self._signalled = os.pipe()
        self._thread = threading.Thread(target=self._wait, name="guard", daemon=True)

    def start(self) -> None:
        """Replace the default actions of the signals. Call it in the main thread."""
        os.set_blocking(self._signalled, False)
        signal.set_wakeup_fd(self._signalled, warn_on_full_buffer=False)
        for number in _SIGNALS:
            signal.signal(number, lambda *_: None)
        self._thread.start()
        die_with_parent(self._launcher_pid, death_signal=signal.SIGTERM)

    def block_if_stopping(self) -> None:
        """Return at once, unless this process is being ended: then never return."""
        if self._stopping.is_set():
            self.wait_for_end()

    def wait_for_end(self) -> NoReturn:
        """Wait for the guard's thread to end this process."""
        self._thread.join()
        raise AssertionError("the guard ends the process")

    def _wait(self) -> None:
        number, loss = self._await_end()
        self._stopping.set()
        try:
            terminate_with_builds(self._tag, grace_seconds=self._grace_seconds)
            if loss:
                self._on_orphaned(loss)
        finally:
            exit_now(128 + number)

    def _await_end(self) -> tuple[int, str]:
        """Return the signal that ends this node, and how the launcher was lost, if it was."""
        lease = [] if self._lease_seconds is None else [_STDIN]
        heard_at = time.monotonic()
        while True:
            patience = None
            if self._lease_seconds is not None:
                patience = max(0.0, heard_at + self._lease_seconds - time.monotonic())
            ready, _, _ = select.select([self._wake_up, *lease], [], [], patience)
            if self._wake_up in ready:
                number = os.read(self._wake_up, 1)[0]
                if number in _SIGNALS:
                    is_gone = os.getppid() != self._launcher_pid
                    if number == signal.SIGTERM and self._on_preempted is not None and not is_gone:
                        self._on_preempted()
                        self._on_preempted = None
                        continue
                    return number, "ended without stopping this attempt" if is_gone else ""
            elif _STDIN in ready:
                heard_at = time.monotonic()
                received = os.read(_STDIN, 4096)
                if not received:
                    return signal.SIGTERM, "ended without stopping this attempt"
                if LEASE_END in received:
                    return signal.SIGTERM, ""
            else:
                return signal.SIGTERM, f"has not been heard for {self._lease_seconds:.0f} s"


def exit_now(code: int) -> NoReturn:
    """End this process without unloading libraries: a failure there may change the exit code."""
    with suppress(OSError):  # a full disk
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


_LOOK_SECONDS = 1.0
_CHECK_SECONDS = 5.0
"""Shortest build that is reported for an operator that exists: torch also locks a compiled operator
for a moment, to find out whether it is up to date.
"""


class BuildWatch:
    """Watches for native operators being compiled on this machine, until training begins.

    Torch's cpp_extension holds a file `lock` in an operator's folder while it compiles there. A
    rank that waits for another rank's or run's build sees the same lock.

    Args:
        operators: Names of the operators that the ranks use.
        on_build: Called with an operator and None when its build begins, and with the operator and
            the build's seconds when it ends.
    """

    def __init__(
        self,
        attempt: AttemptPaths,
        operators: Collection[str],
        on_build: Callable[[str, float | None], None],
    ) -> None:
        self._attempt = attempt
        self._unbuilt = set(operators)
        self._on_build = on_build
        self._checked_at = 0.0
        self._locked: dict[str, float] = {}
        self._reported: set[str] = set()

    def look(self) -> None:
        """Report builds that began or ended. Looks at most once a second."""
        now = time.monotonic()
        if not self._unbuilt or now - self._checked_at < _LOOK_SECONDS:
            return
        self._checked_at = now
        with suppress(OSError):  # a home on a network file system: the next look may succeed
            self._compare(now)
        beat = read_beat(self._attempt.heartbeat(0))
        if beat is not None and beat.phase is not Phase.start:
            self._unbuilt.clear()

    def _compare(self, now: float) -> None:
        for operator in sorted(self._unbuilt):
            folders = build_folders(operator)
            if any((folder / "lock").exists() for folder in folders):
                since = self._locked.setdefault(operator, now)
                is_new = not any(_is_built(folder, operator) for folder in folders)
                if operator not in self._reported and (is_new or now - since > _CHECK_SECONDS):
                    self._reported.add(operator)
                    self._on_build(operator, None)
            elif operator in self._locked:
                seconds = now - self._locked.pop(operator)
                if operator in self._reported:
                    self._unbuilt.remove(operator)
                    if any(_is_built(folder, operator) for folder in folders):
                        self._on_build(operator, seconds)


def terminate_with_builds(tag: RunTag, *, grace_seconds: float) -> None:
    """End every process that carries the tag, and remove the locks of builds that this interrupts.

    Locks that no living process holds are removed too.
    """
    locks = {(folder / "lock").resolve() for folder in build_folders("*")}
    cut_short = locks & {lock for pid in processes_of(tag) for lock in locks_held_by(pid)}
    terminate_processes(tag, grace_seconds=grace_seconds)
    for lock in locks:
        # A stale lock is of a build that was killed earlier: no living process builds there.
        if lock in cut_short or is_stale_lock(lock):
            with suppress(OSError):
                lock.unlink(missing_ok=True)


def _is_built(folder: Path, operator: str) -> bool:
    return (folder / f"{operator}.so").exists()
