"""The most memory that a rank uses within each part of a step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

LOAD = "load"
"""Everything up to the first step."""

RESET_PEAK = "5"
"""Written to `clear_refs`, lets the kernel count VmHWM anew from what is resident (proc(5))."""


class PhaseMemory:
    """Peaks of a process by the part of the step in which they were.

    On an accelerator bytes in tensors, by torch's allocator; on a CPU the resident memory of the
    process, by the kernel, in which lies also what the C library keeps for later.

    Args:
        device: Of this rank.

    Attributes:
        peaks: Bytes by part; `load` is what came before the first.
        highest: Bytes; also of what lies between the parts, such as an evaluation.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._since = self.highest = 0
        self._reset()
        self.peaks = {LOAD: self.take()}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Within it, what is used counts for this part."""
        self._reset()
        try:
            yield
        finally:
            self.peaks[name] = max(self.peaks.get(name, 0), self._peak())

    def take(self) -> int:
        """Return the peak since the last call, in whatever part: of a step."""
        self._reset()
        peak, self._since = self._since, 0
        return peak

    def _reset(self) -> None:
        """Count anew, and keep what has been counted."""
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
    """VmHWM of this process; `getrusage` would give that of the launcher before it, if larger."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmHWM in /proc/self/status")
