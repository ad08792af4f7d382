"""Removal of a run: from the first instant on, its directory is no run."""

from __future__ import annotations

import shutil

from trainctl.runs.layout import RunPaths
from trainctl.runs.lock import hold


def remove_run(run: RunPaths) -> None:
    """Remove the directory of a run that nobody uses.

    `run.json` goes first: what an interruption leaves is no run, and cannot be resumed.

    Raises:
        TrainctlError: The run is in use (exit code 5).
        OSError: Something in it cannot be removed.
    """
    with hold(run, patience_seconds=0):
        run.record.unlink()
        for path in run.root.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path != run.lock:
                path.unlink()
    # Only after it is closed: NFS renames an open file instead of removing it, and its folder then
    # cannot be removed.
    run.lock.unlink(missing_ok=True)
    run.root.rmdir()
