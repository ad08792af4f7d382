"""Output of an export: what it says of itself, and a folder that appears when it is complete."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from trainctl.config.quantities import disk_text
from trainctl.errors import ExitCode, TrainctlError
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
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(out)
        free_bytes = shutil.disk_usage(out.parent).free
        if free_bytes < needed_bytes:
            sizes = f"{disk_text(needed_bytes)} are needed and {disk_text(free_bytes)} free"
            raise OSError(errno.ENOSPC, sizes)
        folder = out.with_name(f".{out.name}.{os.getpid()}.tmp")
        folder.mkdir()
        try:
            yield folder
            sync_directory(folder)
            folder.rename(out)  # an empty folder is replaced, any other refused
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        sync_directory(out.parent)
    except FileNotFoundError:  # the checkpoint was rotated away
        raise
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise TrainctlError(f"{out} exists and is not an empty folder") from None
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
        raise TrainctlError(
            f"cannot export to {out}: {error.strerror}",
            hint="free space, or name a folder on another disk" if full else "",
            exit_code=ExitCode.environment,
        ) from None


def _remove_leftovers(out: Path) -> None:
    """Remove the temporary folders of killed exports to the same folder."""
    for path in out.parent.iterdir():
        match = re.fullmatch(rf"\.{re.escape(out.name)}\.(\d+)\.tmp", path.name)
        if match is not None and not is_alive(int(match[1])):
            shutil.rmtree(path, ignore_errors=True)
