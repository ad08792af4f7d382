"""Batches made ahead of their step: which ones, in which order, and what goes wrong."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from trainctl.plans.mixture import DataStage, StagedBatches
from trainctl.plans.types import Batch, Batches, BatchPhase
from trainctl.train.data import PREFETCH_STEPS, BatchPrefetcher

STOP = 12


def batch(size: int) -> Batch:
    return Batch(
        global_batch_size=size,
        micro_batch_size=2,
        gradient_accumulation_steps=size // 4,
        sequence_length=8,
    )


RAMP = Batches((BatchPhase(first_step=0, batch=batch(4)), BatchPhase(first_step=3, batch=batch(8))))


class Data:
    """Notes what it is asked for, and by whom."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []
        self.threads: set[str] = set()
        self.bad: set[int] = set()
        self.seconds = 0.0

    def step(self, first_sample: int, batch: Batch) -> Any:
        passes = batch.gradient_accumulation_steps
        self.asked.append((first_sample, passes))
        self.threads.add(threading.current_thread().name)
        time.sleep(self.seconds)
        if first_sample in self.bad:
            raise IndexError(f"sample {first_sample}")
        return [(first_sample, passes)]


def ahead(data: Data, batches: Batches = RAMP) -> BatchPrefetcher:
    stage = DataStage(first_step=0, end_step=STOP, first_sample=0, batches=batches, weights=None)
    staged, device = StagedBatches((stage,)), torch.device("cpu")
    return BatchPrefetcher(data, staged, stop_step=STOP, device=device)  # type: ignore[arg-type]


def settle(data: Data, count: int) -> None:
    end = time.monotonic() + 10
    while len(data.asked) < count and time.monotonic() < end:
        time.sleep(0.001)
    time.sleep(0.02)  # for more, which there must not be


def test_each_step_has_its_own_samples_and_only_the_next_few_are_made() -> None:
    data, first = Data(), 0
    expected = []
    with ahead(data) as batches:
        for step in range(STOP):
            made = RAMP.at(step)
            expected.append((first, made.gradient_accumulation_steps))
            assert batches.take(step, first) == [expected[-1]]
            first += made.global_batch_size
            settle(data, min(step + 1 + PREFETCH_STEPS, STOP))
            assert len(data.asked) == min(step + 1 + PREFETCH_STEPS, STOP)
    assert data.asked == expected
    (name,) = data.threads
    assert name.startswith("batches")
    assert name not in {thread.name for thread in threading.enumerate()}


def test_what_was_not_foreseen_is_made_and_the_rest_is_dropped() -> None:
    """Passed over, rewound into the ramp, and out of it again."""
    data = Data()
    with ahead(data) as batches:
        for step, first in ((4, 100), (4, 108), (1, 116), (2, 120), (3, 124), (4, 132), (9, 7)):
            passes = RAMP.at(step).gradient_accumulation_steps
            assert batches.take(step, first) == [(first, passes)]
    asked = iter(data.asked)  # in this order, whatever was made in vain between them
    assert all(each in asked for each in ((100, 2), (108, 2), (116, 1), (120, 1), (7, 2)))


def test_an_error_is_raised_by_the_step_that_it_is_of_and_by_no_other() -> None:
    data = Data()
    data.bad = {4, 12, 20}
    with ahead(data) as batches:
        assert batches.take(0, 0) == [(0, 1)]
        with pytest.raises(IndexError, match="sample 4") as caught:
            batches.take(1, 4)
        assert any(entry.name == "step" for entry in caught.traceback)
        assert batches.take(2, 8) == [(8, 1)]
        settle(data, 5)
        assert batches.take(3, 13) == [(13, 2)]  # 12 was passed over, and nobody hears of it


def test_it_ends_while_a_step_is_being_made() -> None:
    data = Data()
    data.seconds = 0.05
    with pytest.raises(KeyboardInterrupt), ahead(data) as batches:
        batches.take(0, 0)
        raise KeyboardInterrupt
    made = len(data.asked)
    time.sleep(0.15)
    assert len(data.asked) == made <= 2
