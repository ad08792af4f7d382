"""Lifecycle of one rank: join, assemble, train, shut down in order."""

from __future__ import annotations

import warnings

from trainctl.engines import patch_checks as declared
from trainctl.engines.process import not_deterministic, stop_process
from trainctl.engines.protocol import engine_backend
from trainctl.plan.types import RunPlan
from trainctl.runs.heartbeats import Heartbeat, Phase
from trainctl.runs.imports import gc_disabled
from trainctl.runs.layout import RunPaths
from trainctl.runs.records import EventWriter
from trainctl.train.loop import Trainer
from trainctl.train.session import assemble


def train_rank(plan: RunPlan, run: RunPaths, attempt: int, heartbeat: Heartbeat) -> None:
    """Train this rank as the plan says.

    Raises:
        TrainctlError: The user can act on it; any other exception is a bug or a failing device.
    """
    # DeepSpeed calls collectives by deprecated names, of which newer torch warns at every call.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    heartbeat.beat(Phase.start, doing="joining the other ranks")
    with gc_disabled():  # this imports the engine
        declared.require_unchanged(plan.config)
    process = engine_backend(plan).start_process(plan)
    heartbeat.beat(Phase.start, doing="building the model and its engine")
    try:
        session = assemble(plan, run, process)
        events = EventWriter(run.events, attempt) if process.is_first else None
        Trainer(session, events, heartbeat, attempt=attempt).train()
    except RuntimeError as error:
        explained = not_deterministic(error)
        if explained is None:
            raise
        raise explained from error
    heartbeat.beat(Phase.end)
    # In this order: DeepSpeed's threads use the process groups, and exiting with them alive aborts.
    process.barrier()
    session.engine.close()
    stop_process()
