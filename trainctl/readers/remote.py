"""Remote files of a corpus: http(s), S3, GCS, the Hugging Face hub, and other fsspec protocols.

The listing of a URL gives the size and version of each file; both are part of the cache's key. A
read continues where a connection broke, and fails if the file has changed since it was listed.
"""

from __future__ import annotations

import importlib
import io
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, cast

from trainctl.config.extras import extra_of, install_command
from trainctl.config.secrets import redact_text
from trainctl.errors import MachineError, TrainctlError

ATTEMPTS = 6
"""Attempts at one position before a launch ends."""
FIRST_WAIT = 1.0
"""Seconds before the second attempt; each further wait is twice as long."""
READ_TIMEOUT_SECONDS = 60.0
"""Seconds without data after which an attempt over HTTP or S3 fails."""
_READ_BYTES = 1 << 20
"""Minimum bytes per request."""
_PERMANENT_ERRORS = (FileNotFoundError, IsADirectoryError, NotADirectoryError, PermissionError)
"""Errors that are not retried."""
_URL_ERRORS = (
    AttributeError,
    FileNotFoundError,
    IsADirectoryError,
    KeyError,
    NotADirectoryError,
    NotImplementedError,
    TypeError,
    ValueError,
)
"""Errors that file systems raise for a URL they cannot handle, besides their own classes."""
_VERSIONS = ("ETag", "etag", "checksum", "md5Hash", "blob_id", "sha256", "uid")
_TIMES = ("LastModified", "Last-Modified", "last_modified", "updated", "mtime", "modificationTime")

sleep = time.sleep

Notify = Callable[[str], None]


def print_notice(message: str) -> None:
    """Print a message on stderr."""
    print(message, file=sys.stderr, flush=True)


@dataclass(frozen=True, slots=True, order=True)
class RemoteFile:
    """A file at a URL, with the methods of a `Path` that reading a corpus needs."""

    url: str
    """Address, with the protocol."""
    size: int
    """Bytes when it was listed."""
    version: str = ""
    """ETag or similar, else the modification time; empty if the server gives neither."""

    @property
    def name(self) -> str:
        """Last component of the path, without an HTTP query."""
        return PurePosixPath(self.url.partition("?")[0]).name

    @property
    def suffix(self) -> str:
        """Last ending of the name, with its dot."""
        return PurePosixPath(self.name).suffix

    def stat(self) -> os.stat_result:
        """Return a stat result in which only the size is meaningful."""
        return os.stat_result((0o100444, 0, 0, 1, 0, 0, self.size, 0, 0, 0))

    def open(self, mode: str = "rb", notify: Notify = print_notice) -> BinaryIO:
        """Open the file; broken reads are resumed, up to `ATTEMPTS` times, and reported.

        Raises:
            TrainctlError: While reading: all attempts failed, or the file has changed.
        """
        assert mode == "rb"
        return cast(BinaryIO, io.BufferedReader(_ResumableStream(self, notify), _READ_BYTES))

    def read_bytes(self) -> bytes:
        """Return the whole content."""
        with self.open() as stream:
            return stream.read()

    def __str__(self) -> str:
        return self.url


File = Path | RemoteFile
"""A local or remote file of a corpus."""


def is_url(text: str) -> bool:
    """Whether a path of `data.paths` is a URL."""
    return "://" in text


def version_of(file: File) -> str:
    """Return a text that changes with the file: name, size, and modification time or version."""
    if isinstance(file, RemoteFile):
        return f"{file}\0{file.size}\0{file.version}"
    status = file.stat()
    return f"{file}\0{status.st_size}\0{status.st_mtime_ns}"


def list_url(url: str, notify: Notify = print_notice) -> tuple[list[RemoteFile], bool]:
    """Return the files of a URL, of a folder or of a glob, and whether the URL is a folder.

    For HTTP, `?` begins a query, only `*` makes a glob, and a page of links is a folder. A `file://`
    URL is never a glob.

    Raises:
        TrainctlError: The protocol is unknown or its package missing (exit code 4), or no server
            answers.
    """
    file_system, path = file_system_of(url, notify)
    protocol = url.partition("://")[0]
    signs = {"http": "*", "https": "*", "file": ""}.get(protocol, "*?[")
    is_glob = any(sign in url for sign in signs)

    def look() -> tuple[dict[str, Any], bool]:
        if is_glob:
            return file_system.glob(path, detail=True), False
        try:
            entry = file_system.info(path)
        except FileNotFoundError as error:
            if isinstance(error.__cause__, OSError):  # no server answered
                raise error.__cause__ from None
            return {}, False
        if entry.get("type") == "directory" or url.endswith("/"):
            return file_system.find(path, detail=True), True
        return {path: entry}, False

    entries, is_folder = call_with_retries(look, url, notify=notify)
    files = []
    for name, entry in entries.items():
        if entry.get("type") == "file":
            if entry.get("size") is None:  # a page of links gives no sizes
                entry = call_with_retries(partial(file_system.info, name), url, notify=notify)
            files.append(_remote_file(protocol, name, entry))
    return sorted(files), is_folder


