"""Notice on stderr while a file yields nothing, so that a hanging server or disk is named."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from trainctl.config.secrets import redact_text
from trainctl.readers.remote import File, say

SILENT_SECONDS = 30.0
"""Seconds without a document before a notice, and between two notices."""


class _Watch:
    """Files that this process waits for, and the thread that watches while there are any."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.waiting: dict[object, tuple[File, float]] = {}
        self.thread: threading.Thread | None = None

    def wait_for(self, key: object, file: File) -> None:
        with self.lock:
            self.waiting[key] = file, time.monotonic()
            if self.thread is None:
                self.thread = threading.Thread(target=self._run, daemon=True)
                self.thread.start()

    def stop_waiting(self, key: object) -> None:
        with self.lock:
            self.waiting.pop(key, None)

    def _run(self) -> None:
        while True:
            time.sleep(SILENT_SECONDS)
            with self.lock:
                if not self.waiting:
                    self.thread = None
                    return
                waiting = [*self.waiting.values()]
            now = time.monotonic()
            for file, since in waiting:
                if now - since >= SILENT_SECONDS:
                    seconds = f"{now - since:.0f} s"
                    say(redact_text(f"still reading {file}: nothing has come for {seconds}"))


_watch = _Watch()
os.register_at_fork(after_in_child=_watch.__init__)  # type: ignore[misc]  # its thread is not there


@contextmanager
def warn_if_stalled(file: File) -> Iterator[Callable[[bool], None]]:
    """Print a notice while a file yields nothing.

    Yields a function: call it with False when something has arrived, and with True before waiting
    for the next item.
    """
    key = object()

    def wait(is_waiting: bool) -> None:
        if is_waiting:
            _watch.wait_for(key, file)
        else:
            _watch.stop_waiting(key)

    wait(True)
    try:
        yield wait
    finally:
        wait(False)
