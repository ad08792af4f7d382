"""Atomic replacement of files: a file is the old one or the new one, whole, whenever a writer dies.

What is not whole has a temporary name beside the file: a dot, its name, perhaps more, and `.tmp`
(`temporary_path`). The only writer of a file removes what interrupted writers left of it
(`sweep_temporary`).
"""

from __future__ import annotations

import glob
import json
import math
import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainctl.runs.access import file_mode


def temporary_path(path: Path, unique: str = "") -> Path:
    """Return the path of a file or folder until it is whole, or while it is removed."""
    return path.with_name(f".{path.name}.{unique}.tmp" if unique else f".{path.name}.tmp")


def sweep_temporary(folder: Path, name: str = "", *, before: float = math.inf) -> None:
    """Remove what interrupted writers left in a folder; what cannot be removed stays.

    Args:
        folder: Folder of the files; need not exist.
        name: Only temporary files of names that begin with this.
        before: Only files changed before this time, in Unix seconds: others may be writing now.
    """
    with suppress(OSError):
        for path in folder.glob(f".{glob.escape(name)}*.tmp"):
            with suppress(OSError):
                if path.lstat().st_mtime < before:
                    if path.is_dir() and not path.is_symlink():
                        shutil.rmtree(path)
                    else:
                        path.unlink()


def write_text(path: Path, text: str) -> None:
    """Replace the file by `text` in UTF-8; bytes of a path that are not UTF-8 stay as they are.

    Raises:
        OSError: Like `write_bytes`.
    """
    write_bytes(path, text.encode(errors="surrogateescape"))


def write_bytes(path: Path, data: bytes) -> None:
    """Replace the file by `data`: a temporary file, synced, renamed over it.

    Raises:
        OSError: The folder is missing or not writable, or the disk is full; the old file stays.
    """
    # Not the pid: a process with the same pid on another machine or in another container, or a
    # signal handler of this process, may write the file too.
    temporary = temporary_path(path, secrets.token_hex(8))
    try:
        with open(temporary, "xb", opener=_as_its_folder) as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def _as_its_folder(path: str, flags: int) -> int:
    """Open a new file with the permissions of its folder."""
    return os.open(path, flags, file_mode(Path(path).parent))


def write_json(path: Path, value: Any) -> None:
    """Replace the file by `value` as indented JSON.

    Raises:
        ValueError: A number in it is not finite, which JSON cannot hold.
        OSError: Like `write_bytes`.
    """
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    # Bytes of a path that are not UTF-8 become escapes, which JSON reads back unchanged.
    write_bytes(path, text.encode(errors="backslashreplace") + b"\n")


def sync_directory(path: Path) -> None:
    """Make the names in a folder (a rename, a new file) survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
