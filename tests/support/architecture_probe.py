"""Train several plans one after the other on the same ranks: start-up is most of a small case."""

from __future__ import annotations

from rank_processes import Case

from trainctl.engines.process import Process
from trainctl.errors import TrainctlError
from trainctl.runs.records import EventWriter
from trainctl.train.loop import Trainer
from trainctl.train.session import assemble


def train(cases: list[Case], process: Process) -> list[str]:
    """Train each case; return by case why it cannot be trained, if so."""
    refusals = []
    for case in cases:
        try:
            session = assemble(case.plan, case.run, process)
        except TrainctlError as error:  # the error comes from the plan, so all ranks raise it
            refusals.append(str(error))
            continue
        events = EventWriter(case.run.events, case.attempt) if process.is_first else None
        Trainer(session, events, attempt=case.attempt).train()
        process.barrier()
        session.engine.close()
        refusals.append("")
    return refusals
