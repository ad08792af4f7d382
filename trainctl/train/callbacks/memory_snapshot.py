"""Snapshot of torch's allocator at the peak, in the format of docs.pytorch.org/memory_viz.

attempts/N/memory/rank-0.pickle   every allocation and free of the step with the peak

The history of a step is recorded from its begin, so the viewer draws the whole step, with the
Python stack of each allocation.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

import torch

from trainctl.errors import TrainctlError
from trainctl.options.callbacks import Callback, Context
from trainctl.options.callbacks.memory_snapshot import MemorySnapshotConfig
from trainctl.runs.files import ensure_folder, temporary_path


class MemorySnapshot(Callback):
    """Replaces the rank's snapshot after a step with a new peak, or when memory runs out."""

    def __init__(self, keys: MemorySnapshotConfig) -> None:
        self._keys = keys
        self._peak = 0
        self._context: Context | None = None
        """None on ranks without snapshots."""
        self._is_recording = False

    def on_train_start(self, context: Context) -> None:
        missing = [rank for rank in self._keys.ranks if not 0 <= rank < context.world_size]
        if missing:
            raise TrainctlError(
                f"callbacks.memory_snapshot.ranks has {missing[0]}, which is no rank of the run",
                hint=f"ranks from 0 to {context.world_size - 1}",
            )
        if context.rank in self._keys.ranks and context.device.type == "cuda":
            self._context = context

    def before_step(self, context: Context) -> None:
        if self._context is not None and self._keys.at_step in (None, context.step):
            torch.cuda.memory._record_memory_history(
                enabled="all",
                context="all",
                stacks="python",  # symbols of C++ would take minutes
                max_entries=self._keys.max_entries,
                clear_history=True,
            )
            self._is_recording = True

    def after_step(self, context: Context) -> None:
        if not self._is_recording:
            return
        peak = torch.cuda.max_memory_allocated(context.device)
        if self._keys.at_step is not None or peak > self._peak * (1 + self._keys.margin):
            self._peak = peak
            self._write("step")
        if self._keys.at_step is not None:
            self._stop()

    def close(self) -> None:
        if self._is_recording and _is_out_of_memory(sys.exc_info()[1]):
            self._write("out of memory")
        self._stop()

    def _write(self, why: str) -> None:
        """Write the snapshot, whole or not at all; a full disk does not end the run."""
        context = self._context
        assert context is not None
        path = context.attempt_folder / "memory" / f"rank-{context.rank}.pickle"
        try:
            _dump(path)
        except OSError as error:
            print(f"the memory snapshot is not written: {error}", file=sys.stderr)
            return
        context.record(
            "snapshot",
            path=str(path.relative_to(context.attempt_folder.parents[1])),
            why=why,
            allocated_peak_bytes=torch.cuda.max_memory_allocated(context.device),
        )

    def _stop(self) -> None:
        if self._is_recording:
            torch.cuda.memory._record_memory_history(enabled=None)
            self._is_recording = False


def _dump(path: Path) -> None:
    ensure_folder(path.parent)
    temporary = temporary_path(path)
    try:
        torch.cuda.memory._dump_snapshot(str(temporary))
        temporary.replace(path)
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def _is_out_of_memory(error: BaseException | None) -> bool:
    """Return True if an error, or one that it was raised from, is torch's for device memory."""
    while error is not None and not isinstance(error, torch.OutOfMemoryError):
        error = error.__cause__ or error.__context__
    return error is not None
