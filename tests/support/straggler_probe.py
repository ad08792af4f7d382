"""Ranks that train with something that holds one of them up, or all; run in forked ranks."""

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
from trainctl.plan.types import Batch
from trainctl.runs.records import EventWriter
from trainctl.train.callbacks import stragglers
from trainctl.train.data import TrainingData
from trainctl.train.loop import Trainer
from trainctl.train.session import Session, assemble

SECONDS = 0.4
"""Lost in each step: many times what a step of the tiny model takes, at ZeRO 3 too (0.13 s)."""


def train(cases: list[Case], process: Process) -> None:
    """Train each case; the name of its folder says what is slow, and on which ranks."""
    stragglers.WINDOW_STEPS, stragglers.WINDOWS = 2, 2
    # Waiting for a processor is tested by itself: what else this machine does is not of interest.
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
    """Training data that takes its time."""

    def __init__(self, data: TrainingData) -> None:
        self._data = data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._data, name)

    def step(self, first_sample: int, batch: Batch) -> list[MicroBatch]:
        time.sleep(1.5 * SECONDS)  # some of it passes behind the steps before
        return self._data.step(first_sample, batch)


def _data(session: Session) -> None:
    session.training = _SlowData(session.training)  # type: ignore[assignment]


def _stall(session: Session) -> None:
    """The forward pass stands still, as on a device that is throttled or a process swapped out."""
    _before_forward(session, time.sleep)


def _sleep(session: Session) -> None:
    """The backward pass stands still, in no collective: for a drive, a lock, a cgroup."""
    _before_backward(session, lambda: time.sleep(2 * _each(session)))


def _stopped(session: Session) -> None:
    """The process is stopped while it steps, and goes on later."""
    step = session.engine.update

    def update(**given: Any) -> None:
        with session.engine.times.part("optimizer"):
            program = f"kill -STOP {os.getpid()}; sleep 1.5; kill -CONT {os.getpid()}"
            subprocess.Popen(["sh", "-c", program])
            time.sleep(0.05)
        step(**given)

    session.engine.update = update  # type: ignore[method-assign]


def _forward(session: Session) -> None:
    """The forward pass computes more than those of others."""
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
