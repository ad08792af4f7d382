"""Progress of long work on stderr: a bar in a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any, Self

from trainctl.cli.console import rich_console, say

LINE_SECONDS = 5.0
"""Interval between two plain lines."""


class Meter:
    """Context manager that shows the progress of consecutive pieces of work.

    Work that ends within its first interval prints no plain line.
    """

    def __init__(self) -> None:
        self._live: Any = None
        self._tasks: dict[str, Any] = {}
        self._what = ""
        self._last = 0.0

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            from rich.progress import (
                BarColumn,
                Progress,
                TaskProgressColumn,
                TextColumn,
                TimeRemainingColumn,
            )

            self._live = Progress(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                TaskProgressColumn(),
                TimeRemainingColumn(),
                console=rich_console(stderr=True),
                transient=True,
            )
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def __call__(self, what: str, done: int, total: int) -> None:
        """Show that `done` of `total` units of `what` are done."""
        if self._live is not None:
            if what not in self._tasks:
                self._tasks[what] = self._live.add_task(what)
            self._live.update(self._tasks[what], completed=done, total=total)
            return
        now = time.monotonic()
        if what != self._what:
            self._what, self._last = what, now
        elif now - self._last >= LINE_SECONDS:
            self._last = now
            say(f"{what}: {100 * done / max(1, total):.0f} %")
