"""Times and peak memory of the parts of a step, measured without slowing it down.

There are two clocks. The host's clock times what the loop does itself (saving, evaluating) or waits
for on the host (batches). The device's clock times what the loop only starts on a device (forward,
backward, optimizer), by an event before and one after on its stream. Events are read once the
device has passed them, never waited for. So the end of a step's update may be counted with the next
step; nothing is lost or counted twice.

On a CPU both clocks are the host's, and a third one tells how long the rank itself was busy within
a part: a rank that waits for its peers in a collective sleeps. A rank that sleeps elsewhere, or
whose process is stopped, does not wait for peers: a thread that samples the rank counts that time
as busy (`watch_stalls`). What remains of a step is its wait for peers (`step`).
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import FrameType

import torch

LOAD = "load"
"""Name of the part up to the first step."""

RESET_PEAK = "5"
"""Value that resets VmHWM to the resident size when written to `clear_refs` (proc(5))."""


class PhaseMemory:
    """Peak memory of a process in each part of a step.

    On an accelerator: bytes in tensors, from torch's allocator. On a CPU: resident memory of the
    process, from the kernel, including memory that the C library keeps after a free.

    Attributes:
        peaks: Bytes by part; `load` covers everything before the first part.
        highest: Bytes of the whole run so far, also between parts, such as an evaluation.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._since = self.highest = 0
        self._reset()
        self.peaks = {LOAD: self.take()}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the memory used within the context for this part."""
        self._reset()
        try:
            yield
        finally:
            self.peaks[name] = max(self.peaks.get(name, 0), self._peak())

    def take(self) -> int:
        """Return the peak since the last call, over all parts: called once a step, the step's
        peak.
        """
        self._reset()
        peak, self._since = self._since, 0
        return peak

    def _reset(self) -> None:
        """Reset the counter of the allocator or kernel, after keeping its peak."""
        self._since = max(self._since, self._peak())
        self.highest = max(self.highest, self._since)
        self._forget()

    def _forget(self) -> None:
        if self._device.type == "cpu":
            Path("/proc/self/clear_refs").write_text(RESET_PEAK)
        else:
            torch.cuda.reset_peak_memory_stats(self._device)

    def _peak(self) -> int:
        if self._device.type == "cpu":
            return peak_resident_bytes()
        return torch.cuda.max_memory_allocated(self._device)


def peak_resident_bytes() -> int:
    """Return VmHWM of this process; `getrusage` would give the launcher's peak if it is larger."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmHWM in /proc/self/status")


_ACCOUNT = Path("/proc/thread-self/schedstat")
"""Nanoseconds on a processor, nanoseconds of waiting for one, and number of time slices."""
_SAMPLE_SECONDS = 0.05
_STOPPED_SECONDS = 1.0
"""A sampling thread that did not run for this long was stopped together with its process."""
_WAITING_FOR_PEERS = tuple(f"{os.sep}{name}{os.sep}" for name in ("torch", "deepspeed"))
"""Packages in which a sleeping rank is taken to wait in a collective."""


