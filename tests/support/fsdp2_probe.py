"""Runs inside ranks: several cases one after another, since the FSDP2 engine leaves no state
behind.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

from census_probe import storages
from rank_processes import Case
from torch.profiler import ProfilerActivity, profile

from trainctl.engines.process import Process
from trainctl.runs.records import EventWriter
from trainctl.train.loop import Trainer
from trainctl.train.session import Session, assemble


def train(cases: list[Case], process: Process) -> None:
    """Train each case as launched."""
    for case in cases:
        session = assemble(case.plan, case.run, process)
        events = EventWriter(case.run.events, case.attempt) if process.is_first else None
        Trainer(session, events, attempt=case.attempt).train()
        process.barrier()
        session.engine.close()


STEPS = 4
"""Steps of a case whose memory is measured: after the first it is resident."""


@dataclass(frozen=True)
class Bytes:
    """Bytes in tensors of a rank."""

    resident: int
    """After a step."""
    peak: int
    """Lowest peak of the next three steps."""


def memory(cases: list[Case], process: Process) -> list[Bytes]:
    """Measure the memory of each case on the first rank; the others only train with it."""
    return [_memory_of(case, process) for case in cases]


def _memory_of(case: Case, process: Process) -> Bytes:
    if not process.is_first:
        _train_beside(case, process)
        return Bytes(0, 0)
    before = storages()
    session = assemble(case.plan, case.run, process)
    _step(session, 0)
    new = (size for address, (size, _) in storages().items() if address not in before)
    resident = sum(new)
    del before
    peaks = []
    for number in range(1, STEPS):  # on a busy machine gloo frees the tensors of a collective late
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            _step(session, number)
        peaks.append(peak_bytes(profiler))
    session.engine.close()
    return Bytes(resident, resident + min(peaks))


def _train_beside(case: Case, process: Process) -> None:
    session = assemble(case.plan, case.run, process)
    for number in range(STEPS):
        _step(session, number)
    session.engine.close()


def peak_bytes(profiler: profile) -> int:
    """Return the peak of the bytes in tensors that were made while the profiler ran."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = json.loads(trace.read_text())["traceEvents"]
    live: dict[int, int] = {}
    held = peak = 0
    allocations = [event for event in events if event.get("name") == "[memory]"]
    for event in sorted(allocations, key=lambda event: event["ts"]):
        size, address = event["args"]["Bytes"], event["args"]["Addr"]
        held -= live.pop(address, 0)  # frees also what was released without `close`
        if size > 0:
            live[address] = size
            held += size
        peak = max(peak, held)
    return peak


def _step(session: Session, number: int) -> None:
    batch = session.plan.batch
    session.engine.set_learning_rate(1.0)
    session.engine.accumulate(session.training.step(number * batch.global_batch_size, batch))
    session.engine.update(norm=session.gradients.norms().total, clip_at=1.0)
