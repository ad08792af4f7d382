"""Attempts of a run: started, supervised to their end, and replaced after a failure.

Shared by the launchers that see a run to its end.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from signal import Signals
from typing import Any

from trainctl.errors import ExitCode, TrainctlError
from trainctl.hardware.storage import lacking_space
from trainctl.launchers.interface import (
    Agents,
    AttemptRequest,
    LaunchRequest,
    Outcome,
    RenderedLaunch,
    render,
)
from trainctl.launchers.processes import (
    Companions,
    Process,
    start_with_pdeathsig,
    tagged_environment,
)
from trainctl.launchers.stop import StopHandler
from trainctl.plans.types import RunPlan
from trainctl.runs.checkpoints import clean_temporary, newest_checkpoint
from trainctl.runs.completion import why_done
from trainctl.runs.directory import last_attempt, new_attempt, read_plan, run_id
from trainctl.runs.failures import Cause, cause_of_disk, describe_exit, describe_failure, disk_fault
from trainctl.runs.files import open_as_its_folder
from trainctl.runs.held_folder import HeldFolder
from trainctl.runs.layout import AttemptPaths, RunPaths
from trainctl.runs.lock import hold_lock
from trainctl.runs.processes import RunTag, terminate_processes
from trainctl.runs.records import Event, EventFollower, EventWriter, OnEvent, read_events
from trainctl.runs.status import State, Status, change_status, write_status

FRUITLESS_RESTARTS = 3
"""Restarts in a row without a new checkpoint after which a launch gives up."""
_LEFTOVER_GRACE_SECONDS = 1.0
_POLL_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class PreparedAttempt:
    """An attempt whose files are written, and whose agents are to be started."""

    request: AttemptRequest
    rendered: RenderedLaunch
    tag: RunTag
    """Tag of its processes; a process on a single node adds the node's number."""
    lock: int
    """Descriptor of the run's lock, which agents inherit."""


def run_on_this_machine(launch: LaunchRequest) -> Outcome:
    """Run an attempt by one agent here, and those that replace it when it fails, to the end.

    Call it in the main thread. SIGINT, SIGTERM and SIGHUP stop every rank, a second one without
    grace; see `StopHandler` for when SIGTERM saves first. When this returns or raises, no process
    of the run is left.

    Raises:
        TrainctlError: The run is in use (5), or its disk has no space for a checkpoint (4).
    """
    run = launch.run
    require_space(run.root, launch.checkpoint_bytes)
    with hold_lock(run):
        # Finds processes only if an earlier attempt's launcher and agent were killed at once.
        terminate_processes(RunTag(run_id(run), run.root), grace_seconds=_LEFTOVER_GRACE_SECONDS)
        return run_attempts(launch, render=render, start=start_one_agent)


def next_attempt(run: RunPaths, number: int | None) -> tuple[AttemptPaths, RunPlan]:
    """Return the attempt if it has not been launched yet, else a new one with the newest plan."""
    newest = last_attempt(run)
    plan = read_plan(run.attempt(newest).plan)
    launched = {event["attempt"] for event in read_events(run.events, "launch")}
    if number in (None, newest) and newest not in launched:
        return run.attempt(newest), plan
    return new_attempt(run, plan), plan


def is_done(run: RunPaths, plan: RunPlan) -> bool:
    """Return True if the newest checkpoint leaves a launch of the plan nothing to do."""
    checkpoint = newest_checkpoint(run)[0] if plan.config.trains_itself else None
    return checkpoint is not None and why_done(run, checkpoint, plan) is not None


def end_as_cancelled(run: RunPaths, outcome: Outcome) -> Outcome:
    """Return a saved end as one that is not requeued (143): its scheduler was told to cancel."""
    if outcome.exit_code == ExitCode.requeue:
        outcome = replace(outcome, exit_code=int(ExitCode.terminated))
        change_status(run, outcome.state, outcome.exit_code, outcome.message)
    return outcome


def require_space(folder: Path, needed_bytes: int | None) -> None:
    """Raise if the disk of a folder has less free space than `needed_bytes`; None is unknown.

    Raises:
        TrainctlError: Exit code 4.
    """
    for lacking in lacking_space(shutil.disk_usage(folder).free, needed_bytes, str(folder)):
        raise TrainctlError(lacking.message, hint=lacking.hint, exit_code=lacking.exit_code)


