"""Prefetch of batches: they are made while the device works on earlier ones.

The samples of a step follow from its first sample's counter and the sizes of its batch alone, so
batches of the next steps can be made in advance. If another step is taken than was foreseen (a
batch was skipped, the run rewound, the ramp made a step larger), the prefetched batches are
dropped. A run has consumed the batches that it took, never those that were only made.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import torch

from trainctl.engines.micro_batch import MicroBatch
from trainctl.plan.mixture import StagedBatches
from trainctl.plan.types import Batch
from trainctl.train.data import TrainingData

PREFETCH_STEPS = 2
"""Most steps to prefetch: one may be slow, as when it is read from a disk for the first time."""


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Key of a prefetched step, which decides the samples of each rank."""

    first_sample: int
    batch: Batch


class BatchPrefetcher:
    """Micro-batches of each step, prefetched by a thread; a context manager.

    The thread makes one step after the other, in the order in which they are taken. Leaving the
    context drops the batches that were made and waits for those being made.

    Args:
        batches: Batch of each step.
        stop_step: Last step of the run; later ones are not prefetched.
        device: Device of this rank. For a GPU, batches are put in pinned memory, so that their copy
            overlaps with computation.
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
            # Pinned memory belongs to a device's context, and a new thread starts on device 0.
            initializer=partial(torch.cuda.set_device, device) if self._pins else None,
        )

    def __enter__(self) -> BatchPrefetcher:
        return self

    def __exit__(self, *exception: object) -> None:
        self._made.clear()
        self._thread.shutdown(wait=True, cancel_futures=True)

    def take(self, step: int, first_sample: int) -> list[MicroBatch]:
        """Return the micro-batches of the step after `step` steps; wait until they are made.

        Args:
            step: Steps of the run done so far.
            first_sample: Counter of the next sample.

        Raises:
            Exception: Any error from making the batches.
        """
        wanted = _Wanted(*self._batches.at(step, first_sample))
        while self._made and self._made[0][0] != wanted:
            _, unwanted = self._made.popleft()
            unwanted.cancel()
        self._submit_steps(step, first_sample)
        _, made = self._made.popleft()
        return made.result()

    def _submit_steps(self, step: int, first_sample: int) -> None:
        """Submit this step and the next ones to the thread, unless they are submitted already."""
        for place in range(PREFETCH_STEPS + 1):
            if place and step + place >= self._stop_step:
                return
            wanted = _Wanted(*self._batches.at(step + place, first_sample))
            first_sample = wanted.first_sample + wanted.batch.global_batch_size
            if place < len(self._made):
                if self._made[place][0] == wanted:
                    continue
                while len(self._made) > place:  # a batch ramp: foreseen from another step
                    self._made.pop()[1].cancel()
            self._made.append((wanted, self._thread.submit(self._make, wanted)))

    def _make(self, wanted: _Wanted) -> list[MicroBatch]:
        batches = self._data.step(wanted.first_sample, wanted.batch)
        return [batch.pinned() for batch in batches] if self._pins else batches
