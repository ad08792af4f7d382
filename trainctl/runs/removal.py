"""Removing a run: its directory is a run no longer from the first instant."""

from __future__ import annotations

import shutil

from trainctl.runs.layout import RunPaths
from trainctl.runs.lock import hold


def remove_run(run: RunPaths) -> None:
    """Remove the directory of a run that nobody uses.

    `run.json` goes first: what an interruption leaves is no run, and cannot be resumed by half.

    Raises:
        TrainctlError: It is in use (exit code 5).
        OSError: Something in it cannot be removed.
    """
    with hold(run, patience_seconds=0):
        run.record.unlink()
        shutil.rmtree(run.root)
