"""Output of an export: what it says of itself, and files that appear when they are complete."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from trainctl.config.quantities import disk_text
from trainctl.errors import MachineError, TrainctlError
from trainctl.runs.files import sync_directory
from trainctl.runs.processes import is_alive


@dataclass(frozen=True, slots=True)
class ExportedCheckpoint:
    """Result of an export."""

    files: list[str]
    """Names of the files in the folder, sorted."""
    size_bytes: int
    """Size of the weights."""
    num_parameters: int
    """Number of parameters; tied ones count once."""
    notes: list[str]
    """Remarks to show the user."""


@contextmanager
def new_folder(out: Path, needed_bytes: int) -> Iterator[Path]:
    """Yield a temporary folder, which is renamed to `out` on success and removed on failure.

    Raises:
        TrainctlError: `out` exists and is not empty, or it cannot be written (exit code 4).
    """
    with _renamed(out, needed_bytes) as folder:
        folder.mkdir()
        yield folder
        sync_directory(folder)


@contextmanager
def new_file(out: Path, needed_bytes: int) -> Iterator[Path]:
    """Yield a temporary path, at which the caller makes a file that becomes `out` on success.

    Raises:
        TrainctlError: `out` exists, or cannot be written (exit code 4).
    """
    with _renamed(out, needed_bytes) as path:
        if out.exists():  # a rename would replace it
            raise FileExistsError(errno.EEXIST, "")
        yield path
        with path.open("rb") as file:
            os.fsync(file.fileno())


@contextmanager
def _renamed(out: Path, needed_bytes: int) -> Iterator[Path]:
    """Yield a temporary path beside `out`; what is there is renamed to `out`, or removed."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(out)
        free_bytes = shutil.disk_usage(out.parent).free
        if free_bytes < needed_bytes:
            sizes = f"{disk_text(needed_bytes)} are needed and {disk_text(free_bytes)} free"
            raise OSError(errno.ENOSPC, sizes)
        made = out.with_name(f".{out.name}.{os.getpid()}.tmp")
        try:
            yield made
            made.rename(out)  # an empty folder is replaced by a folder, any other refused
        except BaseException:
            _remove(made)
            raise
        sync_directory(out.parent)
    except FileNotFoundError:  # the checkpoint was rotated away
        raise
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR, errno.EISDIR):
            raise TrainctlError(f"{out} exists and is not an empty folder") from None
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        raise MachineError(
            f"cannot export to {out}: {error.strerror}",
            hint="free space, or name a folder on another disk" if full else "",
        ) from None


def _remove_leftovers(out: Path) -> None:
    """Remove the temporary folders of killed exports to the same folder."""
    for path in out.parent.iterdir():
        match = re.fullmatch(rf"\.{re.escape(out.name)}\.(\d+)\.tmp", path.name)
        if match is not None and not is_alive(int(match[1])):
            _remove(path)


def _remove(path: Path) -> None:
    with suppress(OSError):
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()