def _remote_file(protocol: str, name: str, entry: dict[str, Any]) -> RemoteFile:
    path = name if protocol == "file" else name.lstrip("/")
    url = name if is_url(name) else f"{protocol}://{path}"
    if entry.get("size") is None:
        raise TrainctlError(
            redact_text(f"{url} cannot be read: its server does not say how long it is"),
            hint="download it, and name the copy in data.paths",
        )
    return RemoteFile(url, int(entry["size"]), _listed_version(entry))


class _ResumableStream(io.RawIOBase):
    """Raw stream of a remote file, reopened at its position when reading fails."""

    def __init__(self, file: RemoteFile, notify: Notify) -> None:
        self._file, self._notify = file, notify
        self._at = 0
        self._stream: Any = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._file.size}[whence]
        self._at = start + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        wanted = min(len(buffer), self._file.size - self._at)
        if wanted <= 0:
            return 0
        data = call_with_retries(lambda: self._read(wanted), self._file.url, self._at, self._notify)
        buffer[: len(data)] = data
        self._at += len(data)
        return len(data)

    def close(self) -> None:
        self._close_connection()
        super().close()

    def _read(self, wanted: int) -> bytes:
        try:
            if self._stream is None:
                self._stream = self._opened()
            if self._stream.tell() != self._at:
                self._stream.seek(self._at)
            data: bytes = self._stream.read(wanted)
            if not data:
                raise OSError(f"it ended after {self._at:,} of {self._file.size:,} bytes")
            return data
        except BaseException:
            self._close_connection()
            raise

    def _opened(self) -> Any:
        file_system, path = _file_system_of(self._file.url)
        file_system.invalidate_cache()
        entry = file_system.info(path)
        now = (entry.get("size"), _listed_version(entry))
        if now != (self._file.size, self._file.version):
            raise MachineError(
                f"{redact_text(self._file.url)} is not what it was when it was listed: "
                f"{_describe_difference(self._file, now)}",
                hint="launch again, once nobody writes it",
            )
        return file_system.open(path, "rb")

    def _close_connection(self) -> None:
        if self._stream is not None:
            with suppress(Exception):  # closing a broken stream may fail
                self._stream.close()
        self._stream = None


def _describe_difference(file: RemoteFile, now: tuple[int | None, str]) -> str:
    size, version = now
    if size != file.size:
        return f"{size or 0:,} bytes, not {file.size:,}"
    return f"version {version or 'unknown'}, not {file.version or 'unknown'}"


def call_with_retries(
    attempt: Callable[[], Any],
    url: str,
    at: int | None = None,
    notify: Notify = print_notice,
    *,
    attempts: int = ATTEMPTS,
    verb: str = "read",
) -> Any:
    """Return the result of a call of a file system, retried if a retry may succeed.

    File systems raise arbitrary errors, also while they are constructed. All their calls go through
    this function, which converts their errors to ours.

    Args:
        url: Subject of the errors, which show it with its secrets redacted.
        at: Byte of the file that is read next; None for any other call.
        attempts: Number of attempts; 1 leaves retries to the caller.
        verb: What is done to the URL, for the errors.

    Raises:
        TrainctlError: The URL names nothing that can be read (exit code 2), or a package, a
            permission or the server is missing (exit code 4).
    """
    place = "" if at is None else f" at byte {at:,}"
    wait, begun = FIRST_WAIT, time.monotonic()
    for number in range(1, attempts + 1):
        try:
            return attempt()
        except TrainctlError:
            raise
        except ImportError as error:
            raise _missing_package_error(url, error) from None
        except Exception as error:
            why = " ".join(f"{type(error).__name__}: {error}".split()) or "no reason given"
            if isinstance(error, ValueError) and "range requests" in str(error):
                why = "its server gives files as a whole only, and no parts of them"
                raise _unreadable_error(url, why, place, verb) from None
            if at is None and _is_of_the_url(error):
                raise _no_such_error(url, why, verb) from None
            is_missing_library = at is None and type(error) is OSError and error.errno is None
            if isinstance(error, _PERMANENT_ERRORS) or is_missing_library:
                raise _unreadable_error(url, why, "", verb) from None
        if number < attempts:
            notify(
                redact_text(
                    f"{url}{place}: {why}; attempt {number + 1} of {attempts} in {wait:g} s"
                )
            )
            sleep(wait)
            wait *= 2
    seconds = time.monotonic() - begun
    after = f"{place} after {attempts} attempts in {seconds:,.0f} seconds" if attempts > 1 else ""
    raise _unreadable_error(url, why, after, verb)


