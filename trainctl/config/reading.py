"""Bounded reads of files with unknown content: nothing blocks on a pipe or exhausts memory.

One damaged or hostile file must not stop a command, or hide the other files of a folder.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from trainctl.models.local_path import local_path as local_path

MOST_BYTES = 64 << 20
"""Maximum size of a file written by trainctl: a plan for ten thousand nodes takes a few MiB."""


def special_file_type(path: Path) -> str:
    """Return what a path is, if it is neither a folder nor a file on a disk; else empty.

    Kernel files look like files, but reading `/proc/kmsg` waits for its next message.
    """
    try:
        status = path.stat()
    except (OSError, ValueError):  # missing, or a NUL in the name
        return ""
    if stat.S_ISREG(status.st_mode):
        return "a file of the kernel" if status.st_dev in _kernel_devices() else ""
    kinds = (
        (stat.S_ISFIFO, "a pipe"),
        (stat.S_ISSOCK, "a socket"),
        (stat.S_ISCHR, "a device"),
        (stat.S_ISBLK, "a device"),
    )
    return next((name for test, name in kinds if test(status.st_mode)), "")


@cache
def _kernel_devices() -> set[int]:
    """Return the device numbers of the kernel's virtual file systems."""
    folders = map(Path, ("/proc", "/sys", "/sys/kernel/debug", "/sys/kernel/tracing"))
    # In a chroot such a path may be an ordinary folder.
    return {folder.stat().st_dev for folder in folders if folder.is_mount()}


def open_file(path: Path) -> BinaryIO:
    """Open an ordinary file for reading.

    Raises:
        OSError: It cannot be read, or is a pipe, a device or a folder.
    """
    # Without O_NONBLOCK, opening a pipe waits for a writer.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "it is no ordinary file", str(path))
    return os.fdopen(descriptor, "rb")


def read_bytes(path: Path, *, most_bytes: int = MOST_BYTES) -> bytes:
    """Return the content of an ordinary file.

    Raises:
        OSError: As `open_file`.
        ValueError: It is larger than `most_bytes`.
    """
    with open_file(path) as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > most_bytes:
            raise ValueError(f"it has {size:,} bytes, more than {most_bytes:,}")
        return stream.read(most_bytes)


def read_json(path: Path, *, most_bytes: int = MOST_BYTES) -> Any:
    """Return the value in a JSON file.

    Raises:
        OSError: As `read_bytes`.
        ValueError: It is too large, no UTF-8, no JSON, nested too deeply, or has a NaN.
    """
    return parse_json(read_bytes(path, most_bytes=most_bytes))


def parse_json(text: bytes | str) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: It is no UTF-8, no JSON, nested too deeply, or has a NaN.
    """
    if isinstance(text, bytes):
        text = text.decode(json.detect_encoding(text), "surrogatepass")
    try:
        return _DECODER.decode(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
"""Shared decoder: a long run has millions of records, and `json.loads` would make one for each."""
