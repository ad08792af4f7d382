"""Measurements of a case: the times of its steps, its peak memory, and its profile."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from gpu_cases import Steps
from torch.profiler import ProfilerActivity, profile, schedule

from trainctl.train.callbacks.steps import peak_memory


class Meter:
    """Measures the steps of a loop that calls `after_step`.

    The host does not wait for the device between timed steps, since a fast loop does not.

    Args:
        publish: Called with the measurements once the timed steps are done.
        trace: Path of the trace, which is written after the last step.
    """

    def __init__(
        self,
        steps: Steps,
        device: torch.device,
        *,
        publish: Callable[[dict[str, Any]], None],
        trace: Path,
    ) -> None:
        self.steps, self._device, self._publish, self._trace = steps, device, publish, trace
        self._step = 0
        self._marks: list[Any] = []
        self._profile: profile | None = None

    def after_step(self) -> None:
        """Count a step; call it after every step."""
        self._step += 1
        steps, timed_end = self.steps, self.steps.warm + self.steps.timed
        if steps.warm <= self._step <= timed_end:
            self._marks.append(self._now())
        if self._step == timed_end:
            self._wait()
            peak = peak_memory(self._device).device_peak_bytes
            self._publish({"seconds": self._seconds(), "peak_bytes": peak})
            if steps.profiled:
                self._start_profile()
        elif self._profile is not None:
            self._wait()  # the window begins and ends with an idle device
            self._profile.step()
            if self._step == steps.total:
                self._profile.stop()

    def _now(self) -> Any:
        if self._device.type == "cpu":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _wait(self) -> None:
        if self._device.type != "cpu":
            torch.cuda.synchronize()

    def _seconds(self) -> list[float]:
        """Return the duration of each timed step."""
        pairs = list(zip(self._marks, self._marks[1:], strict=False))
        if self._device.type == "cpu":
            return [after - before for before, after in pairs]
        return [before.elapsed_time(after) / 1e3 for before, after in pairs]

    def _start_profile(self) -> None:
        activities = [ProfilerActivity.CPU]
        if self._device.type != "cpu":
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(
            activities=activities,
            schedule=schedule(wait=0, warmup=1, active=self.steps.profiled, repeat=1),
            on_trace_ready=lambda done: done.export_chrome_trace(str(self._trace)),
        )
        self._profile.start()
