"""Runs one after another on the same ranks, where the engine leaves nothing behind."""

from __future__ import annotations

from rank_processes import Case

from trainctl.engines.process import Process
from trainctl.runs.records import EventWriter
from trainctl.train.session import assemble
from trainctl.train.trainer import Trainer


def train(cases: list[Case], process: Process) -> None:
    """Train each case as launched."""
    for case in cases:
        session = assemble(case.plan, case.run, process)
        events = EventWriter(case.run.events, case.attempt) if process.is_first else None
        Trainer(session, events, attempt=case.attempt).train()
        process.barrier()
        session.engine.close()
