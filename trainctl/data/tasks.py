"""Tasks of a preparation: each is a few files, or a range of a large file. No file is read through.

Tasks do not depend on which text is held out, and adding a file changes only neighboring tasks. So
text is tokenized once for all configurations that read the same files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trainctl.readers.files import digest_of
from trainctl.readers.remote import File, RemoteFile, is_url

TASK_BYTES = 32 << 20
"""Approximate file bytes per task: seconds of work, the most that is lost if a process is
killed.
"""
_FEWEST = 16
"""A group of files may end early, at 1/16 of a task, after a file whose name hashes to a
boundary. So adding a file changes only the groups near it.
"""

Ranges = Callable[[File, int], list[tuple[int, int]]]
"""Returns the independently readable ranges of a file, in order, each of about so many bytes.
Ranges are in the source's own units.
"""


@dataclass(frozen=True, slots=True)
class FilePiece:
    """A file or a range of a file."""

    file: File
    """Absolute path, or a remote file."""
    size: int
    """Size of the whole file in bytes."""
    version: str
    """Modification time in nanoseconds; for a URL, the version that its server reports."""
    start: int = 0
    """Start of the range, in the source's own units; 0 for a whole file."""
    end: int | None = None
    """End of the range (exclusive); None for a whole file."""

    @property
    def span(self) -> tuple[int, int] | None:
        """Start and end of the range; None for a whole file."""
        return None if self.end is None else (self.start, self.end)

    @property
    def is_as_planned(self) -> bool:
        """Whether the file is unchanged since planning. Remote files check this themselves."""
        return isinstance(self.file, RemoteFile) or self == _of(self.file, self.start, self.end)

    def to_plain(self) -> list[Any]:
        """Return the piece as plain JSON."""
        return [str(self.file), self.size, self.version, self.start, self.end]


@dataclass(frozen=True, slots=True)
class Task:
    """Unit of tokenizing: done by one process, and stored completely or not at all."""

    pieces: tuple[FilePiece, ...]
    """Files and ranges to read, in order."""
    size: int
    """Approximate number of bytes to read."""
    key: str = field(init=False)
    """Name in a store, a hash of the pieces: other or changed files make another task."""

    def __post_init__(self) -> None:
        text = json.dumps([piece.to_plain() for piece in self.pieces])
        object.__setattr__(self, "key", digest_of(text)[:24])

    def to_plain(self) -> dict[str, Any]:
        """Return the task as plain JSON."""
        return {"pieces": [piece.to_plain() for piece in self.pieces], "size": self.size}

    @classmethod
    def from_plain(cls, data: dict[str, Any]) -> Task:
        """Create a task from `to_plain`'s result."""
        return cls(tuple(_piece(*each) for each in data["pieces"]), data["size"])


def tasks_of(files: Iterable[File], ranges: Ranges | None) -> list[Task]:
    """Return the tasks that read all documents of files, in order.

    `ranges` divides files that are larger than a task; None divides no file.

    Raises:
        OSError: A file does not exist.
    """
    return list(_tasks(files, ranges))


def _tasks(files: Iterable[File], ranges: Ranges | None) -> Iterator[Task]:
    group: list[FilePiece] = []
    size = 0
    for file in files:
        whole = _of(file)
        found = ranges(file, TASK_BYTES) if ranges and whole.size > TASK_BYTES else []
        if len(found) > 1:
            if group:
                yield Task(tuple(group), size)
                group, size = [], 0
            average = whole.size // len(found)
            for start, end in found:
                yield Task((replace(whole, start=start, end=end),), average)
            continue
        group.append(whole)
        size += whole.size
        if size >= TASK_BYTES or (size >= TASK_BYTES // _FEWEST and _ends_a_group(file)):
            yield Task(tuple(group), size)
            group, size = [], 0
    if group:
        yield Task(tuple(group), size)


def _of(file: File, start: int = 0, end: int | None = None) -> FilePiece:
    """Return the piece of a file with its current size and version."""
    if isinstance(file, RemoteFile):
        return FilePiece(file, file.size, file.version, start, end)
    status = file.stat()
    return FilePiece(file, status.st_size, str(status.st_mtime_ns), start, end)


def _piece(name: str, size: int, version: str, start: int, end: int | None) -> FilePiece:
    """Create a piece from `FilePiece.to_plain`'s result."""
    file = RemoteFile(name, size, version) if is_url(name) else Path(name)
    return FilePiece(file, size, version, start, end)


def _ends_a_group(file: File) -> bool:
    """Return True for one in `_FEWEST` files, chosen by a hash of the name."""
    return int(digest_of(file.name)[:8], 16) % _FEWEST == 0
