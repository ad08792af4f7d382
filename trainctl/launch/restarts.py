"""Restarts after a failure, as long as they make progress."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from trainctl.errors import TrainctlError
from trainctl.launch.launch_request import LaunchRequest
from trainctl.launch.outcome import Outcome
from trainctl.launch.stop import StopHandler
from trainctl.plan.types import RunPlan
from trainctl.runs.checkpoints import newest_checkpoint
from trainctl.runs.directory import new_attempt
from trainctl.runs.layout import AttemptPaths, RunPaths
from trainctl.runs.records import EventWriter
from trainctl.runs.status import read_status, write_status

FRUITLESS_RESTARTS = 3
"""Restarts in a row without a new checkpoint after which a launch gives up."""


def run_with_restarts(
    launch: LaunchRequest,
    stop: StopHandler,
    run_one: Callable[[AttemptPaths, RunPlan, StopHandler], Outcome],
    replan: Callable[[RunPlan, StopHandler], RunPlan] | None = None,
) -> Outcome:
    """Run attempts until one succeeds, or another one would not help.

    Progress is a newer committed checkpoint: steps that were not saved are repeated. Checkpoints of
    a user's program are unknown here, so it is restarted up to the limit.

    Args:
        launch: The launch, which holds its run's lock.
        stop: Whether the launch is to end.
        run_one: Runs an attempt to its end.
        replan: Returns the next attempt's plan from the last one's, for the nodes that are
            there then. It may wait for nodes, and raises TrainctlError if that is in vain. None
            keeps the launch's plan.
    """
    run, attempt, plan = launch.run, launch.attempt, launch.plan
    most = plan.config.launcher.max_restarts
    restarts = fruitless = 0
    saved = _saved_step(run)
    while True:
        outcome = run_one(attempt, plan, stop)
        if outcome.exit_code == 0 or not outcome.is_transient or most == 0:
            return outcome
        before, saved = saved, _saved_step(run)
        if saved > before or not plan.config.trains_itself:
            fruitless = 0
        if fruitless == FRUITLESS_RESTARTS:
            return _give_up(
                run, outcome, f"gave up: {fruitless} restarts brought no new checkpoint"
            )
        if restarts == most:
            return _give_up(run, outcome, f"launcher.max_restarts={most} is used up")
        if replan is not None:
            try:
                plan = replan(plan, stop)
            except TrainctlError as error:
                return _give_up(run, outcome, error.message)
        restarts, fruitless = restarts + 1, fruitless + 1
        with EventWriter(run.events, attempt.number) as events:
            launch.on_event(
                events.write(
                    "restart",
                    number=restarts,
                    of=most,
                    step=saved,
                    nodes=plan.hardware.nodes,
                    cause=outcome.message,
                )
            )
        attempt = new_attempt(run, plan)


def _saved_step(run: RunPaths) -> int:
    checkpoint, _ = newest_checkpoint(run)
    return checkpoint.step if checkpoint else 0


def _give_up(run: RunPaths, outcome: Outcome, why: str) -> Outcome:
    outcome = replace(outcome, message=f"{outcome.message}; {why}")
    status = read_status(run)
    if status is not None:
        state, code = outcome.state, outcome.exit_code
        write_status(run, status.changed(state, exit_code=code, message=outcome.message))
    return outcome
