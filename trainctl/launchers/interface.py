"""Interface of the launchers: their types, dispatch to the configured one, a scheduler's commands.

A launcher's own module is imported when one of its functions is called.
"""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from trainctl.config.registry import function_of, load_spec
from trainctl.config.schema import RunConfig
from trainctl.errors import ExitCode, Finding, TrainctlError
from trainctl.launchers.rank_command import user_code_folder
from trainctl.options.launcher import spec_of
from trainctl.plans.types import RunPlan
from trainctl.runs.command import AttemptCommand, write_command
from trainctl.runs.directory import last_attempt
from trainctl.runs.files import write_text
from trainctl.runs.layout import AttemptPaths, RunPaths
from trainctl.runs.lock import hold_lock
from trainctl.runs.processes import available_cores, run_tool
from trainctl.runs.records import OnEvent
from trainctl.runs.status import SchedulerJob, State, Status, change_status, write_job, write_status


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRequest:
    """Everything that an attempt is started from, and all that rendering reads."""

    plan: RunPlan
    run: RunPaths
    attempt: AttemptPaths
    environment: Mapping[str, str]
    """The shell's or job's environment, from which `launcher.forward_environment` selects."""
    cores: int
    """CPU cores of this machine, used for hosts whose number of cores is unknown."""
    rank_command: Sequence[str] | None = None
    """Command that replaces the ranks' own; no corpus is prepared for it."""
    folder: Path | None = None
    """Working directory of agents and ranks; None keeps the directory that they are started in."""

    @property
    def ranks_per_node(self) -> int:
        return self.plan.mesh.world_size // self.plan.hardware.nodes

    @property
    def threads(self) -> int:
        """OpenMP threads of a rank: an equal share of the node's cores."""
        return max(1, self.cores // self.ranks_per_node)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRequest:
    """An attempt, and those that replace it when it fails."""

    run: RunPaths
    """The run; its lock is taken unless this process holds it."""
    attempt: AttemptPaths
    """The first attempt, as `new_attempt` made it."""
    plan: RunPlan
    on_event: OnEvent
    """Called with each record of this launch soon after it is written."""
    rank_command: Sequence[str] | None = None
    """Command that replaces the ranks' own; no corpus is prepared for it."""
    checkpoint_bytes: int | None = None
    """Size of a checkpoint, if known: that much disk space must be free."""
    began: float | None = None
    """Unix time from which its time limit counts; None is the start of this process."""
    uses_launch_folder: bool = True
    """Whether the user's code runs in the folder of the first launch; in a container it runs in the
    container's working directory.
    """

    def attempt_request(self, attempt: AttemptPaths, plan: RunPlan) -> AttemptRequest:
        """Return the request to start one of its attempts from this process.

        Raises:
            TrainctlError: The folder that the run was launched from is gone (exit code 4).
        """
        return AttemptRequest(
            plan=plan,
            run=self.run,
            attempt=attempt,
            environment=os.environ,
            cores=available_cores(),
            rank_command=self.rank_command,
            folder=user_code_folder(plan.config, self.run) if self.uses_launch_folder else None,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderedLaunch:
    """Commands to start for an attempt, and files to write for it."""

    command: AttemptCommand
    """The command of each node."""
    commands: tuple[tuple[str, ...], ...]
    """Command lines that the launcher itself runs to start the nodes, in order."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Further files of the attempt's folder: text by name."""

    @property
    def text(self) -> str:
        """The commands as a person could type them."""
        return "".join(f"{shlex.join(argv)}\n" for argv in self.commands)

    def write(self, attempt: AttemptPaths) -> None:
        """Write `command.json`, `commands.txt` and the files to the attempt's folder."""
        write_command(attempt, self.command)
        write_text(attempt.root / "commands.txt", self.text)
        for name, text in self.files.items():
            write_text(attempt.root / name, text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """End of an attempt, and exit code of its launch."""

    exit_code: int
    """Exit code of the launch; 0 only if every rank ended well."""
    state: State
    """finished, failed, stopped, or queued if a scheduler has taken it."""
    message: str = ""
    """Sentence about the end; empty when finished."""
    cause: str = ""
    """`cause` of the failure's record; empty if nothing failed."""
    hint: str = ""
    log: Path | None = None
    """The log that tells more, if there is one."""
    log_tail: tuple[str, ...] = ()
    is_transient: bool = False
    """Whether another attempt may end better."""
    was_signalled: bool = False
    """Whether the launcher got a signal to end."""
    is_cancelled: bool = False
    """Whether a scheduler told both the launcher and the agents to end."""


class Agents(Protocol):
    """Everything that runs an attempt, on all of its nodes."""

    @property
    def margin_seconds(self) -> float:
        """Seconds beyond the grace that the agents may take to end their ranks and themselves."""

    @property
    def returncode(self) -> int | None:
        """Exit code of the launch, as the agents report it; negative is a signal, None: it runs."""

    def poll(self) -> int | None:
        """Do what is due, and return `returncode`."""

    def terminate(self) -> None:
        """Have every node end its ranks within the grace. Also called from a signal handler."""

    def describe_death(self) -> dict[str, Any]:
        """Return fields of a `failure` record, after an error exit that no agent has recorded."""


def submit_attempt(
    launch: LaunchRequest,
    rendered: RenderedLaunch,
    *,
    job_id: Callable[[str], str],
    is_known: bool = False,
    name: str = "job",
    send: Callable[[Sequence[str]], str] | None = None,
) -> Outcome:
    """Write the attempt's files, submit it by its only command, and record its job.

    Args:
        job_id: Returns the job's id from the command's output.
        is_known: As in `submit`.
        name: What the scheduler calls a job.
        send: Submits it in place of the command, and returns the output.

    Raises:
        TrainctlError: The scheduler refuses it (exit code 4), or the run is in use (5).
    """
    run, attempt = launch.run, launch.attempt
    with hold_lock(run):
        rendered.write(attempt)
        output = submit(
            partial(send or run_tool, rendered.commands[0]),
            [(run, attempt)],
            kind=launch.plan.config.launcher.kind,
            job_id=lambda _, output: job_id(output),
            is_known=is_known,
        )
    identity = job_id(output).rpartition("/")[2]
    return Outcome(exit_code=0, state=State.queued, message=f"{name} {identity} is submitted")


def submit(
    send: Callable[[], str],
    attempts: Sequence[tuple[RunPaths, AttemptPaths]],
    *,
    kind: str,
    job_id: Callable[[RunPaths, str], str],
    is_known: bool = False,
) -> str:
    """Submit the attempts, and record their jobs; return the scheduler's output.

    Args:
        send: Submits them, and returns the scheduler's output.
        attempts: Runs and their attempts, all in one job or in one array.
        job_id: Returns a run's job id from the output.
        is_known: Whether the job id needs no output. The job is then recorded before it is sent:
            it may exist although its submission was interrupted, and can be cancelled.

    Raises:
        TrainctlError: The scheduler refuses it (exit code 4); the runs have then failed.
    """

    def record_jobs(output: str) -> None:
        host = socket.gethostname()
        for run, attempt in attempts:
            job = SchedulerJob(kind=kind, id=job_id(run, output), submitted=now, host=host)
            write_job(attempt, job)

    now = time.time()
    for run, attempt in attempts:  # before the job exists: its own launcher writes the next state
        write_status(run, Status.begin(State.queued, attempt.number))
    if is_known:
        record_jobs("")
    try:
        output = send()
    except TrainctlError as error:
        for run, _ in attempts:
            change_status(run, State.failed, int(error.exit_code), error.message)
        raise
    if not is_known:
        record_jobs(output)
    return output


def launch_function(plan: RunPlan) -> Callable[[LaunchRequest], Outcome]:
    """Return the function that runs a launch of the plan to its end, or gives it to a scheduler.

    See `trainctl.launchers.attempts.run_on_this_machine`.
    """
    function: Callable[[LaunchRequest], Outcome] = _launcher_function(plan, "build")
    return function


def check(plan: RunPlan, folder: Path, checkpoint_bytes: int | None) -> list[Finding]:
    """Return what is wrong with the machines, before a run is made in or below the folder."""
    if not spec_of(plan.config.launcher).check:
        return []
    found: list[Finding] = _launcher_function(plan, "check")(plan, folder, checkpoint_bytes)
    return found


def render(start: AttemptRequest) -> RenderedLaunch:
    """Render what would be started for an attempt. Pure."""
    rendered: RenderedLaunch = _launcher_function(start.plan, "render")(start)
    return rendered


def render_next(plan: RunPlan, run: RunPaths) -> RenderedLaunch:
    """Render what a launch of the plan from this shell would start as the next attempt of a run."""
    attempt = run.attempt(last_attempt(run) + 1)
    return render(
        AttemptRequest(
            plan=plan, run=run, attempt=attempt, environment=os.environ, cores=available_cores()
        )
    )


def node_command(request: AttemptRequest) -> AttemptCommand:
    """Return the command of nodes that a controller starts."""
    command: AttemptCommand = _launcher_function(request.plan, "node_command")(request)
    return command


def after_job(run: RunPaths, plan: RunPlan, exit_code: int) -> None:
    """Run the launcher's step after a launch inside a job of its scheduler, if it has one."""
    spec = spec_of(plan.config.launcher)
    if spec.after_job and spec.is_in_job(os.environ):
        _launcher_function(plan, "after_job")(run, plan, exit_code)


def has_scheduler(config: RunConfig) -> bool:
    """Return True if a start only hands the run to a scheduler."""
    return spec_of(config.launcher).hands_over(os.environ)


def _launcher_function(plan: RunPlan, name: str) -> Any:
    return function_of("launcher", plan.config.launcher.kind, name)


def job_state(job: SchedulerJob) -> str | None:
    """Return the state of a job in its scheduler's words; None if the launcher cannot tell.

    Raises:
        TrainctlError: The scheduler cannot be asked (exit code 4).
    """
    return _ask_scheduler(job, "job_state")


def job_log(job: SchedulerJob) -> str | None:
    """Return a job's output where its scheduler keeps it; None if it is in the run's own files.

    Raises:
        TrainctlError: The scheduler cannot be asked (exit code 4).
    """
    return _ask_scheduler(job, "job_log")


def _ask_scheduler(job: SchedulerJob, question: str) -> str | None:
    if not getattr(load_spec("launcher", job.kind), question):
        return None
    return str(function_of("launcher", job.kind, question)(job))


def cancel(job: SchedulerJob) -> None:
    """Remove a job from its queue, or end it; a job that the scheduler does not know has ended.

    Raises:
        TrainctlError: The scheduler's command is missing or fails (exit code 4).
    """
    function_of("launcher", job.kind, "cancel")(job)


def missing_tool(config: RunConfig) -> Iterator[Finding]:
    """Yield a finding if the program that hands the run over is not installed on this machine."""
    spec = spec_of(config.launcher)
    tool = spec.tool_in_job if spec.is_in_job(os.environ) else spec.tool
    if tool and shutil.which(tool) is None:
        yield Finding(
            rule="TC197",
            key="launcher.kind",
            message=f"{tool} is not installed on this machine",
            hint=spec.tool_hint or f"repeat this where {tool} is",
            exit_code=ExitCode.environment,
        )