class Stopwatch:
    """Seconds spent in each part of a step, by the part's name. Parts are not nested.

    Args:
        device: Device of this rank; its current stream is timed.

    Attributes:
        memory: If set, it also measures the memory peak of each part.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_device = device.type != "cpu"
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._busy: defaultdict[str, float] = defaultdict(float)
        self._open: deque[tuple[str, torch.cuda.Event, torch.cuda.Event]] = deque()
        self._idle: list[torch.cuda.Event] = []
        self.memory: PhaseMemory | None = None
        self._part = ""
        self._slept = self._waited = 0.0

    @contextmanager
    def watch_stalls(self) -> Iterator[None]:
        """Count as busy, within the context, the time that this thread sleeps outside collectives;
        CPU only.
        """
        account = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
        if self._on_device or not account.is_file():
            yield
            return
        end = threading.Event()
        arguments = (threading.get_ident(), account, end)
        watcher = threading.Thread(target=self._watch, args=arguments, name="stalls", daemon=True)
        watcher.start()
        try:
            yield
        finally:
            end.set()
            watcher.join()

    def _watch(self, thread: int, account: Path, end: threading.Event) -> None:
        """Sample a thread until `end` is set: where it is, and how long it has slept since the
        last sample.
        """
        looked, busy, was_elsewhere = time.perf_counter(), _thread_busy_seconds(account), False
        own = busy_seconds()
        while not end.wait(_SAMPLE_SECONDS):
            now, own_now = time.perf_counter(), busy_seconds()
            busy_now = _thread_busy_seconds(account)
            part, slept = self._part, (now - looked) - (busy_now - busy)
            is_elsewhere = _sleeps_elsewhere(sys._current_frames().get(thread))
            # Subtract this thread's wait for a CPU: it does not stop the other thread.
            was_stopped = (now - looked) - (own_now - own) > _STOPPED_SECONDS
            if part and slept > 0 and (was_stopped or (was_elsewhere and is_elsewhere)):
                self._busy[part] += slept
                self._slept += slept
            looked, busy, own, was_elsewhere = now, busy_now, own_now, is_elsewhere

    @contextmanager
    def step(self) -> Iterator[None]:
        """Time how long this thread waits for peers within the context, in its parts and between
        them; CPU only.
        """
        started, busy, slept = time.perf_counter(), busy_seconds(), self._slept
        yield
        if not self._on_device:
            own = busy_seconds() - busy + self._slept - slept
            self._waited += time.perf_counter() - started - own

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time the device work that is started within the context."""
        with nullcontext() if self.memory is None else self.memory.phase(name):
            if self._on_device:
                with self.plain_part(name):
                    yield
                return
            started, self._part = busy_seconds(), name
            try:
                with self.host_part(name):
                    yield
            finally:
                self._part = ""
                self._busy[name] += busy_seconds() - started

    @contextmanager
    def plain_part(self, name: str) -> Iterator[None]:
        """Time the work of the context as `part` does, but neither its memory nor busy time."""
        if not self._on_device:
            with self.host_part(name):
                yield
            return
        begin, end = self._event(), self._event()
        begin.record()
        try:
            yield
        finally:
            end.record()
            self._open.append((name, begin, end))

    @contextmanager
    def host_part(self, name: str) -> Iterator[None]:
        """Time the context by the host's clock."""
        started, busy = time.perf_counter(), busy_seconds()
        try:
            yield
        finally:
            elapsed = time.perf_counter() - started
            self._seconds[name] += elapsed
            if not self._part:
                self._slept += elapsed - (busy_seconds() - busy)

    def take(self) -> dict[str, float]:
        """Return the seconds of each part since the last call, up to the work that the device has
        finished.
        """
        while self._open and self._open[0][2].query():
            name, begin, end = self._open.popleft()
            self._seconds[name] += begin.elapsed_time(end) / 1000
            self._idle += [begin, end]
        seconds = dict(self._seconds)
        self._seconds.clear()
        return seconds

    def take_busy(self) -> dict[str, float]:
        """Return the busy seconds of each part on a CPU since the last call, without sleep.

        Empty on other devices, whose clock counts waiting as work.
        """
        seconds = dict(self._busy)
        self._busy.clear()
        return seconds

    def take_waited(self) -> float:
        """Return the seconds for which steps waited for peers since the last call; 0 on devices."""
        waited, self._waited = max(0.0, self._waited), 0.0
        return waited

    def _event(self) -> torch.cuda.Event:
        return self._idle.pop() if self._idle else torch.cuda.Event(enable_timing=True)


def busy_seconds() -> float:
    """Return the seconds for which this thread ran, or was ready to run and waited for a processor.

    A rank that shares its processor with something else is as slow for its peers as one that
    computes more. The waiting is left out if the kernel does not account for it.
    """
    waited = 0.0
    with suppress(OSError, IndexError):
        waited = int(_ACCOUNT.read_bytes().split()[1]) / 1e9
    return time.thread_time() + waited


def _thread_busy_seconds(account: Path) -> float:
    """Return the busy seconds of another thread, from its `schedstat` file."""
    with suppress(OSError):
        return sum(map(int, account.read_bytes().split()[:2])) / 1e9
    return 0.0


def _sleeps_elsewhere(frame: FrameType | None) -> bool:
    """Return True if a thread that sleeps in this frame is not in a collective."""
    name = frame.f_code.co_filename if frame is not None else _WAITING_FOR_PEERS[0]
    return not any(package in name for package in _WAITING_FOR_PEERS)
