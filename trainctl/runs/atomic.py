"""Files that are either the old one or the new one, whole, whatever is killed in between."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def write_text(path: Path, text: str) -> None:
    """Replace the file by `text` (UTF-8).

    Raises:
        OSError: As `write_bytes`.
    """
    write_bytes(path, text.encode())


def write_bytes(path: Path, data: bytes) -> None:
    """Replace the file by `data`: a temporary file, synced, renamed over it.

    Raises:
        OSError: The folder is missing or not writable, or the disk is full; the old file stays.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def write_json(path: Path, value: Any) -> None:
    """Replace the file by `value` as indented JSON.

    Raises:
        ValueError: A number in it is not finite: JSON has none such.
        OSError: As `write_text`.
    """
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def sync_directory(path: Path) -> None:
    """Make the names in a folder (a rename, a new file) survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
