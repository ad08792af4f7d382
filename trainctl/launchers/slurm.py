"""The Slurm launcher: `sbatch` of a script that starts a launcher in the job, which `srun`s agents.

Outside of a job, `run_launch` submits and returns. Inside one (the submitted script, or an
allocation that the user already has) it starts one agent on each node and runs them to their end.

Slurm announces an early end in three ways. A preemption sends SIGTERM to every process of the step,
the ranks included, but not to this process. A time limit that comes near (`--signal=B:TERM@N`)
sends it to this process alone; `scancel` sends it to both. The first two save and requeue, the last
saves and ends.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from trainctl.config.schema import Accelerator
from trainctl.errors import ExitCode, Finding, MachineError, TrainctlError
from trainctl.launchers.attempts import (
    AgentProcess,
    end_as_cancelled,
    require_space,
    run_attempts,
    start_program,
)
from trainctl.launchers.config_checks import check_path, check_slurm
from trainctl.launchers.interface import (
    AttemptRequest,
    LaunchRequest,
    Outcome,
    RenderedLaunch,
    submit,
    submit_attempt,
)
from trainctl.launchers.rank_command import attempt_command, scheduled_rank_variables
from trainctl.options.launcher import section_of
from trainctl.options.launcher.slurm import JOB_VARIABLE, SlurmConfig, shared_options
from trainctl.plans.types import RunPlan
from trainctl.runs.files import write_text
from trainctl.runs.layout import AttemptPaths, RunPaths
from trainctl.runs.processes import run_tool
from trainctl.runs.status import SchedulerJob, State, change_status

_PORTS = range(20_000, 30_000)
"""Ports of the rendezvous where `launcher.port` is null: below the kernel's ephemeral ports."""

SCRIPT = "job.sh"
ARRAY_TASK = "ARRAY-TASK"
"""Placeholder of the task's number in the name of a log."""
_SIGNAL_MARGIN_SECONDS = 15
"""Time between the end of `launcher.stop_grace_seconds` and the job's time limit."""


def check(plan: RunPlan, folder: Path, checkpoint_bytes: int | None) -> list[Finding]:
    """Return a finding for each value that a job script cannot hold, or that sbatch refuses."""
    return [*check_slurm(plan.config, plan.hardware), *check_path(folder.absolute())]


def render(request: AttemptRequest, *, address: str | None = None) -> RenderedLaunch:
    """Render what `run_launch` starts: `sbatch` from outside, `srun` in an allocation. Pure.

    Args:
        request: The job's own number of cores replaces its `cores` where known.
        address: Address of the first node; None is its name.
    """
    plan, attempt, environment = request.plan, request.attempt, request.environment
    nodes = plan.hardware.nodes
    job = environment.get(JOB_VARIABLE)
    hosts = node_names(environment.get("SLURM_JOB_NODELIST", ""))[:nodes]
    own = environment.get("SLURM_CPUS_ON_NODE", "")
    variables = scheduled_rank_variables(
        replace(request, cores=int(own)) if own.isdecimal() else request
    )
    command = attempt_command(
        request,
        hosts or [""] * nodes,
        [variables] * nodes,
        is_numbered=False,
        port=plan.config.launcher.port or _job_port(job),
        address=address or (hosts[0] if hosts else None),
    )
    if job is not None:
        return RenderedLaunch(
            command=command, commands=(_srun_command(request, command.nodes[0].argv),)
        )
    script = attempt.root / SCRIPT
    text = job_script(plan, request.run, attempt)
    return RenderedLaunch(
        command=command, commands=(("sbatch", "--parsable", str(script)),), files={SCRIPT: text}
    )


def submit_sweep(
    folder: Path,
    plan: RunPlan,
    attempts: Sequence[tuple[RunPaths, AttemptPaths]],
    parallel: int | None,
) -> str:
    """Submit a sweep as a job array, with the script in its folder; return the array's job id.

    Args:
        plan: Plan with the resources of every task.
        attempts: The sweep's runs, named by their numbers, and the attempt of each.
        parallel: Largest number of tasks at a time; None leaves it to the cluster.

    Raises:
        TrainctlError: Slurm refuses it (exit code 4).
    """
    tasks = [int(run.root.name) for run, _ in attempts]
    write_text(folder / SCRIPT, array_script(plan, folder, tasks=tasks, parallel=parallel))
    output = submit(
        partial(run_tool, ("sbatch", "--parsable", str(folder / SCRIPT))),
        attempts,
        kind="slurm",
        job_id=lambda run, output: f"{_parse_job_id(output)}_{run.root.name}",
    )
    return _parse_job_id(output)


def _parse_job_id(output: str) -> str:
    """Return the job id in the output of `sbatch --parsable`, which may name the cluster too."""
    return output.strip().partition(";")[0]


