"""Training with one delay after the other, on one rank or on all; runs in forked ranks."""

from __future__ import annotations

import os
import re
import socket
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
from trainctl.train.checkpoint import content, save
from trainctl.train.loop import Trainer
from trainctl.train.session import Session, assemble

SECONDS = 0.8
"""Delay of each step, in seconds: many times a step of the tiny model, also at ZeRO 3 (0.13 s, and
twice that on a slow machine)."""
DISK_SECONDS = 1.5
"""Delay of each file of a checkpoint."""
CASE_STEPS = 6
"""Steps of a case: as many slow ones as name a rank, then as many fast ones, and one more each."""
SLOW_STEPS = 3

CASES = {
    # By ZeRO stage: what is slow and on which rank, in turn.
    1: (
        "data-1",
        "stall-1",
        "backward-1",
        "sleep-1",
        "optimizer-0",
        "stopped-1",
        "sleep-all",
        "link-1",
    ),
    3: ("forward-1", "forward-0", "backward-1", "sleep-1", "stall-1", "stall-all", "link-0"),
}
SAVES_EVERY = 2 * CASE_STEPS
"""Steps between checkpoints. All but the first are written to a slow disk."""
_PACING = 47
"""SO_MAX_PACING_RATE of Linux: bytes a second that the kernel sends on a socket."""
_LINK_BYTES = 1_200_000
"""Bytes a second of a slow link: a step of the tiny model sends 0.4 MB and more."""


def steps_of(stage: int) -> int:
    """Return the steps of all cases of a ZeRO stage."""
    return CASE_STEPS * len(CASES[stage])


def train(cases: list[Case], process: Process) -> None:
    """Train each case; its ZeRO stage chooses the delays. The disk of the last rank is slow."""
    stragglers.WINDOW_STEPS, stragglers.WINDOWS = 1, 2
    # Waiting for a CPU is tested elsewhere, and other load of this machine must not matter here.
    stopwatch._ACCOUNT = Path("/nowhere")
    slow_disk = process.rank == process.world_size - 1
    for case in cases:
        stage = case.plan.config.zero_stage.stage
        first = 0 if stage == 1 else steps_of(1)
        if slow_disk:
            _slow_reads()
        session = assemble(case.plan, case.run, process)
        delays = Delays(session, CASES[stage], first, process.rank)
        if slow_disk:
            _slow_writes(from_step=2 * SAVES_EVERY)
        events = EventWriter(case.run.events, case.attempt) if process.is_first else None
        Trainer(session, events, attempt=case.attempt).train()
        delays.pace(0)
        process.barrier()
        session.engine.close()


class Delays:
    """Delays of a session's steps, each case in its turn.

    Args:
        cases: What is slow and where, such as ``forward-1`` or ``forward-all``.
        first: Steps before the first case.
    """

    def __init__(self, session: Session, cases: tuple[str, ...], first: int, rank: int) -> None:
        self._session, self._cases, self._first, self._rank = session, cases, first, rank
        self._is_paced = False
        micro_batches = session.plan.batch.gradient_accumulation_steps
        each = SECONDS / micro_batches
        module = session.engine.deepspeed.module
        embedding = next(m for m in module.modules() if isinstance(m, torch.nn.Embedding))
        embedding.register_forward_pre_hook(lambda *_: self._in_forward(each))
        embedding.register_forward_hook(lambda *_: self._before_backward(_[-1], each))
        session.training = _DelayedData(session.training, self)  # type: ignore[assignment]
        self._update, self._accumulate = session.engine.update, session.engine.accumulate
        session.engine.update = self._delayed_update  # type: ignore[method-assign]
        session.engine.accumulate = self._paced_accumulate  # type: ignore[method-assign]

    def now(self, step: int | None = None) -> str:
        """Return what is slow on this rank in a step; empty if nothing is.

        Args:
            step: Steps before it; None takes the step at hand.
        """
        done = (self._session.progress.step if step is None else step) - self._first
        number, within = divmod(done, CASE_STEPS)
        if number >= len(self._cases) or within >= SLOW_STEPS:
            return ""
        what, who = self._cases[number].split("-")
        return what if who in ("all", str(self._rank)) else ""

    def _in_forward(self, seconds: float) -> None:
        if self.now() == "forward":
            _compute(seconds)
        elif self.now() == "stall":  # as a throttled device or a swapped process
            time.sleep(seconds)

    def _before_backward(self, output: torch.Tensor, seconds: float) -> None:
        lose: Callable[[], Any] | None = None
        if self.now() == "backward":
            lose = lambda: _compute(seconds)  # noqa: E731
        elif self.now() == "sleep":  # as a wait for a drive, a lock or a cgroup
            lose = lambda: time.sleep(2 * seconds)  # noqa: E731
        if lose is not None and output.requires_grad:
            output.register_hook(lambda gradient: lose())

    def _delayed_update(self, **given: Any) -> None:
        if self.now() == "optimizer":
            with self._session.engine.times.part("optimizer"):
                _compute(SECONDS)
        elif self.now() == "stopped":
            with self._session.engine.times.part("optimizer"):
                program = f"kill -STOP {os.getpid()}; sleep 2; kill -CONT {os.getpid()}"
                subprocess.Popen(["sh", "-c", program])
                time.sleep(0.05)
        self._update(**given)

    def _paced_accumulate(self, *given: Any) -> Any:
        self.pace(_LINK_BYTES if self.now() == "link" else 0)
        return self._accumulate(*given)

    def pace(self, rate: int) -> None:
        """Have the kernel send so many bytes a second on each connection; 0 lifts the limit."""
        if bool(rate) == self._is_paced:
            return
        self._is_paced = bool(rate)
        for path in Path("/proc/self/fd").iterdir():
            try:
                if not str(path.readlink()).startswith("socket:"):
                    continue
                with socket.socket(fileno=os.dup(int(path.name))) as connection:
                    value = rate or 0xFFFFFFFF
                    connection.setsockopt(socket.SOL_SOCKET, _PACING, value.to_bytes(4, "little"))
            except OSError:
                continue  # the listing's own descriptor


class _DelayedData:
    """Training data with a delay."""

    def __init__(self, data: Any, delays: Delays) -> None:
        self._data, self._delays = data, delays

    def __getattr__(self, name: str) -> Any:
        return getattr(self._data, name)

    def step(self, first_sample: int, batch: Batch) -> list[MicroBatch]:
        if self._delays.now(first_sample // batch.global_batch_size) == "data":
            time.sleep(1.5 * SECONDS)  # part of the delay overlaps with the steps before
        return self._data.step(first_sample, batch)


def _slow_reads() -> None:
    verify = content.verify_files

    def verify_slowly(*given: Any) -> list[str]:
        time.sleep(DISK_SECONDS)
        return verify(*given)

    content.verify_files = verify_slowly


def _slow_writes(*, from_step: int) -> None:
    write = content.write_stream

    def write_slowly(path: Path, *given: Any) -> Any:
        if int(re.findall(r"\d{8}", path.parent.name)[0]) >= from_step:
            time.sleep(DISK_SECONDS)
        return write(path, *given)

    save.write_stream = write_slowly


def _compute(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass
