"""Trains several plans one after the other on the same ranks: most of a small case is its start."""

from __future__ import annotations

from rank_processes import Case

from trainctl.engines.process import Process
from trainctl.errors import TrainctlError
from trainctl.runs.records import EventWriter
from trainctl.train.loop import Trainer
from trainctl.train.session import assemble


def train(cases: list[Case], process: Process) -> list[str]:
    """Train each; for each why it cannot be, if it cannot be."""
    refusals = []
    for case in cases:
        try:
            session = assemble(case.plan, case.run, process)
        except TrainctlError as error:  # of the plan's, so all ranks have it
            refusals.append(str(error))
            continue
        events = EventWriter(case.run.events, case.attempt) if process.is_first else None
        Trainer(session, events, attempt=case.attempt).train()
        process.barrier()
        session.engine.close()
        refusals.append("")
    return refusals
