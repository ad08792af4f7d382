"""Window of steps under torch's profiler: a trace for chrome://tracing or Perfetto, and a table.

attempts/N/profile/rank-0.trace.json.gz   every operation on a time line
attempts/N/profile/rank-0.txt             the operations with the most self time
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from trainctl.config.schema import LoggingConfig
from trainctl.options.callbacks import Callback, Context
from trainctl.runs.files import write_text
from trainctl.train.callbacks.context import Journal

TABLE_ROWS = 40
NAME_WIDTH = 60


class Profiler:
    """Context manager that profiles the steps of `logging.profile_steps` on this rank.

    The step before the window is a warmup, so that the profiler's own start is not measured. A run
    that ends normally within the window writes what was recorded; a failing run writes nothing.

    Args:
        config: Steps and ranks to profile.
        folder: Folder of the output files, created when they are written.
    """

    def __init__(
        self, config: LoggingConfig, *, rank: int, folder: Path, device: torch.device
    ) -> None:
        wanted = config.profile_steps and rank in config.profile_ranks
        self._window = tuple(config.profile_steps) if wanted else None
        self._rank = rank
        self.folder = folder
        self._device = device
        self._running: profile | None = None
        self._recorded = 0
        self._written = False

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Record the step that runs in the block, if it lies in the window.

        Args:
            number: Number of the step, from 1.
        """
        if self._window is None:
            yield
            return
        first, last = self._window
        if self._running is None and max(first - 1, 1) <= number <= last:
            self._start(warmup=number < first, active=last - first + 1)
        yield
        if self._running is not None:
            self._recorded += number >= first
            self._running.step()
            if number == last:
                self._stop()

    def take_written(self) -> bool:
        """Return True if the files were written since the last call."""
        written, self._written = self._written, False
        return written

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.finish(is_written=error is None)

    def finish(self, *, is_written: bool = True) -> None:
        """Stop a running profiler, and write what it has recorded unless `is_written` is False."""
        if self._running is not None:
            if not is_written or not self._recorded:
                self._running.on_trace_ready = None
            self._stop()

    def _start(self, *, warmup: bool, active: int) -> None:
        activities = [ProfilerActivity.CPU]
        if self._device.type != "cpu":
            activities.append(ProfilerActivity.CUDA)
        self._running = profile(
            activities=activities,
            schedule=schedule(wait=0, warmup=1, active=active, repeat=1) if warmup else None,
            on_trace_ready=self._write,
            acc_events=True,
        )
        self._running.start()

    def _stop(self) -> None:
        assert self._running is not None
        self._running.stop()
        self._running = None

    def _write(self, recorded: profile) -> None:
        """Write both files, each whole or not at all; a full disk does not end the run."""
        try:
            self._write_files(recorded)
        except OSError as error:
            print(f"the profile is not written: {error}", file=sys.stderr)
        else:
            self._written = True

    def _write_files(self, recorded: profile) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        by = "self_cpu_time_total" if self._device.type == "cpu" else "self_device_time_total"
        table = recorded.key_averages().table(
            sort_by=by, row_limit=TABLE_ROWS, max_name_column_width=NAME_WIDTH
        )
        trace = self.folder / f"rank-{self._rank}.trace.json.gz"
        # torch compresses the trace if the name ends in .gz.
        temporary = trace.with_name(f".{os.getpid()}.{trace.name}")
        try:
            recorded.export_chrome_trace(str(temporary))
            temporary.replace(trace)
        finally:
            temporary.unlink(missing_ok=True)
        write_text(self.folder / f"rank-{self._rank}.txt", table)


class Profile(Callback):
    """Profiles the steps of `logging.profile_steps`, and records where the files are."""

    def __init__(self, profiler: Profiler, journal: Journal) -> None:
        self._profiler, self._journal = profiler, journal
        self._step = ExitStack()
        self._is_open = False

    def before_step(self, context: Context) -> None:
        if not self._is_open:  # a step that is tried again stays in the window that it opened
            self._step.enter_context(self._profiler.step(context.step))
            self._is_open = True

    def after_step(self, context: Context) -> None:
        self._step.close()
        self._is_open = False
        if self._profiler.take_written():
            path = self._profiler.folder.relative_to(self._journal.run.root)
            self._journal.record("profile", step=context.step, path=str(path))

    def on_train_end(self, context: Context) -> None:
        self._profiler.finish()

    def close(self) -> None:
        self._profiler.finish(is_written=False)
