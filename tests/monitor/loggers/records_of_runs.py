"""Runs that were never trained: records with rewinds, resumes and evaluations, from a seed."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainctl.config.schema import LoggingConfig, RunConfig
from trainctl.runs.directory import create_run
from trainctl.runs.layout import RunPaths
from trainctl.runs.records import EventWriter, number, read_events, step_curve

EVALUATED = 7
"""Every so many steps."""


def new_run(folder: Path) -> RunPaths:
    """Create a run without attempts."""
    config = RunConfig(logging=LoggingConfig(to=[]))
    return create_run(config, run_dir=folder / "run", folder=folder)


def draw(seed: int, steps: int) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Attempt, kind and fields of records until that step: now and then it goes back, within an
    attempt or with a new one."""
    chance = random.Random(seed)
    attempt, step = 1, 0
    while step < steps:
        step += 1
        loss = chance.choice([chance.random(), chance.random(), float("nan")])
        extra = {"grad_norm": chance.random()} if attempt > 1 else {}
        yield attempt, "step", {"step": step, "loss": loss, "learning_rates": [0.5, 0.25], **extra}
        if step % EVALUATED == 0:
            yield attempt, "evaluation", {"step": step, "loss": chance.random()}
        if chance.random() < 0.03:
            attempt += chance.random() < 0.5
            step = chance.randrange(max(0, step - 20), step + 1)


def append(run: RunPaths, records: Iterator[tuple[int, str, dict[str, Any]]]) -> None:
    """Write records as ranks do."""
    for attempt, kind, fields in records:
        with EventWriter(run.events, attempt) as events:
            events.write(kind, **fields)


def losses(run: RunPaths) -> tuple[dict[int, float], dict[int, float]]:
    """Return the losses of the run's steps and of its evaluations, after all restarts."""
    train, evaluations = {}, {}
    for event in read_events(run.events):
        if event["event"] == "step":
            evaluations = {s: loss for s, loss in evaluations.items() if s < event["step"]}
        elif event["event"] == "evaluation":
            evaluations[event["step"]] = number(event["loss"])
    for step, event in step_curve(read_events(run.events)).items():
        train[step] = number(event["loss"])
    return train, evaluations
