"""Batches made while the device works on the ones before them.

The samples of a step follow from its first sample's counter and the sizes of its batch alone, so
the next steps' can be made before they are asked for. If something else is asked for than was
foreseen (a batch was passed over, the run rewound, the ramp made a step larger), what was made is
dropped. What a run has consumed is what was asked for, never what was made.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch

from trainctl.engines.micro_batch import MicroBatch
from trainctl.plan.batches import Batch
from trainctl.plan.mixture import StagedBatches
from trainctl.train.data import TrainingData

STEPS_AHEAD = 2
"""Made ahead at most: one may be slow, as when it is read from a disk for the first time."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What decides which samples are in a step of a rank."""

    first_sample: int
    batch: Batch


class BatchesAhead:
    """Gives the micro-batches of each step, made by a thread of its own.

    The thread makes them one step after the other, in the order that they are asked for. Use it in
    a `with`: leaving it drops what was made and waits for what is being made.

    Args:
        data: Of this rank.
        batches: The batch of each step.
        stop_step: Nothing is made for the steps after it.
        device: Of this rank: for a GPU, batches are in pinned memory, from which they are copied
            while it computes.
    """

    def __init__(
        self,
        data: TrainingData,
        batches: StagedBatches,
        *,
        stop_step: int,
        device: torch.device,
    ) -> None:
        self._data, self._batches, self._stop_step = data, batches, stop_step
        self._pins = device.type == "cuda"
        self._made: deque[tuple[_Wanted, Future[list[MicroBatch]]]] = deque()
        self._thread = ThreadPoolExecutor(
            max_workers=1,
            thread_name_prefix="batches",
            # Pinned memory belongs to a device's context, and a thread begins with the first's.
            initializer=partial(torch.cuda.set_device, device) if self._pins else None,
        )

    def __enter__(self) -> BatchesAhead:
        return self

    def __exit__(self, *exception: object) -> None:
        self._made.clear()
        self._thread.shutdown(wait=True, cancel_futures=True)

    def take(self, step: int, first_sample: int) -> list[MicroBatch]:
        """Return the micro-batches of the step after `step` steps; waits until they are made.

        Args:
            step: Steps of the run before it.
            first_sample: Counter of the next sample.

        Raises:
            Exception: Whatever making them raised.
        """
        wanted = _Wanted(*self._batches.at(step, first_sample))
        while self._made and self._made[0][0] != wanted:
            _, unwanted = self._made.popleft()
            unwanted.cancel()
        self._foresee(step, first_sample)
        _, made = self._made.popleft()
        return made.result()

    def _foresee(self, step: int, first_sample: int) -> None:
        """Have this step and the next ones made, as far as they are not yet."""
        for place in range(STEPS_AHEAD + 1):
            if place and step + place >= self._stop_step:
                return
            wanted = _Wanted(*self._batches.at(step + place, first_sample))
            first_sample = wanted.first_sample + wanted.batch.global_batch_size
            if place < len(self._made):
                if self._made[place][0] == wanted:
                    continue
                while len(self._made) > place:  # a ramp: foreseen from another step
                    self._made.pop()[1].cancel()
            self._made.append((wanted, self._thread.submit(self._make, wanted)))

    def _make(self, wanted: _Wanted) -> list[MicroBatch]:
        batches = self._data.step(wanted.first_sample, wanted.batch)
        return [batch.pinned() for batch in batches] if self._pins else batches
