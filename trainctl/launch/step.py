"""What launchers share whose agents are all started by one program: srun, mpirun."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trainctl.launch.agents import OneProcess
from trainctl.launch.order import Launch, Start
from trainctl.launch.outcome import Outcome
from trainctl.launch.rendered import Rendered
from trainctl.launch.restarts import run_with_restarts
from trainctl.launch.stop import Stop
from trainctl.launch.supervise import Attempt, supervise
from trainctl.plan.types import RunPlan
from trainctl.runs.directory import run_id
from trainctl.runs.layout import AttemptPaths
from trainctl.runs.lock import hold
from trainctl.runs.processes import RunTag


@dataclass(frozen=True, slots=True)
class Ended:
    """How a launch ended.

    Attributes:
        outcome: Of its last attempt.
        is_cancelled: Whether a scheduler told both this process and the agents to end.
    """

    outcome: Outcome
    is_cancelled: bool


def run_steps(
    launch: Launch,
    *,
    render: Callable[[Start], Rendered],
    start: Callable[[Rendered, AttemptPaths, RunTag, int], OneProcess],
    restarts_itself: bool = True,
) -> Ended:
    """Run the attempt, and those that replace it when it fails, to the end. In the main thread.

    Args:
        launch: The launch.
        render: What an attempt starts.
        start: Starts the program, with the attempt's tag and the run's lock.
        restarts_itself: Whether a failed attempt is replaced here; else only the first is run.
    """
    run, plan, launcher = launch.run, launch.plan, launch.plan.config.launcher
    with hold(run) as lock:
        identity = run_id(run)

        def run_one(attempt: AttemptPaths, plan: RunPlan, stop: Stop) -> Outcome:
            rendered = render(launch.start(attempt, plan))
            rendered.write(attempt)
            tag = RunTag(identity, run.root, attempt.number)
            return supervise(
                Attempt(run, attempt, tag, ranks=plan.mesh.world_size),
                lambda: start(rendered, attempt, tag, lock),
                launch.on_event,
                stop,
                grace_seconds=launcher.grace_seconds,
            )

        with Stop.of_launch(run, plan) as stop:
            if restarts_itself:
                outcome = run_with_restarts(launch, stop, run_one)
            else:
                outcome = run_one(launch.attempt, plan, stop)
        return Ended(outcome, stop.is_cancelled)
