"""A live line at the bottom of a terminal; all other output appears above it.

It takes at most one row: a wrapped line cannot be erased without knowing that it was wrapped, and
a terminal that is made narrower wraps what it shows.
"""

from __future__ import annotations

import os
import sys
import threading
from contextlib import suppress
from types import TracebackType
from typing import Any, Self, TextIO

_FALLBACK = 80
"""Columns if the terminal does not report them."""


class LiveLine:
    """Context manager of the live line; inside it stdout and stderr write above the line."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._text = self._drawn = ""
        self._lock = threading.RLock()
        self._replaced: dict[str, Any] = {}

    def __enter__(self) -> Self:
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if stream.isatty():
                self._replaced[name] = stream
                setattr(sys, name, _Above(stream, self))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for name, stream in self._replaced.items():
            setattr(sys, name, stream)
        self.show("")

    @property
    def columns(self) -> int:
        """Greatest length of the line, in characters."""
        try:
            return max(1, os.get_terminal_size(self._stream.fileno()).columns - 1)
        except (OSError, ValueError):
            return _FALLBACK - 1

    def show(self, text: str) -> None:
        """Replace the line's text; an OSError means that the terminal is gone."""
        with self._lock:
            self._text = text
            self._stream.write(self._erased() + self._fresh())
            self._stream.flush()

    def write_above(self, stream: TextIO, text: str) -> None:
        """Write text of any stream in place of the line, and redraw the line below it."""
        with self._lock:
            self._stream.write(self._erased())
            self._stream.flush()
            stream.write(text)
            stream.flush()
            if text.endswith("\n"):
                self._stream.write(self._fresh())
                self._stream.flush()

    def _erased(self) -> str:
        """Return the escape codes that erase the line, in all rows that it takes at the current
        width.
        """
        if not self._drawn:
            return ""
        rows = -(-len(self._drawn) // (self.columns + 1))
        self._drawn = ""
        return "\r" + "\x1b[A" * (rows - 1) + "\x1b[J"

    def _fresh(self) -> str:
        self._drawn = self._text[: self.columns]
        return self._drawn


class _Above:
    """A terminal stream that writes above the live line."""

    def __init__(self, stream: TextIO, line: LiveLine) -> None:
        self._stream = stream
        self._line = line

    def write(self, text: str) -> int:
        self._line.write_above(self._stream, text)
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Refresher:
    """Context manager that redraws a line every `seconds`, in a thread.

    `text` is a function from the available columns to the text.
    """

    def __init__(self, line: LiveLine, text: Any, seconds: float = 0.5) -> None:
        self._line, self._text, self._seconds = line, text, seconds
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="live line", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        with suppress(OSError, ValueError):  # the terminal is closed
            while not self._end.wait(self._seconds):
                self._line.show(self._text(self._line.columns))
