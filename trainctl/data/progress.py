"""How far a preparation has come, and how long it will take."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

TOKENIZING = "tokenizing"


@dataclass(frozen=True, slots=True)
class PreparationStanding:
    """How far it has come."""

    documents: int
    size: int = 0
    """Bytes of files that they were read from, about."""
    whole: int = 0
    """Bytes of all files that were left to read when it began; 0 where nobody knows."""
    seconds: float = 0.0
    doing: str = TOKENIZING
    """What is done, in words."""

    @property
    def is_tokenizing(self) -> bool:
        """Whether its documents are tokenized, and not looked at later."""
        return self.doing == TOKENIZING

    @property
    def seconds_left(self) -> float | None:
        """At the rate so far; None while that says little."""
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
        return f"{text}, {share:.0%}, {rate:,.1f} MB/s, {in_words(left)} left"


Progress = Callable[[PreparationStanding], None]


def unseen(standing: PreparationStanding) -> None:
    """Nobody looks."""


@dataclass(slots=True)
class PreparationMeter:
    """Counts what one process has done."""

    whole: int
    """Bytes of the files that are left."""
    show: Progress
    """Called after each document."""
    documents: int = 0
    size: int = 0
    """Bytes of the tasks that are finished."""
    doing: str = TOKENIZING
    """What is done, in words."""
    _of_task: int = 0
    _began: float = field(default_factory=time.monotonic)

    def document(self, length: int) -> None:
        """One more, of so many characters."""
        self.documents += 1
        self._of_task += length
        self._tell()

    def task(self, size: int, documents: int = 0) -> None:
        """One more is finished, of so many bytes; its documents, if they were not told of."""
        self.documents += documents
        self.size += size
        self._of_task = 0
        if documents or self.doing != TOKENIZING:
            self._tell()

    def _tell(self) -> None:
        done = min(self.size + self._of_task, self.whole)
        seconds = time.monotonic() - self._began
        self.show(PreparationStanding(self.documents, done, self.whole, seconds, self.doing))


def in_words(seconds: float) -> str:
    """Such as ``40 s``, ``12 min``, ``3 h 20 min``."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"