def run_attempts(
    launch: LaunchRequest,
    *,
    render: Callable[[AttemptRequest], RenderedLaunch],
    start: Callable[[PreparedAttempt], Agents],
    replan: Callable[[RunPlan, StopHandler], RunPlan] | None = None,
    restarts_itself: bool = True,
) -> Outcome:
    """Run the attempt, and those that replace it when it fails, to the end.

    Call it in the main thread.

    Args:
        replan: Returns the plan of the next attempt; None keeps the plan.
        restarts_itself: Whether a failed attempt is replaced here; else only the first one is run.

    Raises:
        TrainctlError: The run is in use (exit code 5).
    """
    run, plan = launch.run, launch.plan
    with hold_lock(run) as lock:
        identity = run_id(run)
        companions = Companions(run, plan.config, RunTag(identity, run.root), launch.on_event)
        launch = replace(launch, on_event=companions.on_event)

        def run_one(attempt: AttemptPaths, plan: RunPlan, stop: StopHandler) -> Outcome:
            request = launch.attempt_request(attempt, plan)
            rendered = render(request)
            rendered.write(attempt)
            tag = RunTag(identity, run.root, attempt.number)
            prepared = PreparedAttempt(request, rendered, tag, lock)
            return supervise(prepared, start, launch.on_event, stop)

        with StopHandler.for_launch(run, plan, launch.began) as stop, companions:
            if restarts_itself:
                outcome = run_with_restarts(launch, stop, run_one, replan)
            else:
                outcome = run_one(launch.attempt, plan, stop)
            companions.finish(lambda: stop.end_signal is not None)
        return replace(outcome, was_signalled=stop.was_signalled, is_cancelled=stop.is_cancelled)


@dataclass(frozen=True, slots=True)
class AgentProcess:
    """A single process: the agent of this machine, or one program (srun, mpirun) for all nodes."""

    process: Process
    log: Path
    name: str
    """Name of the process in the message about its death."""
    node: int | None = None
    """Number of its node; None if it stands for all of them."""
    margin_seconds: float = 1.0
    """Seconds beyond the grace that it may take to end its ranks and itself."""

    @property
    def returncode(self) -> int | None:
        return self.process.returncode

    def poll(self) -> int | None:
        return self.process.poll()

    def terminate(self) -> None:
        self.process.terminate()

    def describe_death(self) -> dict[str, Any]:
        assert self.process.returncode is not None
        fields = describe_exit(self.process.returncode, self.log)
        where = f"node {self.node}, " if self.node is not None else ""
        fields["message"] = f"{self.name} ({where}process {self.process.pid}) {fields['message']}"
        return {
            "rank": None,
            "node": self.node,
            "host": socket.gethostname(),
            "pid": self.process.pid,
            **fields,
        }


def start_one_agent(attempt: PreparedAttempt) -> AgentProcess:
    """Start the first node's agent here, in a session of its own: Ctrl-C reaches only the launcher.

    It inherits the run's lock, and ends when its launcher does.
    """
    request, node = attempt.request, attempt.rendered.command.nodes[0]
    log = request.attempt.agent_log(0)
    with open(log, "ab", opener=open_as_its_folder) as stream:
        process = subprocess.Popen(
            node.argv,
            cwd=request.folder,
            env=tagged_environment(replace(attempt.tag, node=node.node), node.environment),
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            start_new_session=True,
            pass_fds=(attempt.lock,),
        )
    return AgentProcess(process, log, "the agent", node=node.node)


def start_program(
    attempt: PreparedAttempt,
    *,
    name: str,
    death_signal: Signals,
    agents: type[AgentProcess] = AgentProcess,
) -> AgentProcess:
    """Start the one program that starts all agents: srun, mpirun.

    Args:
        death_signal: Signal that it gets when this process dies.
        agents: Class that watches the program.
    """
    log = attempt.request.attempt.logs / f"{name}.log"
    process = start_with_pdeathsig(
        attempt.rendered.commands[0],
        tag=attempt.tag,
        environment=attempt.rendered.command.nodes[0].environment,
        log=log,
        lock=attempt.lock,
        death_signal=death_signal,
    )
    return agents(process, log, name)


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
    change_status(run, outcome.state, outcome.exit_code, outcome.message)
    return outcome


