"""Permissions of a run: the modes of its folders, files and locks.

A run directory is private to its owner, unless `TRAINCTL_UMASK` says otherwise when it is made: 027
lets a group read it, 007 lets a group resume it. Everything in it follows the mode of its folder;
`chmod` on the run directory changes what others may do.

Whoever can open a file can lock it (`flock`), and keep others waiting. So locks are on files of
their own, which only users who may write to the folder can open.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from pathlib import Path

from trainctl.errors import TrainctlError

UMASK_VARIABLE = "TRAINCTL_UMASK"
"""Permissions that a new run directory lacks, in octal, as in a shell's `umask`."""

_PRIVATE = 0o077


def folder_mode() -> int:
    """Return the mode of a new run directory.

    Raises:
        TrainctlError: `TRAINCTL_UMASK` is no octal number (exit code 2).
    """
    text = os.environ.get(UMASK_VARIABLE, "")
    try:
        mask = int(text, 8) if text else _PRIVATE
    except ValueError:
        mask = -1
    if not 0 <= mask <= 0o777:
        raise TrainctlError(
            f"{UMASK_VARIABLE}={text} is no umask",
            hint="three octal digits: 077 is private, 027 lets the group look, 007 lets it write",
        )
    return 0o777 & ~mask | 0o700


def make_folder(path: Path, mode: int | None = None) -> None:
    """Make a folder with the given mode, or with its parent's.

    Raises:
        FileExistsError: It exists.
        OSError: It cannot be made.
    """
    wanted = stat.S_IMODE(path.parent.stat().st_mode) & 0o777 if mode is None else mode
    path.mkdir(mode=0o700)
    if wanted != 0o700:
        path.chmod(wanted | (stat.S_IMODE(path.stat().st_mode) & stat.S_ISGID))


def ensure_folder(path: Path) -> None:
    """Make a folder with its parent's mode, unless it exists.

    Raises:
        OSError: It cannot be made.
    """
    with suppress(FileExistsError):
        make_folder(path)


def file_mode(folder: Path) -> int:
    """Return the mode of a new file: the folder's read and write permissions."""
    return 0o600 | (stat.S_IMODE(folder.stat().st_mode) & 0o066)


def open_lock(path: Path) -> int:
    """Open a lock file, made if missing, and return its descriptor.

    Only users who may write to its folder may open it.

    Raises:
        OSError: It cannot be opened, or made.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    descriptor = os.open(path, flags, 0o600)
    mode = stat.S_IMODE(path.parent.stat().st_mode)
    wanted = 0o600 | (0o060 if mode & 0o020 else 0) | (0o006 if mode & 0o002 else 0)
    status = os.fstat(descriptor)
    if status.st_uid == os.geteuid() and stat.S_IMODE(status.st_mode) != wanted:
        os.fchmod(descriptor, wanted)
    return descriptor


def is_locked(path: Path) -> bool:
    """Return True if a process of this machine has locked a file that this user may not open."""
    try:
        status = path.stat()
        locks = Path("/proc/locks").read_text(encoding="utf-8").splitlines()
    except OSError:
        return False
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
    return any(device in line.split() for line in locks)