def _srun_command(request: AttemptRequest, agent: tuple[str, ...]) -> tuple[str, ...]:
    plan, run, attempt = request.plan, request.run, request.attempt
    launcher, nodes = section_of(plan.config, SlurmConfig), plan.hardware.nodes
    container: list[str] = []
    if launcher.slurm_container is not None:
        mounts = ",".join((f"{run.root}:{run.root}", *launcher.slurm_container_mounts))
        container = [
            f"--container-image={launcher.slurm_container}",
            f"--container-mounts={mounts}",
        ]
    log = str(attempt.logs).replace("%", "%%")
    return (
        "srun",
        f"--nodes={nodes}",
        f"--ntasks={nodes}",
        "--ntasks-per-node=1",
        *([f"--cpus-per-task={n}"] if (n := launcher.slurm_cpus_per_node) else []),
        "--export=ALL",
        "--mpi=none",
        "--input=none",
        "--kill-on-bad-exit=1",
        "--open-mode=append",
        f"--output={log}/agent-%t.log",
        *container,
        *agent,
    )


def node_names(listed: str) -> list[str]:
    """Return the names in Slurm's list of nodes, such as `gpu[01-03,7],login`.

    >>> node_names("a[08-10,12]-x,b")
    ['a08-x', 'a09-x', 'a10-x', 'a12-x', 'b']
    """
    names = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", listed):
        expanded = [""]
        for text, ranges in re.findall(r"([^\[]+)|\[([^\]]*)\]", part):
            ends = (
                [text]
                if text
                else [name for item in ranges.split(",") for name in _expand_range(item)]
            )
            expanded = [start + end for start in expanded for end in ends]
        names += expanded
    return names


def _expand_range(item: str) -> list[str]:
    first, _, last = item.partition("-")
    if not last:
        return [first]
    return [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]


def _job_port(job: str | None) -> int:
    """Return a port that two jobs on one node rarely share."""
    digits = re.sub(r"\D", "", job or "0")
    return _PORTS[int(digits or "0") % len(_PORTS)]


def run_launch(launch: LaunchRequest) -> Outcome:
    """Submit the attempt, or, inside a job, run it and those that replace it to their end.

    Raises:
        TrainctlError: The run is in use (5), Slurm refuses the job or the allocation has too few
            nodes (4), or its disk has no space for a checkpoint (4).
    """
    run, plan = launch.run, launch.plan
    require_space(run.root, launch.checkpoint_bytes)
    if JOB_VARIABLE not in os.environ:
        rendered = render(launch.attempt_request(launch.attempt, plan))
        return submit_attempt(launch, rendered, job_id=_parse_job_id)
    names = node_names(os.environ.get("SLURM_JOB_NODELIST", ""))
    if len(names) < plan.hardware.nodes:
        raise MachineError(
            f"the allocation (job {os.environ[JOB_VARIABLE]}) has {len(names)} nodes, "
            f"and the plan is for {plan.hardware.nodes}",
            hint=f"hardware.nodes={len(names)}, or a larger allocation",
        )
    address = _node_address(names[0]) if plan.hardware.nodes > 1 else None
    start = partial(start_program, name="srun", death_signal=signal.SIGHUP, agents=SrunStep)
    outcome = run_attempts(launch, render=partial(render, address=address), start=start)
    return end_as_cancelled(run, outcome) if outcome.is_cancelled else outcome


@dataclass(frozen=True, slots=True)
class SrunStep(AgentProcess):
    """The `srun` process. Its agents take SIGTERM for a preemption, so SIGHUP ends them."""

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGHUP)


def after_job(run: RunPaths, plan: RunPlan, exit_code: int) -> None:
    """Requeue this job if it was interrupted and `launcher.slurm_requeue` allows it.

    Raises:
        TrainctlError: Slurm refuses (exit code 4).
    """
    if not section_of(plan.config, SlurmConfig).slurm_requeue:
        return
    # The exit code of a user's program does not tell why it ended.
    is_own = not plan.config.trains_itself
    if is_preempted() if is_own else exit_code == ExitCode.requeue:
        requeue(run)


def cancel(job: SchedulerJob) -> None:
    """Remove a job from its queue, or end it; a job that Slurm does not know has ended.

    Raises:
        TrainctlError: `scancel` is missing or fails (exit code 4).
    """
    try:
        run_tool(("scancel", "--", job.id))
    except TrainctlError as error:
        # Slurm forgets a job some minutes after its end (MinJobAge).
        if "Invalid job id" not in error.message:
            raise


def requeue(run: RunPaths) -> None:
    """Requeue this job; Slurm ends this process.

    Raises:
        TrainctlError: Slurm refuses (exit code 4).
    """
    job = os.environ[JOB_VARIABLE]
    change_status(run, State.queued, None, f"job {job} is requeued")
    run_tool(("scontrol", "requeue", job))


def is_preempted() -> bool:
    """Return True if Slurm reports a preemption of this job; False if Slurm does not answer."""
    with suppress(TrainctlError):
        shown = run_tool(("scontrol", "show", "job", "--oneliner", os.environ[JOB_VARIABLE]))
        return re.search(r"\bPreemptTime=(?!None)", shown) is not None
    return False


