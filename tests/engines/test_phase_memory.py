"""Peaks by the part of a step, and of the step."""

import numpy as np
import pytest
import torch

from trainctl.engines.stopwatch import LOAD, PhaseMemory
from trainctl.train.callbacks.steps import peak_bytes

CPU = torch.device("cpu")
BEFORE, STEADY, MORE = 500, 100, 40


class Metered(PhaseMemory):
    """Memory meter with its own counters instead of the kernel's."""

    used = high = BEFORE

    def use(self, more: int) -> None:
        """Take memory and give it back."""
        self.high = max(self.high, self.used + more)

    def _peak(self) -> int:
        return self.high

    def _forget(self) -> None:
        self.high = self.used = STEADY


@pytest.mark.parametrize("where", ["forward", "backward", "optimizer", "evaluation"])
def test_a_record_has_the_peak_of_its_step_wherever_it_was(where: str) -> None:
    memory = Metered(CPU)
    peaks = []
    for uses in (0, MORE, 0):
        for part in ("forward", "backward", "optimizer"):
            with memory.phase(part):
                memory.use(uses if part == where else 0)
        memory.use(uses if where == "evaluation" else 0)
        peaks.append(peak_bytes(CPU, memory)["host"])
    assert peaks == [STEADY, STEADY + MORE, STEADY]
    assert memory.peaks[LOAD] == memory.highest == BEFORE
    assert memory.peaks.get(where) == (None if where == "evaluation" else STEADY + MORE)


def test_what_is_used_between_the_parts_is_not_forgotten() -> None:
    memory = Metered(CPU)
    memory.use(BEFORE)
    with memory.phase("forward"):
        memory.use(MORE)
    assert memory.highest == STEADY + BEFORE
    assert max(memory.peaks.values()) == BEFORE


def test_the_kernel_counts_anew_for_each_part() -> None:
    memory = PhaseMemory(CPU)
    size = 2**28
    with memory.phase("forward"):
        np.ones(size, dtype=np.uint8)
    with memory.phase("backward"):
        pass
    assert memory.peaks["forward"] > size
    assert memory.peaks["backward"] < memory.peaks["forward"]
