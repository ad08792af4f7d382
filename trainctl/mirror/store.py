"""Objects below a URL, of any file system whose writes can be made to fail if the object exists."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

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