def _node_address(name: str) -> str:
    """Return Slurm's own address of a node: the node's name need not resolve."""
    shown = run_tool(("scontrol", "show", "node", "--oneliner", name))
    found = re.search(r"\bNodeAddr=(\S+)", shown)
    return found[1] if found else name


def job_script(plan: RunPlan, run: RunPaths, attempt: AttemptPaths) -> str:
    """Return the `sbatch` script of a run's job."""
    launch = (sys.executable, "-P", "-m", "trainctl.launchers", str(run.root))
    lines = [
        "#!/bin/bash",
        *_sbatch_lines(plan, run.root.name, attempt.launcher_log),
        "",
        f"# Attempt {attempt.number} of {shlex.quote(str(run.root))}, or, after a requeue, the",
        "# next one: this starts one agent on each node, saves and requeues when Slurm wants it.",
        *_module_lines(plan),
        f"exec {shlex.join((*launch, '--attempt', str(attempt.number)))}",
    ]
    return "\n".join(lines) + "\n"


def array_script(plan: RunPlan, folder: Path, *, tasks: Sequence[int], parallel: int | None) -> str:
    """Return the script of a sweep: an array whose task K runs the run `folder/K`.

    Args:
        plan: Plan with the resources of every task.
        tasks: Numbers of the runs to start; each continues its newest attempt.
        parallel: Largest number of tasks at a time; None leaves it to the cluster.
    """
    limit = f"%{parallel}" if parallel is not None else ""
    log = RunPaths(folder / ARRAY_TASK).attempt(1).launcher_log
    run = f'{shlex.quote(str(folder))}/"$SLURM_ARRAY_TASK_ID"'
    launch = f"{shlex.quote(sys.executable)} -P -m trainctl.launchers {run}"
    is_whole = list(tasks) == list(range(len(tasks)))
    indices = f"0-{len(tasks) - 1}" if is_whole else ",".join(map(str, tasks))
    lines = [
        "#!/bin/bash",
        *_sbatch_lines(plan, folder.name, log, array=f"{indices}{limit}"),
        "",
        "# Task K trains the run K of this folder; see sweep.json for its values.",
        *_module_lines(plan),
        f"exec {launch}",
    ]
    return "\n".join(lines) + "\n"


def _sbatch_lines(plan: RunPlan, name: str, log: Path, *, array: str = "") -> Iterator[str]:
    """Yield the `#SBATCH` lines.

    Args:
        log: Output of the job; in an array, `ARRAY_TASK` in it stands for the task's number.
        array: Indices of an array's tasks, such as `0-3%2`.
    """
    launcher, hardware = section_of(plan.config, SlurmConfig), plan.hardware
    options: list[tuple[str, object]] = [
        ("job-name", "trainctl-" + re.sub(r"[^A-Za-z0-9._-]+", "-", name)),
        ("nodes", hardware.nodes),
        ("ntasks-per-node", 1),
    ]
    if launcher.slurm_gres is not None:
        options.append(("gres", launcher.slurm_gres))
    elif hardware.accelerator is not Accelerator.cpu:
        options.append(("gpus-per-node", hardware.devices_per_node))
    if launcher.slurm_cpus_per_node is not None:
        options.append(("cpus-per-task", launcher.slurm_cpus_per_node))
    options += [
        *shared_options(launcher).items(),
        ("dependency", launcher.slurm_dependency),
        ("array", array or None),
    ]
    pattern = str(log).replace("%", "%%")
    options.append(("output", pattern.replace(ARRAY_TASK, "%a") if array else pattern))
    for option, value in options:
        if value is not None:
            yield f"#SBATCH --{option}={_quote(str(value))}"
    if launcher.slurm_cpus_per_node is None:
        yield "#SBATCH --exclusive"
    yield "#SBATCH --open-mode=append"
    yield f"#SBATCH --{'requeue' if launcher.slurm_requeue else 'no-requeue'}"
    # A user's program gets Slurm's own SIGTERM, and has KillWait to save.
    if plan.config.trains_itself and launcher.stop_grace_seconds > 0:
        lead = math.ceil(launcher.stop_grace_seconds) + _SIGNAL_MARGIN_SECONDS
        yield f"#SBATCH --signal=B:TERM@{lead}"
    yield from (f"#SBATCH {option}" for option in launcher.slurm_options)


def _module_lines(plan: RunPlan) -> Iterator[str]:
    """Yield lines that load the modules.

    The launcher must replace the shell after them: Slurm signals the process that it started.
    """
    for module in section_of(plan.config, SlurmConfig).slurm_modules:
        yield f"module load {shlex.quote(module)} || exit {int(ExitCode.environment)}"


def _quote(value: str) -> str:
    """Return a value quoted for an `#SBATCH` line: sbatch knows quotes and backslashes only."""
    if re.fullmatch(r"[A-Za-z0-9_.,:;+@%/=&|*()\[\]?!~^-]+", value):
        return value
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