def supervise(
    attempt: PreparedAttempt,
    start: Callable[[PreparedAttempt], Agents],
    on_event: OnEvent,
    stop: StopHandler,
) -> Outcome:
    """Start the agents, pass on records, and return when no process of the attempt is left here.

    Args:
        stop: Signals and time limit; its context is entered.
    """
    run, plan, number = attempt.request.run, attempt.request.plan, attempt.request.attempt.number
    grace_seconds = plan.config.launcher.grace_seconds
    status = Status.begin(State.starting, number)
    write_status(run, status)
    records = _Records(run, number, on_event, stop)
    held = closing(HeldFolder(run, plan.config.checkpoint.mirror))
    with EventWriter(run.events, number) as writer, held as folder:
        writer.write("launch", host=status.host, pid=status.pid, ranks=plan.mesh.world_size)
        agents = start(attempt)
        try:
            _watch_agents(attempt, agents, records, stop, status, writer, folder)
        except BaseException as error:  # raised by on_event
            agents.terminate()
            terminate_processes(attempt.tag, grace_seconds=grace_seconds)
            code = int(error.exit_code) if isinstance(error, TrainctlError) else None
            message = f"launcher: {error}"
            write_status(run, status.changed(State.failed, exit_code=code, message=message))
            raise
        stuck = terminate_processes(attempt.tag, grace_seconds=grace_seconds)
        code = agents.returncode
        assert code is not None
        lost = folder.problem()
        if lost is not None:
            return _without_folder(folder, lost, status)
        records.poll()
        if stop.end_signal and not stuck:
            clean_temporary(run)  # from a save that the signal interrupted
        if code != 0 and not (records.failure or stop.end_signal or stop.interrupt_signal):
            _record_death(agents, records, writer, run)
        outcome = _attempt_outcome(code, stop, records, stuck)
        with suppress(OSError):  # on a full disk, the outcome's message must be enough
            write_status(
                run,
                status.changed(outcome.state, exit_code=outcome.exit_code, message=outcome.message),
            )
        return outcome


def _without_folder(folder: HeldFolder, lost: TrainctlError, status: Status) -> Outcome:
    """Return the outcome of an attempt whose run directory is gone or another one.

    Nothing is written under its name. A renamed directory gets the status.
    """
    outcome = Outcome(
        exit_code=int(lost.exit_code), state=State.failed, message=lost.message, hint=lost.hint
    )
    if folder.moved_to is not None:
        with suppress(OSError):
            changed = status.changed(
                outcome.state, exit_code=outcome.exit_code, message=outcome.message
            )
            write_status(folder.moved_to, changed)
    return outcome


def _watch_agents(
    attempt: PreparedAttempt,
    agents: Agents,
    records: _Records,
    stop: StopHandler,
    status: Status,
    writer: EventWriter,
    folder: HeldFolder,
) -> None:
    """Pass on records and requests to stop until the agents end; kill what outlives its grace.

    The agents are ended when the run's folder is gone or another one.
    """
    grace_seconds = attempt.request.plan.config.launcher.grace_seconds
    stop.forward_to(agents, attempt.tag)
    deadline = float("inf")
    is_running = is_stop_recorded = False
    while agents.poll() is None:
        if folder.problem() is not None:
            _end_agents(agents, attempt.tag, grace_seconds)
            return
        records.poll()
        stop.check_time()
        if stop.save_reason and not is_stop_recorded:
            is_stop_recorded = True
            with suppress(OSError):  # a full disk, which the ranks report
                writer.write(
                    "stopping",
                    reason=stop.save_reason,
                    within_seconds=stop.patience_seconds,
                    **({"estimates": stop.estimates} if stop.estimates else {}),
                )
        if records.has_started and not is_running:
            with suppress(OSError):  # a file system that fails for a moment: try again
                write_status(attempt.request.run, status.changed(State.running))
                is_running = True
        if stop.end_signal or records.failure:
            latest = time.monotonic() + grace_seconds + agents.margin_seconds
            deadline = min(deadline, latest)
        if time.monotonic() > deadline:
            terminate_processes(attempt.tag, grace_seconds=0)
        time.sleep(_POLL_SECONDS)


