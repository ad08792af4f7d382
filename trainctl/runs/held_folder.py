"""A run directory that a process holds by its identity, whatever happens to its name."""

from __future__ import annotations

import os
from pathlib import Path

from trainctl.errors import RunStateError, TrainctlError
from trainctl.runs.checkpoints import newest_checkpoint
from trainctl.runs.layout import RunPaths


class HeldFolder:
    """The directory that a run had when this was made, held open.

    Device and inode identify it: an open directory keeps both. Who trains on after it was removed
    would save into a folder without a configuration, or into another run.

    Args:
        mirror: The run's `checkpoint.mirror`, if it has one.
    """

    def __init__(self, run: RunPaths, mirror: str | None = None) -> None:
        self._run, self._mirror = run, mirror
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
        self._descriptor = os.open(run.root, flags)

    def problem(self) -> RunStateError | None:
        """Return the error to end with if the name is no longer this directory's, else None."""
        try:
            if os.path.samestat(self._run.root.stat(), os.fstat(self._descriptor)):
                return None
            what = "another folder has its name"
        except (FileNotFoundError, NotADirectoryError):
            what = "it was removed"
        except OSError:  # a network file system that fails for a moment
            return None
        moved = self.moved_to
        if moved is not None:
            what = f"it was renamed to {moved.root}"
        return RunStateError(
            f"{self._run.root} is not this run's folder any more: {what}", hint=self._hint(moved)
        )

    def require(self) -> None:
        """Raise the problem, if there is one.

        Raises:
            TrainctlError: The folder is gone, or another one has its name (exit code 5).
        """
        problem = self.problem()
        if problem is not None:
            raise problem

    @property
    def moved_to(self) -> RunPaths | None:
        """The directory under its new name; None if it is removed, or moved by another machine."""
        try:
            path = Path(f"/proc/self/fd/{self._descriptor}").readlink()
            is_there = os.path.samestat(path.stat(), os.fstat(self._descriptor))
        except OSError:
            return None
        return RunPaths(path) if is_there and path != self._run.root else None

    def _hint(self, moved: RunPaths | None) -> str:
        """Return where the last good checkpoint is."""
        if moved is not None:
            try:
                checkpoint, _ = newest_checkpoint(moved)
            except TrainctlError:
                checkpoint = None
            if checkpoint is None:
                return f"it has no checkpoint yet: trainctl resume {moved.root} begins again"
            return f"trainctl resume {moved.root} continues from {checkpoint.path}"
        if self._mirror is not None:
            return f"trainctl resume {self._mirror} continues from the last checkpoint there"
        return "its checkpoints are gone with it, unless somebody moved it"

    def close(self) -> None:
        os.close(self._descriptor)
