"""The exponential moving average of the weights, kept where and as the master weights are.

It is one more state of the optimizer's tensors (`state.AVERAGE`): sharded, saved and loaded with
them, under the same canonical names. Where the model is to compute with it, its values and those of
the master weights change places, and afterwards back again: both are fp32, so nothing is rounded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from trainctl.plan.average import decay_of
from trainctl.train.checkpoint.optimizer_state import AVERAGE, MASTER, OptimizerState

_AT_ONCE = 1 << 22
"""Elements that change places at a time: the only memory that it takes."""


class WeightAverage:
    """The average of a run's weights; all ranks call the same methods in the same order.

    Args:
        state: The optimizer's, which keeps the average from now on.
        decay: The most that one update leaves of it.
        every_steps: Accepted optimizer steps from one update of it to the next.

    Attributes:
        steps: Accepted optimizer steps that it has seen.
    """

    def __init__(self, state: OptimizerState, *, decay: float, every_steps: int) -> None:
        self._state = state
        self._decay, self._every_steps = decay, every_steps
        self.steps = 0
        state.keep_average()

    def restore(self, saved: Mapping[str, int]) -> None:
        """Go on from what a checkpoint says; its values are loaded with the other states."""
        self.steps = saved.get("steps", 0)

    def saved(self) -> dict[str, int]:
        """For a checkpoint."""
        return {"steps": self.steps}

    @torch.no_grad()
    def follow(self) -> None:
        """Take in the weights after an update that was made."""
        self.steps += 1
        if self.steps % self._every_steps:
            return
        decay = decay_of(self.steps // self._every_steps, self._decay)
        for index in range(len(self._state.tensors)):
            average = self._state.tensor(index, AVERAGE)
            average.mul_(decay).add_(self._state.tensor(index, MASTER), alpha=1 - decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within it the model has the average for its weights; nothing may be updated or saved."""
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
        self._state.publish()
