"""Files that are either the old one or the new one, whole, whatever is killed in between."""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from typing import Any

from trainctl.runs.access import file_mode


def write_text(path: Path, text: str) -> None:
    """Replace the file by `text` (UTF-8; bytes of a path that are none stay as they are).

    Raises:
        OSError: As `write_bytes`.
    """
    write_bytes(path, text.encode(errors="surrogateescape"))


def write_bytes(path: Path, data: bytes) -> None:
    """Replace the file by `data`: a temporary file, synced, renamed over it.

    Raises:
        OSError: The folder is missing or not writable, or the disk is full; the old file stays.
    """
    # Another machine or container may have a process of the same number that writes it too, and a
    # signal's handler of this one.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
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
    """Open a new file for those who may see the folder that it lies in."""
    return os.open(path, flags, file_mode(Path(path).parent))


def write_json(path: Path, value: Any) -> None:
    """Replace the file by `value` as indented JSON.

    Raises:
        ValueError: A number in it is not finite: JSON has none such.
        OSError: As `write_bytes`.
    """
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False)
    # Bytes of a path that are no UTF-8 become escapes that JSON reads back as they were.
    write_bytes(path, text.encode(errors="backslashreplace") + b"\n")


def sync_directory(path: Path) -> None:
    """Make the names in a folder (a rename, a new file) survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
