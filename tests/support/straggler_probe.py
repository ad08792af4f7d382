"""Training with a delay on one rank or on all; runs in forked ranks."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rank_processes import Case

from trainctl.engines import stopwatch
from trainctl.engines.micro_batch import MicroBatch
from trainctl.engines.process import Process
from trainctl.plans.types import Batch
from trainctl.runs.records import EventWriter
from trainctl.train.callbacks import stragglers
from trainctl.train.data import TrainingData
from trainctl.train.loop import Trainer
from trainctl.train.session import Session, assemble

SECONDS = 0.4
"""Delay of each step, in seconds: many times a step of the tiny model, also at ZeRO 3 (0.13 s)."""


def train(cases: list[Case], process: Process) -> None:
    """Train each case; the name of its folder chooses the delay and its ranks."""
    stragglers.WINDOW_STEPS, stragglers.WINDOWS = 2, 2
    # Waiting for a CPU is tested elsewhere, and other load of this machine must not matter here.
    stopwatch._ACCOUNT = Path("/nowhere")
    for case in cases:
        session = assemble(case.plan, case.run, process)
        what, who = case.run.root.name.split("-")[:2]
        if who in ("all", str(process.rank)):
            _SLOW[what](session)
        events = EventWriter(case.run.events, case.attempt) if process.is_first else None
        Trainer(session, events).train()
        process.barrier()
        session.engine.close()


class _SlowData:
    """Training data with a delay."""

    def __init__(self, data: TrainingData) -> None:
        self._data = data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._data, name)

    def step(self, first_sample: int, batch: Batch) -> list[MicroBatch]:
        time.sleep(1.5 * SECONDS)  # part of the delay overlaps with the steps before
        return self._data.step(first_sample, batch)


def _data(session: Session) -> None:
    session.training = _SlowData(session.training)  # type: ignore[assignment]


def _stall(session: Session) -> None:
    """Delay the forward pass without computing, as a throttled device or a swapped process does."""
    _before_forward(session, time.sleep)


def _sleep(session: Session) -> None:
    """Delay the backward pass outside of collectives, as a wait for a drive, a lock or a cgroup
    does.
    """
    _before_backward(session, lambda: time.sleep(2 * _each(session)))


def _stopped(session: Session) -> None:
    """Stop the process within a step, and continue it later."""
    step = session.engine.update

    def update(**given: Any) -> None:
        with session.engine.times.part("optimizer"):
            program = f"kill -STOP {os.getpid()}; sleep 1.5; kill -CONT {os.getpid()}"
            subprocess.Popen(["sh", "-c", program])
            time.sleep(0.05)
        step(**given)

    session.engine.update = update  # type: ignore[method-assign]


def _forward(session: Session) -> None:
    """Compute more in the forward pass than the other ranks."""
    _before_forward(session, _compute)


def _backward(session: Session) -> None:
    _before_backward(session, lambda: _compute(_each(session)))


def _before_backward(session: Session, lose: Callable[[], None]) -> None:
    def hook(module: object, inputs: object, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda gradient: lose())

    _embedding(session).register_forward_hook(hook)


def _before_forward(session: Session, lose: Callable[[float], None]) -> None:
    _embedding(session).register_forward_pre_hook(lambda *_: lose(_each(session)))


def _embedding(session: Session) -> torch.nn.Module:
    modules = session.engine.deepspeed.module.modules()
    return next(module for module in modules if isinstance(module, torch.nn.Embedding))


def _each(session: Session) -> float:
    return SECONDS / session.plan.batch.gradient_accumulation_steps


def _compute(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


_SLOW = {
    "data": _data,
    "stall": _stall,
    "forward": _forward,
    "backward": _backward,
    "sleep": _sleep,
    "stopped": _stopped,
}