def _is_of_the_url(error: Exception) -> bool:
    """Whether an error means that the file system cannot handle the URL."""
    of_archives = ("BadZipFile", "ReadError")  # raised by zipfile and tarfile
    return type(error) in _URL_ERRORS or type(error).__name__ in of_archives


def _no_such_error(url: str, why: str, verb: str) -> TrainctlError:
    return TrainctlError(
        redact_text(f"cannot {verb} {url}: {why}"),
        hint="a path, or a URL that says all that fsspec needs, such as s3://BUCKET/FOLDER/*.jsonl",
    )


def _unreadable_error(url: str, why: str, after: str, verb: str) -> TrainctlError:
    return MachineError(
        redact_text(f"cannot {verb} {url}{after}: {why}"),
        hint=f"see that it is there and that you may {verb} it from here; credentials are those of "
        "its client's own variables and files",
    )


def modules_of_url(url: str) -> tuple[str, ...]:
    """Return the modules that reading a URL needs, besides those that trainctl requires."""
    protocol = url.partition("://")[0]
    if protocol in ("http", "https"):
        return "fsspec", "aiohttp"
    if find_spec("fsspec") is None:
        return ("fsspec",)
    from fsspec.registry import known_implementations

    module = known_implementations.get(protocol, {}).get("class", "fsspec").partition(".")[0]
    return ("fsspec",) if extra_of(module) is None else (module,)


def _missing_package_error(url: str, error: ImportError) -> TrainctlError:
    return MachineError(
        redact_text(f"{url} needs a package that is missing ({error})"),
        hint=install_command(*modules_of_url(url)),
    )


def file_system_of(url: str, notify: Notify = print_notice) -> tuple[Any, str]:
    """Return the file system of a URL, and the URL's path within it."""
    found: tuple[Any, str] = call_with_retries(partial(_file_system_of, url), url, notify=notify)
    return found


def _file_system_of(url: str) -> tuple[Any, str]:
    fsspec = import_optional("fsspec", f"reading {url}")
    options: dict[str, Any] = {}
    if url.startswith("http"):
        aiohttp = import_optional("aiohttp", f"reading {url}")
        limit = aiohttp.ClientTimeout(
            total=None, sock_connect=READ_TIMEOUT_SECONDS, sock_read=READ_TIMEOUT_SECONDS
        )
        options = {"client_kwargs": {"timeout": limit}}
    is_s3 = url.startswith(("s3://", "s3a://"))
    if is_s3:
        limits = {"connect_timeout": READ_TIMEOUT_SECONDS, "read_timeout": READ_TIMEOUT_SECONDS}
        options = {"config_kwargs": {**limits, "retries": {"max_attempts": 0}}}
    # Merge with the user's options, which may hold a login: ours would replace them.
    for protocol in ("http", "https", "s3", "s3a"):
        own = fsspec.config.conf.get(protocol, {})
        options = {name: {**own.get(name, {}), **ours} for name, ours in options.items()}
    hook, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        file_system, path = fsspec.core.url_to_fs(url, **options)
    except Exception as error:
        # The traceback keeps a half-built file system alive; FTP's prints on stderr when freed.
        raise error.with_traceback(None) from None
    finally:
        sys.unraisablehook = hook
    if is_s3:
        file_system.retries = 1  # ours suffice: with both, a silent server would take an hour
    return file_system, path


def _listed_version(entry: dict[str, Any]) -> str:
    """Return the version or modification time in a listing's entry; empty without either."""
    for key in (*_VERSIONS, *_TIMES):
        if entry.get(key):
            value = entry[key]
            return value.isoformat() if isinstance(value, datetime) else str(value).strip('"')
    return ""


def import_optional(module: str, what: str) -> Any:
    """Import a module of a package that trainctl's base installation does not include.

    Args:
        what: Subject of the error message, such as ``reading Parquet``.

    Raises:
        TrainctlError: It is not installed (exit code 4).
    """
    try:
        return importlib.import_module(module)
    except ImportError as missing:
        raise MachineError(
            f"{what} needs a package that is missing ({missing})",
            hint=install_command(module),
        ) from None
