"""The tasks of a preparation: a few files, or a range of a large one. No file is read through.

Tasks do not know which text is held out, and a file more changes those around it alone, so what is
tokenized once serves every configuration that reads the same.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trainctl.config.text.files import digest_of
from trainctl.config.text.remote import File, RemoteFile, is_url

TASK_BYTES = 32 << 20
"""Of files in a task, about: seconds of work, lost at most where a process is killed."""
_FEWEST = 16
"""A group of files may end early, with this share of a task: where that is, their names say."""

Ranges = Callable[[File, int], list[tuple[int, int]]]
"""A file's ranges that can be read by themselves, in order, each of about so many bytes; their
numbers are the source's own."""


@dataclass(frozen=True, slots=True)
class FilePiece:
    """A file, or a range of it."""

    file: File
    """Absolute, or of a URL."""
    size: int
    """Length of the file in bytes."""
    version: str
    """When the file was modified, in nanoseconds; of a URL what its server calls it."""
    start: int = 0
    """First of the range, in the source's own units; 0 for a whole file."""
    end: int | None = None
    """One past its last; None for a whole file."""

    @property
    def span(self) -> tuple[int, int] | None:
        """The range; None for a whole file."""
        return None if self.end is None else (self.start, self.end)

    @property
    def is_as_planned(self) -> bool:
        """Whether the file is the one that it was; one of a URL sees to that itself."""
        return isinstance(self.file, RemoteFile) or self == _of(self.file, self.start, self.end)

    def to_plain(self) -> list[Any]:
        """As JSON has it."""
        return [str(self.file), self.size, self.version, self.start, self.end]


@dataclass(frozen=True, slots=True)
class Task:
    """What is tokenized by one process at a time, and is there whole or not at all."""

    pieces: tuple[FilePiece, ...]
    """What it reads, in order."""
    size: int
    """Bytes that it reads, about."""
    key: str = field(init=False)
    """Names it in a store: other files, or files that have changed, are other tasks."""

    def __post_init__(self) -> None:
        text = json.dumps([piece.to_plain() for piece in self.pieces])
        object.__setattr__(self, "key", digest_of(text)[:24])

    def to_plain(self) -> dict[str, Any]:
        """As JSON has it."""
        return {"pieces": [piece.to_plain() for piece in self.pieces], "size": self.size}

    @classmethod
    def from_plain(cls, data: dict[str, Any]) -> Task:
        """What `to_plain` gave."""
        return cls(tuple(_piece(*each) for each in data["pieces"]), data["size"])


def tasks_of(files: Iterable[File], ranges: Ranges | None) -> list[Task]:
    """Return the tasks that read all documents of files, in their order.

    Args:
        ranges: Of their source, which divides what is larger than a task; None divides no file.

    Raises:
        OSError: A file is not there.
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
    """Return a file, or a range of it, as it is now."""
    if isinstance(file, RemoteFile):
        return FilePiece(file, file.size, file.version, start, end)
    status = file.stat()
    return FilePiece(file, status.st_size, str(status.st_mtime_ns), start, end)


def _piece(name: str, size: int, version: str, start: int, end: int | None) -> FilePiece:
    """Of what `FilePiece.to_plain` gave."""
    file = RemoteFile(name, size, version) if is_url(name) else Path(name)
    return FilePiece(file, size, version, start, end)


def _ends_a_group(file: File) -> bool:
    """Return one file in `_FEWEST`, by its name: where it does, the groups after it are as they
    were."""
    return int(digest_of(file.name)[:8], 16) % _FEWEST == 0
