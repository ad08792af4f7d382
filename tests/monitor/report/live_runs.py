"""Runs that were made and not started, with steps as they are recorded."""

from __future__ import annotations

from pathlib import Path

from trainctl.config.compose import compose
from trainctl.hardware import resolve_hardware
from trainctl.rules.resolve import resolve
from trainctl.runs.directory import create_run, new_attempt
from trainctl.runs.layout import RunPaths
from trainctl.runs.records import EventWriter


def make_run(root: Path, *words: str) -> RunPaths:
    """Make a run of `recipe=tiny` with overrides, whose first attempt is planned."""
    config = compose(["recipe=tiny", *words]).config
    plan = resolve(config, resolve_hardware(config.hardware)).plan
    assert plan is not None
    run = create_run(config, run_dir=root)
    new_attempt(run, plan)
    return run


def train(run: RunPaths, steps: range, loss: float = 3.0) -> None:
    """Records of steps, all with the same loss."""
    with EventWriter(run.events, 1) as events:
        for step in steps:
            events.write("step", step=step, loss=loss, learning_rate=1e-3, tokens_per_second=9.0)
