"""Layout of a mirror: what is listed, and the parts that it consists of.

| key below the mirror's URL | |
|---|---|
| `index/00000007.json` | what is listed: checkpoints and records; the highest number counts |
| `parts/WRITER/SHA256` | a part of a file, or the description of files (`FileSet`), by its digest |

An index is written with a condition, that its number is not taken, after everything it refers to
was read back. So there is one sequence of indexes, and none refers to what is not whole. A writer
removes only parts that no index referred to before its own, and never those of a later writer.

The store takes objects below a URL, of any file system whose writes can be made to fail if the
object exists.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from trainctl.config.codec import from_plain
from trainctl.config.reading import MOST_BYTES, read_bytes
from trainctl.errors import RunStateError
from trainctl.readers.remote import (
    ATTEMPTS,
    Notify,
    call_with_retries,
    file_system_of,
    print_notice,
)
from trainctl.runs.files import temporary_path, write_bytes
from trainctl.runs.manifest import digest, is_name_of
from trainctl.untrusted import is_count, is_finite, is_time, safe_path

_REMOVED_AT_ONCE = 8

_NO_SUCH_RANGE, _CONDITION_FAILED = 416, 412
"""Statuses of HTTP."""


class Store:
    """Objects by their keys, paths below the URL. Reads are never answered from a cache.

    Args:
        url: Folder, in the syntax of fsspec.
        attempts: Attempts at each request.
        notify: Called before each wait for another attempt.

    Raises:
        TrainctlError: By each method: the store refuses, is unreachable, or its package is missing.
    """

    def __init__(
        self, url: str, *, attempts: int = ATTEMPTS, notify: Notify = print_notice
    ) -> None:
        self.url = url.rstrip("/")
        self._attempts, self._notify = attempts, notify
        self._file_system, root = file_system_of(self.url, notify)
        self._root = root.rstrip("/")
        self._is_local = self.url.startswith("file://")

    def read(self, key: str, *, is_own: bool = False) -> bytes | None:
        """Return the content of an object; None if there is none.

        Args:
            is_own: Whether this process wrote it, so that its size is known.

        Raises:
            TrainctlError: It is larger than any object of a mirror, or no ordinary file (exit code
                5).
        """

        def read() -> bytes | None:
            try:
                if self._is_local:
                    return read_bytes(Path(self._path(key)))
                if is_own:
                    return bytes(self._file_system.cat_file(self._path(key)))
                return self._read_bounded(self._path(key))
            except FileNotFoundError:
                return None
            except ValueError as error:
                raise RunStateError(f"{self.url}/{key}: {error}") from None

        found: bytes | None = self._call(read, key, "read")
        return found

    def write(self, key: str, data: bytes) -> None:
        """Write an object, or replace it, at once."""
        self._call(partial(self._write, key, data), key, "write")

    def create(self, key: str, data: bytes) -> bool:
        """Write an object unless there is one; return False if there is.

        A repeated request may find the object that its first attempt wrote.
        """

        def create() -> bool:
            try:
                self._create(key, data)
            except OSError as error:
                if _is_taken(error):
                    return False
                raise
            return True

        made: bool = self._call(create, key, "write")
        return made

    def keys(self, folder: str) -> list[str]:
        """Return the keys of all objects below a folder, sorted."""

        def look() -> list[str]:
            self._file_system.invalidate_cache()
            try:
                found = self._file_system.find(self._path(folder))
            except FileNotFoundError:
                return []
            start = len(self._root.lstrip("/")) + 1
            return sorted(path.lstrip("/")[start:] for path in found)

        keys: list[str] = self._call(look, folder, "read")
        return [key for key in keys if not key.endswith(".tmp")]

    def remove(self, keys: Sequence[str]) -> None:
        """Remove objects, by a request each: not every S3 server knows a request for many.

        One that is gone already is fine.
        """

        def remove(key: str) -> None:
            with suppress(FileNotFoundError):
                self._file_system.rm_file(self._path(key))

        with ThreadPoolExecutor(_REMOVED_AT_ONCE) as threads:
            for _ in threads.map(lambda key: self._call(partial(remove, key), key, "write"), keys):
                pass

    def _read_bounded(self, path: str) -> bytes:
        """Return the content of an object of a remote store; raises ValueError if it is larger."""
        try:
            data: bytes = self._file_system.cat_file(path, 0, MOST_BYTES + 1)
        except Exception as error:
            if _status(error) != _NO_SUCH_RANGE:
                raise
            # Of an empty object; some servers want a range that ends within the object.
            is_larger = self._file_system.info(path)["size"] > MOST_BYTES
            data = b"" if is_larger else self._file_system.cat_file(path)
        else:
            is_larger = len(data) > MOST_BYTES
        if is_larger:
            raise ValueError(f"it has more than {MOST_BYTES:,} bytes")
        return data

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"

    def _call(self, attempt: Callable[[], Any], key: str, verb: str) -> Any:
        return call_with_retries(
            attempt, f"{self.url}/{key}", notify=self._notify, attempts=self._attempts, verb=verb
        )

    def _write(self, key: str, data: bytes) -> None:
        if self._is_local:
            path = Path(self._path(key))
            path.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(path, data)
        else:
            self._file_system.pipe_file(self._path(key), data)

    def _create(self, key: str, data: bytes) -> None:
        """Write an object; raise FileExistsError if there is one."""
        if not self._is_local:
            self._file_system.pipe_file(self._path(key), data, mode="create")
            return
        path = Path(self._path(key))
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = temporary_path(path, secrets.token_hex(8))
        try:
            write_bytes(whole, data)
            os.link(whole, path)  # unlike a rename, it fails if the name is taken
        finally:
            whole.unlink(missing_ok=True)


def _is_taken(error: OSError) -> bool:
    """Return True if a condition was not met. Not every S3 server says which, as s3fs needs it."""
    return isinstance(error, FileExistsError) or _status(error) == _CONDITION_FAILED


def _status(error: Exception) -> int | None:
    """Return the status of HTTP that a file system's error stands for, if it says so."""
    response = getattr(error.__cause__, "response", None) or {}
    status: int | None = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return status or getattr(error, "code", None)


