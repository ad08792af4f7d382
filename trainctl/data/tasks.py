"""Tasks of tokenizing, the claims of processes on them, and the progress of a preparation.

A task is a few files, or a range of a large file; planning tasks reads no file through. Tasks do
not depend on which text is held out, and adding a file changes only neighboring tasks. So text is
tokenized once for all configurations that read the same files.

A claim is a symbolic link on a disk that all processes share. Its target is the text of the claim
and points nowhere. Creating a link is atomic, and only one process succeeds. A claim saves work but
guards nothing: two processes that do the same task write the same bytes, and the first to finish
counts. So rare errors of a shared disk do no harm. A claim is taken over when its process is gone.
A process on another machine loses its claim if the claim has not changed for `LEASE_SECONDS` by the
waiting process's own clock. Clocks of machines are never compared.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trainctl.data.cache_files import convert_write_errors
from trainctl.readers.files import digest_of
from trainctl.readers.remote import File, RemoteFile, is_url
from trainctl.runs.processes import is_alive

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
class FileRange:
    """A file or a range of a file."""

    file: File
    """Absolute path, or a remote file."""
    size: int
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
        return isinstance(self.file, RemoteFile) or self == _file_range(
            self.file, self.start, self.end
        )

    def to_plain(self) -> list[Any]:
        """Return the piece as plain JSON."""
        return [str(self.file), self.size, self.version, self.start, self.end]


@dataclass(frozen=True, slots=True)
class Task:
    """Unit of tokenizing: done by one process, and stored completely or not at all."""

    pieces: tuple[FileRange, ...]
    size: int
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
        return cls(tuple(_range_from_plain(*each) for each in data["pieces"]), data["size"])


def plan_tasks(files: Iterable[File], ranges: Ranges | None) -> Iterator[Task]:
    """Yield the tasks that read all documents of files, in order.

    `ranges` divides files that are larger than a task; None divides no file.
    """
    group: list[FileRange] = []
    size = 0
    for file in files:
        whole = _file_range(file)
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


def _file_range(file: File, start: int = 0, end: int | None = None) -> FileRange:
    """Return the piece of a file with its current size and version."""
    if isinstance(file, RemoteFile):
        return FileRange(file, file.size, file.version, start, end)
    status = file.stat()
    return FileRange(file, status.st_size, str(status.st_mtime_ns), start, end)


def _range_from_plain(name: str, size: int, version: str, start: int, end: int | None) -> FileRange:
    file = RemoteFile(name, size, version) if is_url(name) else Path(name)
    return FileRange(file, size, version, start, end)


def _ends_a_group(file: File) -> bool:
    """Return True for one in `_FEWEST` files, chosen by a hash of the name."""
    return int(digest_of(file.name)[:8], 16) % _FEWEST == 0


LEASE_SECONDS = 120.0
"""Longer than a network disk may show an outdated file."""
_BEAT_SECONDS = LEASE_SECONDS / 8


class Claims:
    """Claims in a folder: takes them for this process, and observes those of others."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._here = f"{socket.gethostname()} {_pid_namespace()}"
        self._seen: dict[str, tuple[str, float]] = {}

    @contextmanager
    def held(self, name: str) -> Iterator[bool]:
        """Try to claim a task for the duration of the context; provide True if the claim was taken.

        A claim of a process that is gone is taken over.
        """
        path = self._folder / name
        nonce = secrets.token_hex(8)
        with convert_write_errors(self._folder):
            is_ours = self._take(path, nonce)
        if not is_ours:
            yield False
            return
        done = threading.Event()
        beating = threading.Thread(target=self._renew, args=(path, nonce, done), daemon=True)
        beating.start()
        try:
            yield True
        finally:
            done.set()
            beating.join()
            with suppress(OSError):
                if nonce in _claim_text(path):  # the claim was not taken over
                    path.unlink()

    def forget(self, name: str) -> None:
        """Remove remaining claims on a finished task."""
        for path in self._folder.glob(f"{name}*"):
            path.unlink(missing_ok=True)

    def _take(self, path: Path, nonce: str) -> bool:
        for _ in range(2):
            try:
                path.symlink_to(self._text(nonce, 0))
                return True
            except FileExistsError:
                if not self._is_abandoned(path):
                    return False
            with suppress(OSError):  # another process was faster
                aside = path.with_name(f"{path.name}.{nonce}")
                path.rename(aside)
                aside.unlink()
        return False

    def _text(self, nonce: str, beat: int) -> str:
        return json.dumps([self._here, os.getpid(), nonce, beat])

    def _renew(self, path: Path, nonce: str, done: threading.Event) -> None:
        beat = 0
        while not done.wait(_BEAT_SECONDS):
            beat += 1
            with suppress(OSError):  # the disk is away, or the claim was taken over
                if nonce in _claim_text(path):
                    new = path.with_name(f"{path.name}.{nonce}")
                    new.symlink_to(self._text(nonce, beat))
                    new.replace(path)

    def _is_abandoned(self, path: Path) -> bool:
        try:
            text = _claim_text(path)
        except OSError:  # released just now
            return True
        with suppress(ValueError):
            here, pid, _, _ = json.loads(text)
            if here == self._here and not is_alive(pid):
                return True
        was, since = self._seen.get(path.name, ("", 0.0))
        if text != was:
            self._seen[path.name] = (text, time.monotonic())
            return False
        return time.monotonic() - since > LEASE_SECONDS


def _claim_text(path: Path) -> str:
    return str(path.readlink())


def _pid_namespace() -> str:
    """Return this process's pid namespace: containers with one host name may share process ids."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return ""


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


OnPreparation = Callable[[PreparationProgress], None]


@dataclass(slots=True)
class PreparationMeter:
    """Counter of the work that one process has done."""

    whole: int
    show: OnPreparation
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
