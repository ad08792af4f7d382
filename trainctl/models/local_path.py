"""Paths as users and files write them."""

from __future__ import annotations

import stat
from pathlib import Path


def local_path(written: str | Path) -> Path:
    """Return where a path leads, with the home folder for `~`; that of no known user stays `~name`,
    which does not exist.
    """
    try:
        return Path(written).expanduser()
    except RuntimeError:
        return Path(written)


def is_there(path: Path) -> bool:
    """Return True if something is at a path that this process may look at."""
    return _mode(path) != 0


def is_folder(path: Path) -> bool:
    """Return True if a path is a folder, of which this process may know."""
    return stat.S_ISDIR(_mode(path))


def is_file(path: Path) -> bool:
    """Return True if a path is a regular file, of which this process may know."""
    return stat.S_ISREG(_mode(path))


def _mode(path: Path) -> int:
    """Return the mode of what is at a path; 0 for a path that the system refuses."""
    try:
        return path.stat().st_mode
    except (OSError, ValueError):  # not there, not allowed, too long, or a NUL in it
        return 0
