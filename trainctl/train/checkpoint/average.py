"""Exponential moving average of the weights, kept beside the master weights.

The average is one more state of the optimizer's tensors (`optimizer_state.AVERAGE`): it is sharded,
saved and loaded with them, under the same canonical names. For an evaluation, its values are
swapped with the master weights, and swapped back afterwards. Both are fp32, so nothing is rounded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from trainctl.plan.settings import ema_decay
from trainctl.train.checkpoint.optimizer_state import AVERAGE, MASTER, OptimizerState

_AT_ONCE = 1 << 22
"""Elements swapped at a time, which bounds the extra memory."""


class WeightAverage:
    """Moving average of a run's weights; all ranks call the same methods in the same order.

    Args:
        state: State of the optimizer, which keeps the average from now on.
        decay: Upper bound of the decay; the first updates use less (`ema_decay`).
        every_steps: Accepted optimizer steps between two updates of the average.

    Attributes:
        steps: Accepted optimizer steps so far.
    """

    def __init__(self, state: OptimizerState, *, decay: float, every_steps: int) -> None:
        self._state = state
        self._decay, self._every_steps = decay, every_steps
        self.steps = 0
        state.keep_average()

    def restore(self, saved: Mapping[str, int]) -> None:
        """Restore the step count from a checkpoint; the values are loaded with the other states."""
        self.steps = saved.get("steps", 0)

    def saved(self) -> dict[str, int]:
        """Return the entry for a checkpoint's manifest."""
        return {"steps": self.steps}

    @torch.no_grad()
    def update_average(self) -> None:
        """Count an accepted optimizer step; every `every_steps` steps, update the average."""
        self.steps += 1
        if self.steps % self._every_steps:
            return
        decay = ema_decay(self.steps // self._every_steps, self._decay)
        for index in range(len(self._state.tensors)):
            average = self._state.tensor(index, AVERAGE)
            average.mul_(decay).add_(self._state.tensor(index, MASTER), alpha=1 - decay)

    @contextmanager
    def average_parameters(self) -> Iterator[None]:
        """Swap the average into the model within the context; do not update or save there."""
        self._change_places()
        try:
            yield
        finally:
            self._change_places()

    @torch.no_grad()
    def _change_places(self) -> None:
        for index in range(len(self._state.tensors)):
            masters = self._state.tensor(index, MASTER).split(_AT_ONCE)
            averages = self._state.tensor(index, AVERAGE).split(_AT_ONCE)
            for master, average in zip(masters, averages, strict=True):
                held = master.clone()
                master.copy_(average)
                average.copy_(held)
        self._state.copy_masters_to_parameters()
