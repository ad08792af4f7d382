"""Window of steps under torch's profiler: a trace for chrome://tracing or Perfetto, and a summary.

attempts/N/profile/rank-0.trace.json.gz   every operation on a time line
attempts/N/profile/rank-0.txt             where the time of a step goes (`trace_summary`)
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from trainctl.config.schema import LoggingConfig
from trainctl.options.callbacks import Callback, Context
from trainctl.runs.files import ensure_folder, write_text
from trainctl.train.callbacks.context import Journal
from trainctl.train.callbacks.trace_summary import read_trace, render, summarize


class Profile(Callback):
    """Profiles the steps of `logging.profile_steps` on this rank, and records where the files are.

    The step before the window is a warmup, so that the profiler's own start is not measured. A run
    that ends normally within the window writes what was recorded; a failing run writes nothing.

    Args:
        config: Steps and ranks to profile.
        folder: Folder of the output files, created when they are written.
    """

    def __init__(
        self,
        config: LoggingConfig,
        journal: Journal,
        *,
        rank: int,
        folder: Path,
        device: torch.device,
    ) -> None:
        wanted = config.profile_steps and rank in config.profile_ranks
        self._window = tuple(config.profile_steps) if wanted else None
        self._journal, self._rank, self._folder, self._device = journal, rank, folder, device
        self._running: profile | None = None
        self._step: int | None = None
        self._recorded = 0
        self._written = False

    def before_step(self, context: Context) -> None:
        # A step that is tried again stays in the window that it opened.
        if self._window is not None and self._step is None:
            self._step, (first, last) = context.step, self._window
            if self._running is None and max(first - 1, 1) <= self._step <= last:
                self._start(warmup=self._step < first, active=last - first + 1)

    def after_step(self, context: Context) -> None:
        number, self._step = self._step, None
        if self._running is not None and self._window is not None and number is not None:
            first, last = self._window
            self._recorded += number >= first
            self._running.step()
            if number == last:
                self._stop()
        if self._written:
            self._written = False
            path = self._folder.relative_to(self._journal.run.root)
            self._journal.record("profile", step=context.step, path=str(path))

    def on_train_end(self, context: Context) -> None:
        self._finish(is_written=True)

    def close(self) -> None:
        self._finish(is_written=False)

    def _finish(self, *, is_written: bool) -> None:
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
        ensure_folder(self._folder)
        trace = self._folder / f"rank-{self._rank}.trace.json.gz"
        # torch compresses the trace if the name ends in .gz.
        temporary = trace.with_name(f".{os.getpid()}.{trace.name}")
        try:
            recorded.export_chrome_trace(str(temporary))
            temporary.replace(trace)
        finally:
            temporary.unlink(missing_ok=True)
        try:
            text = render(summarize(read_trace(trace), self._recorded))
        except ValueError as error:
            text = f"the trace cannot be summarized: {error}\n"
        write_text(self._folder / f"rank-{self._rank}.txt", text)
