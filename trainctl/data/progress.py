"""Progress of a preparation, with its remaining time."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

TOKENIZING = "tokenizing"


@dataclass(frozen=True, slots=True)
class PreparationProgress:
    """Snapshot of the progress of a preparation."""

    documents: int
    size: int = 0
    """Approximate bytes of files read so far."""
    whole: int = 0
    """Bytes of all files left to read at the start; 0 if unknown."""
    seconds: float = 0.0
    doing: str = TOKENIZING

    @property
    def is_tokenizing(self) -> bool:
        """Whether documents are being tokenized, rather than judged afterwards."""
        return self.doing == TOKENIZING

    @property
    def seconds_left(self) -> float | None:
        """Estimate from the rate so far; None in the first 2 seconds, or if bytes are unknown."""
        if not self.whole or not self.size or self.seconds < 2:
            return None
        return self.seconds * max(0, self.whole - self.size) / self.size

    def __str__(self) -> str:
        text = self.doing + (f": {self.documents:,} documents" if self.is_tokenizing else "")
        left = self.seconds_left
        if left is None:
            return text
        rate = self.size / self.seconds / 1e6
        share = min(1.0, self.size / self.whole)
        return f"{text}, {share:.0%}, {rate:,.1f} MB/s, {format_duration(left)} left"


Progress = Callable[[PreparationProgress], None]


def ignore_progress(progress: PreparationProgress) -> None:
    """Ignore progress."""


@dataclass(slots=True)
class PreparationMeter:
    """Counter of the work that one process has done."""

    whole: int
    show: Progress
    documents: int = 0
    size: int = 0
    doing: str = TOKENIZING
    _of_task: int = 0
    _began: float = field(default_factory=time.monotonic)

    def document(self, length: int) -> None:
        """Count a document of `length` characters."""
        self.documents += 1
        self._of_task += length
        self._tell()

    def task(self, size: int, documents: int = 0) -> None:
        """Count a finished task of `size` bytes, and `documents` not counted by `document`."""
        self.documents += documents
        self.size += size
        self._of_task = 0
        if documents or self.doing != TOKENIZING:
            self._tell()

    def _tell(self) -> None:
        done = min(self.size + self._of_task, self.whole)
        seconds = time.monotonic() - self._began
        self.show(PreparationProgress(self.documents, done, self.whole, seconds, self.doing))


def format_duration(seconds: float) -> str:
    """Format a duration: ``40 s``, ``12 min``, ``3 h 20 min``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
