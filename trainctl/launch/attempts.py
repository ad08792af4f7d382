"""Attempts of a run, one after the other: shared by the launchers that see a run to its end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from signal import Signals

from trainctl.launch.agents import AgentProcess, Agents
from trainctl.launch.launch_request import AttemptRequest, LaunchRequest
from trainctl.launch.loggers import Loggers
from trainctl.launch.outcome import Outcome
from trainctl.launch.processes import start_agent, start_tied
from trainctl.launch.rendered import Rendered
from trainctl.launch.restarts import run_with_restarts
from trainctl.launch.stop import StopHandler
from trainctl.launch.supervise import Attempt, supervise
from trainctl.plan.types import RunPlan
from trainctl.runs.directory import run_id
from trainctl.runs.layout import AttemptPaths
from trainctl.runs.lock import hold
from trainctl.runs.processes import RunTag


@dataclass(frozen=True, slots=True)
class PreparedAttempt:
    """An attempt whose files are written, and whose agents are to be started."""

    order: AttemptRequest
    rendered: Rendered
    tag: RunTag
    """Tag of its processes; a process on a single node adds the node's number."""
    lock: int
    """Descriptor of the run's lock, which agents inherit."""


@dataclass(frozen=True, slots=True)
class LaunchResult:
    """End of a launch."""

    outcome: Outcome
    """Outcome of its last attempt."""
    is_cancelled: bool
    """Whether a scheduler told both this process and the agents to end."""


def run_attempts(
    launch: LaunchRequest,
    *,
    render: Callable[[AttemptRequest], Rendered],
    start: Callable[[PreparedAttempt], Agents],
    replan: Callable[[RunPlan, StopHandler], RunPlan] | None = None,
    restarts_itself: bool = True,
) -> LaunchResult:
    """Run the attempt, and those that replace it when it fails, to the end.

    Call it in the main thread.

    Args:
        render: Renders the commands of an attempt.
        start: Starts the agents of an attempt.
        replan: Returns the plan of the next attempt; None keeps the plan.
        restarts_itself: Whether a failed attempt is replaced here; else only the first one is run.

    Raises:
        TrainctlError: The run is in use (exit code 5).
    """
    run, plan, launcher = launch.run, launch.plan, launch.plan.config.launcher
    with hold(run) as lock:
        identity = run_id(run)
        loggers = Loggers(run, plan.config, RunTag(identity, run.root), launch.on_event)
        launch = replace(launch, on_event=loggers.on_event)

        def run_one(attempt: AttemptPaths, plan: RunPlan, stop: StopHandler) -> Outcome:
            order = launch.start(attempt, plan)
            rendered = render(order)
            rendered.write(attempt)
            tag = RunTag(identity, run.root, attempt.number)
            return supervise(
                Attempt(run, attempt, tag, ranks=plan.mesh.world_size),
                lambda: start(PreparedAttempt(order, rendered, tag, lock)),
                launch.on_event,
                stop,
                grace_seconds=launcher.grace_seconds,
            )

        with StopHandler.for_launch(run, plan) as stop, loggers:
            if restarts_itself:
                outcome = run_with_restarts(launch, stop, run_one, replan)
            else:
                outcome = run_one(launch.attempt, plan, stop)
            loggers.finish(lambda: stop.received is not None)
        return LaunchResult(outcome, stop.is_cancelled)


def start_one_agent(begun: PreparedAttempt) -> AgentProcess:
    """Start the agent of the first node, on this machine."""
    node = begun.rendered.command.nodes[0]
    log = begun.order.attempt.agent_log(0)
    process = start_agent(
        node.argv,
        tag=replace(begun.tag, node=0),
        environment=node.environment,
        log=log,
        lock=begun.lock,
        folder=begun.order.folder,
    )
    return AgentProcess(process, log, "the agent", node=0)


def start_program(
    begun: PreparedAttempt,
    *,
    name: str,
    death_signal: Signals,
    agents: type[AgentProcess] = AgentProcess,
) -> AgentProcess:
    """Start the one program that starts all agents: srun, mpirun.

    Args:
        name: Name of the program and of its log.
        death_signal: Signal that it gets when this process dies.
        agents: Class that watches the program.
    """
    log = begun.order.attempt.logs / f"{name}.log"
    process = start_tied(
        begun.rendered.commands[0],
        tag=begun.tag,
        environment=begun.rendered.command.nodes[0].environment,
        log=log,
        lock=begun.lock,
        death_signal=death_signal,
    )
    return agents(process, log, name)
