"""Files of the cache of tokenized corpora: folder, locks, memory-mapped arrays and checksums."""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainctl.errors import MachineError, TrainctlError
from trainctl.models.local_path import local_path
from trainctl.readers.remote import Notify, is_url
from trainctl.runs.files import open_lock

CACHE_VARIABLE = "TRAINCTL_CACHE_DIR"
_BLOCK_BYTES = 1 << 24


def ignore_message(message: str) -> None:
    """Ignore a message."""


def cache_folder() -> Path:
    """Return the folder of tokenized corpora: TRAINCTL_CACHE_DIR, or the user's cache."""
    explicit = os.environ.get(CACHE_VARIABLE, "")
    if is_url(explicit):
        raise TrainctlError(
            f"{CACHE_VARIABLE}={explicit} is a URL, and the cache is memory-mapped",
            hint=f"name a folder; data prepare --to {explicit} writes the finished corpus there",
        )
    named = explicit or f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/trainctl"
    return local_path(named).absolute()


@contextmanager
def convert_write_errors(folder: Path) -> Iterator[None]:
    """Report an OSError within the context as a TrainctlError of the cache folder (exit code 4)."""
    try:
        yield
    except OSError as error:
        raise MachineError(
            f"cannot write the tokenized corpus, {folder}: {error.strerror or error}",
            hint="free space there, or name another folder in TRAINCTL_CACHE_DIR; its file system "
            "needs flock and symbolic links",
        ) from None


@contextmanager
def lock_folder(folder: Path, notify: Notify) -> Iterator[None]:
    """Lock a folder of the cache, which need not exist, against writers in other processes.

    `notify` is called before waiting for another process.
    """
    with convert_write_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = open_lock(folder.with_suffix(".lock"))
    try:
        with convert_write_errors(folder):
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.pread(lock, 200, 0).decode(errors="replace") or "another process"
                notify(f"waiting for {holder}, which tokenizes the same text into {folder}")
                fcntl.flock(lock, fcntl.LOCK_EX)
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        yield
    finally:
        os.close(lock)


def map_array(
    path: Path, dtype: npt.DTypeLike, offset: int = 0, *, in_order: bool = False
) -> npt.NDArray[Any]:
    """Memory-map a file as a flat array, `offset` bytes from its start.

    The kernel is advised of random access unless the array is read `in_order`: otherwise it reads
    128 KiB around each page fault.

    Raises:
        OSError: The file cannot be read.
        ValueError: The size is no multiple of the dtype's.
    """
    with path.open("rb") as stream:
        if os.fstat(stream.fileno()).st_size <= offset:  # an empty file cannot be mapped
            return np.empty(0, dtype)
        mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
    if not in_order and hasattr(mmap, "MADV_RANDOM"):  # Windows has none
        mapped.madvise(mmap.MADV_RANDOM)
    return np.frombuffer(mapped, dtype, offset=offset)


def write_synced(path: Path, raw: bytes) -> tuple[int, int]:
    """Write a new file, sync it, and return its size and CRC-32."""
    with path.open("wb") as stream:
        stream.write(raw)
        stream.flush()
        os.fsync(stream.fileno())
    return len(raw), zlib.crc32(raw)


def crc32_of(path: Path) -> int:
    """Return the CRC-32 of a file."""
    found = 0
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK_BYTES):
            found = zlib.crc32(block, found)
    return found
