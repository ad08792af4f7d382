"""Where the time of a step goes, without slowing it down.

Two clocks. What the loop does itself (saving, evaluating), or waits for on the host (batches), is
timed by the host's. What it only starts on a device (forward, backward, optimizer) is timed by the
device: an event before and one after, in the order of its work. Events are read once the device has
passed them, never waited for; so the end of a step's update may be counted with the next step, and
nothing is lost or counted twice. On a CPU both clocks are the host's, and a third one tells how
much of a part the rank was busy with itself: a rank that waits for its peers in a collective
sleeps.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from trainctl.engines.phase_memory import PhaseMemory

_ACCOUNT = Path("/proc/thread-self/schedstat")
"""Nanoseconds on a processor, nanoseconds of waiting for one, and how often it had one."""


class Stopwatch:
    """Adds up seconds by the name of the part that they were spent in.

    Parts follow each other; they are not nested.

    Args:
        device: Of this rank; its current stream is the one that is timed.

    Attributes:
        memory: Measures the peak of each part too, where it is set.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_device = device.type != "cpu"
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._busy: defaultdict[str, float] = defaultdict(float)
        self._open: deque[tuple[str, torch.cuda.Event, torch.cuda.Event]] = deque()
        self._idle: list[torch.cuda.Event] = []
        self.memory: PhaseMemory | None = None

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time what is started on the device within it."""
        if self.memory is None:
            with self._timed(name):
                yield
            return
        with self.memory.phase(name), self._timed(name):
            yield

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        if not self._on_device:
            started = busy_seconds()
            try:
                with self.host_part(name):
                    yield
            finally:
                self._busy[name] += busy_seconds() - started
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
        """Time what the loop does, or waits for, within it."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._seconds[name] += time.perf_counter() - started

    def take(self) -> dict[str, float]:
        """Seconds of each part since the last call, as far as the device has come."""
        while self._open and self._open[0][2].query():
            name, begin, end = self._open.popleft()
            self._seconds[name] += begin.elapsed_time(end) / 1000
            self._idle += [begin, end]
        seconds = dict(self._seconds)
        self._seconds.clear()
        return seconds

    def take_busy(self) -> dict[str, float]:
        """Of the device's parts on a CPU: seconds since the last call without those slept through.

        Empty on other devices, whose clock counts waiting as work.
        """
        seconds = dict(self._busy)
        self._busy.clear()
        return seconds

    def _event(self) -> torch.cuda.Event:
        return self._idle.pop() if self._idle else torch.cuda.Event(enable_timing=True)


def busy_seconds() -> float:
    """Seconds in which this thread ran, or was ready to and waited for a processor.

    A rank that shares its processor with something else is as slow for its peers as one that
    computes more. Where the kernel keeps no account of the waiting, it is left out.
    """
    waited = 0.0
    with suppress(OSError, IndexError):
        waited = int(_ACCOUNT.read_bytes().split()[1]) / 1e9
    return time.thread_time() + waited
