"""Runs inside a rank for tests of the schedule: several schedules with one engine."""

from __future__ import annotations

from typing import Any

from rank_processes import Case

from trainctl.engines.process import Process
from trainctl.runs.records import EventWriter
from trainctl.train.checkpoint.content import RunProgress
from trainctl.train.learning_rate import LearningRate
from trainctl.train.loop import Trainer
from trainctl.train.session import assemble

Rates = dict[str, float]


def train_with_each(cases: list[Case], process: Process) -> list[tuple[list[Rates], Rates]]:
    """Train as launched with each case's plan in turn; the plans differ only in their schedule.

    Returns:
        For each case: the rates of every group at each call of the optimizer, and the initial rates
        of the groups.
    """
    session = assemble(cases[0].plan, cases[0].run, process)
    results = []
    for case in cases:
        session.plan, session.run, session.progress = case.plan, case.run, RunProgress()
        session.learning_rate = LearningRate(case.plan)
        calls: list[Rates] = []

        def note(optimizer: Any, *_: object, calls: list[Rates] = calls) -> None:
            calls.append({group["name"]: group["lr"] for group in optimizer.param_groups})

        hook = session.state.optimizer.register_step_pre_hook(note)
        events = EventWriter(case.run.events, case.attempt) if process.is_first else None
        Trainer(session, events).train()
        hook.remove()
        groups = session.state.optimizer.param_groups
        results.append((calls, {group["name"]: group["peak_lr"] for group in groups}))
    session.engine.close()
    return results