PART_BYTES = 32 << 20
"""Bytes of a part. Each part in flight is in memory twice, as sent and as read back."""
PARTS_AT_ONCE = 4
"""Parts that are sent or fetched at the same time: one connection rarely fills a network."""

SCHEMA = 1
_INDEX_FOLDER, _PART_FOLDER = "index", "parts"
_PART = re.compile(r"parts/[0-9a-f]{16}/[0-9a-f]{64}")
_DIGEST = "sha256"
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A file, as its parts."""

    name: str
    """Path below the checkpoint's folder, or below the run directory for a record."""
    bytes: int
    sha256: str
    part_keys: tuple[str, ...]
    """Keys of its parts, in order."""


@dataclass(frozen=True, slots=True)
class FileSet:
    """Files of a checkpoint, or the records of a run; stored as a part of its own."""

    files: tuple[StoredFile, ...] = ()

    def encode(self) -> bytes:
        """Return the content of its part."""
        return json.dumps(asdict(self)).encode()


@dataclass(frozen=True, slots=True)
class ListedCheckpoint:
    """A whole checkpoint in the mirror, with facts of its manifest."""

    name: str
    """Name of its folder in the run."""
    step: int
    bytes: int
    files: str
    """Key of its `FileSet`."""
    manifest: str
    """SHA-256 of its manifest's file."""
    metrics: dict[str, float] = field(default_factory=dict)
    kept_for: str = ""
    attempt: int = 0
    weights_only: bool = False
    stored: float = 0.0
    """Time when it was listed, in Unix seconds."""


@dataclass(frozen=True, slots=True)
class Index:
    """List of everything whole in a mirror."""

    number: int
    run: str
    """Id of the run that owns the mirror."""
    name: str
    """Name of the run directory."""
    writer: str
    """Id of the run directory that wrote it."""
    host: str
    """Machine that wrote it."""
    records: str
    """Key of the `FileSet` of configuration, plans and records."""
    checkpoints: tuple[ListedCheckpoint, ...] = ()
    schema: int = SCHEMA

    def encode(self) -> bytes:
        """Return its content, with its checksum."""
        plain = json.loads(json.dumps(asdict(self)))
        return json.dumps({**plain, _DIGEST: digest(plain)}, indent=1).encode()


def index_key(number: int) -> str:
    """Return the key of an index."""
    return f"{_INDEX_FOLDER}/{number:08d}.json"


