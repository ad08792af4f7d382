"""Peak memory of a rank within each part of a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
