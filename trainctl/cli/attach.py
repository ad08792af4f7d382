"""Following a run that another process, machine or scheduler drives."""

from __future__ import annotations

import time

from trainctl.cli.console import put, say
from trainctl.cli.findings import show_error
from trainctl.cli.progress import Progress
from trainctl.errors import ExitCode, TrainctlError
from trainctl.runs.directory import last_attempt, read_plan
from trainctl.runs.layout import RunPaths
from trainctl.runs.listing import LOST, NEW, summarise
from trainctl.runs.records import EventFollower

_POLL_SECONDS = 0.2


def follow_run(run: RunPaths, *, as_json: bool) -> int:
    """Show all records of the newest attempt, and new ones until the run ends.

    Returns:
        The run's exit code.

    Raises:
        TrainctlError: The run was never started, or its launcher and agent are gone (exit code 5).
    """
    summary = summarise(run)
    if summary.state == NEW and not summary.is_live:
        raise TrainctlError(
            f"nothing of {run.root} was started yet",
            hint=f"trainctl resume {run.root} starts it",
            exit_code=ExitCode.run_state,
        )
    first = last_attempt(run)
    plan = read_plan(run.attempt(first).plan)
    follower = EventFollower(run.events, from_start=True)
    if not as_json:
        put(f"run directory: {run.root}")
        if summary.state == "queued":
            say(f"job {summary.job.id if summary.job else '?'} waits in its queue")
    every = plan.config.logging.every_steps
    with Progress(
        stop_step=plan.stop_step, every_steps=every, as_json=as_json, run=run, attempt=first
    ) as progress:
        while True:
            summary = summarise(run)
            while events := follower.poll():
                for event in events:
                    if event["attempt"] >= first:
                        progress(event)
            if not summary.is_live:
                break
            time.sleep(_POLL_SECONDS)
    if summary.state == LOST:
        raise TrainctlError(
            f"{run.root}: launcher and agent were ended at one blow",
            hint=f"trainctl resume {run.root} goes on from its newest checkpoint",
            exit_code=ExitCode.run_state,
        )
    if summary.exit_code:
        show_error(summary.message)
    elif summary.message:
        say(summary.message)
    return summary.exit_code or 0