def part_key(writer: str, sha256: str) -> str:
    """Return the key of a part that a writer sends."""
    return f"{_PART_FOLDER}/{writer}/{sha256}"


def index_keys(store: Store) -> list[str]:
    """Return the keys of all indexes, oldest first."""
    return [key for key in store.keys(_INDEX_FOLDER) if re.fullmatch(r"index/\d{8,}\.json", key)]


def part_keys(store: Store) -> list[str]:
    """Return the keys of all parts, listed or not."""
    return store.keys(_PART_FOLDER)


def newest_index(store: Store) -> tuple[Index | None, int]:
    """Return the newest readable index, and the highest number in use; None and 0 if there is none.

    A damaged index is passed over: it was never confirmed, or the store has damaged it since.

    Raises:
        TrainctlError: It is of a newer version (exit code 5).
    """
    keys = index_keys(store)
    highest = max((int(PurePosixPath(key).stem) for key in keys), default=0)
    for key in reversed(keys):
        content = store.read(key)
        index = None if content is None else decode_index(content, key)
        if index is not None and index_key(index.number) == key:
            return index, highest
    return None, highest


def decode_index(content: bytes, where: str) -> Index | None:
    """Return the index, or None if it is damaged.

    Raises:
        TrainctlError: It is of a newer version (exit code 5).
    """
    try:
        plain = json.loads(content)
        claimed = plain.pop(_DIGEST)
        if digest(plain) != claimed:
            return None
        if plain["schema"] > SCHEMA:
            raise RunStateError(
                f"{where} was written by a newer trainctl (schema {plain['schema']})",
                hint="pip install --upgrade trainctl",
            )
        index = from_plain(Index, plain)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    names = {each.name for each in index.checkpoints}
    is_sound = (
        is_count(index.number)
        and _PART.fullmatch(index.records)
        and len(names) == len(index.checkpoints)
        and all(map(_is_sound, index.checkpoints))
    )
    return index if is_sound else None


def _is_sound(checkpoint: ListedCheckpoint) -> bool:
    """Return True if the facts of a checkpoint are plausible, and agree with its name."""
    each = checkpoint
    return (
        all(map(is_count, (each.step, each.bytes, each.attempt)))
        and is_name_of(each.name, each.step, weights_only=each.weights_only)
        and _PART.fullmatch(each.files) is not None
        and is_time(each.stored)
        and all(map(is_finite, each.metrics.values()))
        and all(map(str.isprintable, (*each.metrics, each.kept_for)))
    )


def read_part(store: Store, key: str) -> bytes:
    """Return the content of a part.

    Raises:
        TrainctlError: It is missing or has another content than its name says (exit code 5).
    """
    content = store.read(key) if _PART.fullmatch(key) else None
    if content is None or hashlib.sha256(content).hexdigest() != PurePosixPath(key).name:
        raise RunStateError(f"{store.url}/{key} is {'missing' if content is None else 'damaged'}")
    return content


def read_files(store: Store, key: str) -> tuple[StoredFile, ...]:
    """Return the files of a checkpoint or of the records.

    Raises:
        TrainctlError: Their description is missing or damaged (exit code 5).
    """
    try:
        plain: Any = json.loads(read_part(store, key))
        files = from_plain(FileSet, plain).files
        _check_files(files)
    except (ValueError, TypeError, RecursionError) as error:
        raise RunStateError(f"{store.url}/{key} is damaged: {error}") from None
    return files


def _check_files(files: Iterable[StoredFile]) -> None:
    """Raise ValueError unless all files can lie beside each other in one folder."""
    paths: set[Path] = set()
    folders: set[Path] = set()
    for file in files:
        path = safe_path(Path(), file.name)
        if path in paths:
            raise ValueError(f"it lists {file.name} twice")
        paths.add(path)
        folders.update(path.parents)
        is_whole = is_count(file.bytes) and _SHA256.fullmatch(file.sha256)
        if not is_whole or not all(map(_PART.fullmatch, file.part_keys)):
            raise ValueError(f"it does not say what is in {file.name}")
    for path in paths & folders:
        raise ValueError(f"{path} is a file in it, and a folder too")


def parts_of(files: Iterable[StoredFile]) -> set[str]:
    """Return the keys of all parts of files."""
    return {key for file in files for key in file.part_keys}
