"""Ends a node's processes when it is asked to, or when the launcher died, at any moment.

The main thread may be deep in C code (an import, a tokenizer) and run no Python signal handler for
seconds. The kernel's signal still reaches a pipe at once, and a thread that reads it does the work.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn

from trainctl.runs.processes import RunTag, die_with_parent, sweep

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Guard:
    """A thread that waits for a signal to end this attempt's processes on this node.

    The death of the launcher arrives as SIGTERM too. Until `start`, either simply kills this
    process, which is right as long as it has started no other.

    Args:
        tag: Whose processes are ended.
        grace_seconds: Between SIGTERM and SIGKILL.
        launcher_pid: The parent of this process.
        on_orphaned: Called once all are ended, if the launcher is gone and cannot report.
    """

    def __init__(
        self,
        tag: RunTag,
        *,
        grace_seconds: float,
        launcher_pid: int,
        on_orphaned: Callable[[], None],
    ) -> None:
        self._tag = tag
        self._grace_seconds = grace_seconds
        self._launcher_pid = launcher_pid
        self._on_orphaned = on_orphaned
        self._stopping = threading.Event()
        self._wake_up, self._signalled = os.pipe()
        self._thread = threading.Thread(target=self._wait, name="guard", daemon=True)

    def start(self) -> None:
        """Take over from the default actions of the signals. Call it in the main thread."""
        os.set_blocking(self._signalled, False)
        signal.set_wakeup_fd(self._signalled, warn_on_full_buffer=False)
        self.claim_signals()
        self._thread.start()
        die_with_parent(self._launcher_pid, death_signal=signal.SIGTERM)

    def claim_signals(self) -> None:
        """Take the signals back from a library that has put its own handlers in."""
        for number in _SIGNALS:
            signal.signal(number, lambda *_: None)

    def yield_if_stopping(self) -> None:
        """Return at once, or, if this process is being ended, never."""
        if self._stopping.is_set():
            self.wait_for_end()

    def wait_for_end(self) -> NoReturn:
        """Leave the rest to the thread, which ends this process."""
        self._thread.join()
        raise AssertionError("the guard ends the process")

    def _wait(self) -> None:
        number = 0
        while number not in _SIGNALS:
            number = os.read(self._wake_up, 1)[0]
        self._stopping.set()
        is_orphaned = os.getppid() != self._launcher_pid
        try:
            sweep(self._tag, grace_seconds=self._grace_seconds)
            if is_orphaned:
                self._on_orphaned()
        finally:
            leave(128 + number)


def leave(code: int) -> NoReturn:
    """End this process now: libraries that fail while they unload must not change its code."""
    with suppress(OSError):  # a full disk
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
