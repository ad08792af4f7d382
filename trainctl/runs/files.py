"""Atomic replacement of a run's files, and their permissions.

A file is the old one or the new one, whole, whenever a writer dies. What is not whole has a
temporary name beside the file: a dot, its name, perhaps more, and `.tmp` (`temporary_path`). The
only writer of a file removes what interrupted writers left of it (`remove_stale_temporary`).

A run directory is private to its owner, unless `TRAINCTL_UMASK` says otherwise when it is made: 027
lets a group read it, 007 lets a group resume it. Everything in it follows the mode of its folder;
`chmod` on the run directory changes what others may do.

Whoever can open a file can lock it (`flock`), and keep others waiting. So locks are on files of
their own, which only users who may write to the folder can open.
"""

from __future__ import annotations

import fcntl
import glob
import json
import math
import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from trainctl.errors import TrainctlError


def temporary_path(path: Path, unique: str = "") -> Path:
    """Return the path of a file or folder until it is whole, or while it is removed."""
    return path.with_name(f".{path.name}.{unique}.tmp" if unique else f".{path.name}.tmp")


def remove_stale_temporary(folder: Path, name: str = "", *, before: float = math.inf) -> None:
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
                    remove_path(path)


def remove_path(path: Path) -> None:
    """Remove a folder with everything in it, or a file; of a symbolic link, the link alone.

    Raises:
        OSError: Something cannot be removed, or there is nothing.
    """
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
        with open(temporary, "xb", opener=open_as_its_folder) as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def open_as_its_folder(path: str | Path, flags: int) -> int:
    """Open a file; a new one gets its folder's permissions. This is an `opener` of `open`."""
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


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """Give a folder in TMPDIR that is removed at the end, and remove those of killed processes.

    A process holds (flock) a file in its folder, which the kernel lets go when the process ends.
    """
    root = Path(tempfile.gettempdir())
    for other in root.glob(f"{_TEMPORARY_PREFIX}*"):
        with suppress(OSError):
            _remove_unheld(other)
    with tempfile.TemporaryDirectory(prefix=_TEMPORARY_PREFIX) as name:
        descriptor = os.open(Path(name, _HELD), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield Path(name)
        finally:
            os.close(descriptor)


def _remove_unheld(folder: Path) -> None:
    """Remove a temporary folder of this user unless a process holds it; raises OSError."""
    if folder.lstat().st_uid != os.geteuid():
        return
    descriptor = os.open(folder / _HELD, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        remove_path(folder)
    finally:
        os.close(descriptor)


_TEMPORARY_PREFIX, _HELD = "trainctl-", ".held"
"""Names of temporary folders, and of the file by which each is held."""

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


def ensure_folders(path: Path) -> None:
    """Make a folder and those that it lies in, each with its parent's mode, unless they exist.

    Raises:
        OSError: One cannot be made.
    """
    for folder in reversed((path, *path.parents)):
        ensure_folder(folder)


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