def _end_agents(agents: Agents, tag: RunTag, grace_seconds: float) -> None:
    """End the agents and wait for it; kill what outlives its grace."""
    agents.terminate()
    deadline = time.monotonic() + grace_seconds + agents.margin_seconds
    while agents.poll() is None:
        if time.monotonic() > deadline:
            terminate_processes(tag, grace_seconds=0)
        time.sleep(_POLL_SECONDS)


def _record_death(agents: Agents, records: _Records, writer: EventWriter, run: RunPaths) -> None:
    """Record an error exit that no agent has recorded."""
    failure = agents.describe_death()
    # The disk may be full even if this short record still fits into its file's last page.
    fault = disk_fault(run.root)
    if fault is not None:
        failure |= _disk_failure(run, fault, fault.words)
    try:
        writer.write("failure", **failure)
        records.poll()
    except OSError as error:
        fault = cause_of_disk(error) or Cause.disk_full
        failure |= _disk_failure(run, fault, error.strerror or str(error))
    # Report the failure even if its record could not be written or read back.
    records.failure = records.failure or failure


class _Records:
    """Passes records on, and keeps the first failure and the `end` record."""

    def __init__(self, run: RunPaths, attempt: int, on_event: OnEvent, stop: StopHandler) -> None:
        self._follower = EventFollower(run.events, attempt)
        self._on_event = on_event
        self._stop = stop
        self.failure: Event | None = None
        self.end: Event | None = None
        self.has_started = False

    def poll(self) -> None:
        for event in self._follower.poll():
            kind = event["event"]
            self.has_started |= kind in ("start", "step", "program")
            if kind == "failure" and (self.failure is None or _is_root_cause(event, self.failure)):
                self.failure = event
            elif kind == "end":
                self.end = event
            self._stop.observe(event)
            self._on_event(event)


def _is_root_cause(event: Event, first: Event) -> bool:
    """Return True if this failure is the root cause of the one recorded first, on another node.

    An agent that has lost this launcher cannot know that the launcher lives and the node is lost.
    """
    if event.get("launcher_lost") or first.get("launcher_lost"):
        return not event.get("launcher_lost")
    return event["node"] != first["node"] and (
        Cause(first["cause"]).is_consequence and not Cause(event["cause"]).is_consequence
    )


def _disk_failure(run: RunPaths, cause: Cause, reason: str) -> dict[str, Any]:
    """Return fields of a failure for when no process can write a record."""
    return {
        "cause": cause.value,
        "message": f"the run stopped: nothing more can be written to {run.root} ({reason})",
        "hint": cause.hint,
    }


def _attempt_outcome(code: int, stop: StopHandler, records: _Records, stuck: set[int]) -> Outcome:
    left = f"; processes {sorted(stuck)} do not end, not even by SIGKILL" if stuck else ""
    if code == 0:
        end = records.end
        if end is None or end["reason"] != "stop_requested":
            return Outcome(exit_code=0, state=State.finished)
        reason = stop.save_reason or "a request"
        return Outcome(
            exit_code=stop.code_when_saved,
            state=State.stopped,
            message=f"saved and stopped after step {end['step']} for {reason}",
        )
    failure = records.failure
    signalled = stop.end_signal or _ended_by_signal(stop, failure)
    if signalled is not None:
        return Outcome(
            exit_code=128 + signalled,
            state=State.stopped,
            message=f"stopped by {signalled.name}{left}",
        )
    assert failure is not None
    code = failure.get("launch_exit_code", code)
    return Outcome(
        exit_code=code if code > 0 else 128 - code,
        state=State.failed,
        message=describe_failure(failure) + left,
        cause=failure["cause"],
        hint=failure["hint"],
        log=Path(failure["log"]),
        log_tail=tuple(failure["log_tail"]),
        is_transient=Cause(failure["cause"]).is_transient and not stuck and not stop.is_stopping,
    )


def _ended_by_signal(stop: StopHandler, failure: Event | None) -> Signals | None:
    """Return the signal that killed the ranks before their final checkpoint finished.

    It asked for the save, and reached the agents or the ranks as well as this launcher.
    """
    if stop.interrupt_signal is None:
        return None
    is_its_doing = failure is None or failure.get("signal") == stop.interrupt_signal.name
    return stop.interrupt_signal if is_its_doing else None
