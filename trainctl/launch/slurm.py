"""The Slurm launcher: `sbatch` of a script that starts a launcher in the job, which `srun`s agents.

Outside of a job `run_launch` submits and returns. Inside one (the submitted script, or an
allocation that the user already has) it starts one agent on each node and sees them to their end.

Slurm tells of an early end in three ways. A preemption sends SIGTERM to every process of the step,
ranks too, and not to this process; a time limit that comes near (`--signal=B:TERM@N`) to this
process alone; `scancel` to both. The first two save and are requeued, the last saves and ends.
"""

from __future__ import annotations

import math
import os
import re
import shlex
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trainctl.config.schema import Accelerator
from trainctl.errors import ExitCode, Finding, TrainctlError
from trainctl.launch import program
from trainctl.launch.agents import OneProcess
from trainctl.launch.local import require_space
from trainctl.launch.outcome import Outcome
from trainctl.launch.processes import start_tied
from trainctl.launch.rendered import Rendered
from trainctl.launch.schedulers import run_tool
from trainctl.launch.step import cores, run_steps
from trainctl.launch.variables import rank_variables
from trainctl.launch.words import check_options, check_path, check_words
from trainctl.plan.types import RunPlan
from trainctl.runs.command import AttemptCommand, NodeCommand
from trainctl.runs.job import Job, write_job
from trainctl.runs.layout import AttemptPaths, RunPaths
from trainctl.runs.lock import hold
from trainctl.runs.processes import SIGTERM_SAVES_VARIABLE, RunTag
from trainctl.runs.records import Event
from trainctl.runs.status import State, Status, read_status, write_status

SCRIPT = "job.sh"
ARRAY_TASK = "ARRAY-TASK"
"""Stands for the number of a task in the name of a log."""
JOB_VARIABLE = "SLURM_JOB_ID"

_SIGNAL_MARGIN_SECONDS = 15
"""Between the end of `launcher.stop_grace_seconds` and the job's time limit."""
_PORTS = range(20_000, 30_000)
"""Of the rendezvous where `launcher.port` is null: below the ports that a kernel hands out."""


def check(plan: RunPlan, folder: Path, checkpoint_bytes: int | None) -> list[Finding]:
    """What cannot be put into a job script, or is not what sbatch takes."""
    launcher = plan.config.launcher
    words = {
        "slurm_partition": launcher.slurm_partition,
        "slurm_account": launcher.slurm_account,
        "slurm_qos": launcher.slurm_qos,
        "slurm_constraint": launcher.slurm_constraint,
        "slurm_gres": launcher.slurm_gres,
        "slurm_dependency": launcher.slurm_dependency,
        "slurm_container": launcher.slurm_container,
    }
    lists = [("slurm_modules", word) for word in launcher.slurm_modules]
    lists += [("slurm_container_mounts", word) for word in launcher.slurm_container_mounts]
    named = [(f"launcher.{name}", value) for name, value in (*words.items(), *lists)]
    return [
        *check_words(named),
        *check_options("launcher.slurm_options", launcher.slurm_options),
        *check_path(folder.absolute()),
    ]


def render(
    plan: RunPlan,
    run: RunPaths,
    attempt: AttemptPaths,
    *,
    environment: Mapping[str, str],
    cores: int,
    rank_command: Sequence[str] | None = None,
    folder: Path | None = None,
    address: str | None = None,
) -> Rendered:
    """What `run_launch` starts: a job from outside, a step inside an allocation. Pure.

    Args:
        plan: The plan.
        run: The run.
        attempt: The attempt.
        environment: Of the user's shell, or of the job.
        cores: Processors of this machine; those of the job's nodes are taken where known.
        rank_command: Another command line for the ranks, which then needs no corpus prepared.
        folder: Where agents and ranks run; None is where they are started.
        address: Of the first node; None is its name.
    """
    nodes = plan.hardware.nodes
    ranks = plan.mesh.world_size // nodes
    job = environment.get(JOB_VARIABLE)
    hosts = node_names(environment.get("SLURM_JOB_NODELIST", ""))[:nodes]
    own = environment.get("SLURM_CPUS_ON_NODE", "")
    threads = max(1, (int(own) if own.isdecimal() else cores) // ranks)
    variables = rank_variables(plan, attempt, environment, threads=threads)
    if plan.config.trains_itself and plan.config.launcher.stop_grace_seconds > 0:
        variables[SIGTERM_SAVES_VARIABLE] = "1"
    agent = (sys.executable, "-m", "trainctl.agent", str(run.root))
    argv = (*agent, "--attempt", str(attempt.number))
    command = AttemptCommand(
        nodes=tuple(
            NodeCommand(
                node=node,
                host=hosts[node] if hosts else "",
                argv=argv,
                environment=variables,
            )
            for node in range(nodes)
        ),
        ranks_per_node=ranks,
        **program.of_ranks(plan.config, run, attempt, rank_command=rank_command, folder=folder),
        port=plan.config.launcher.port or _port(job),
        address=address or (hosts[0] if hosts else None),
    )
    if job is not None:
        return Rendered(command=command, commands=(_srun(plan, run, attempt, argv),))
    script = attempt.root / SCRIPT
    text = job_script(plan, run, attempt)
    return Rendered(
        command=command, commands=(("sbatch", "--parsable", str(script)),), files={SCRIPT: text}
    )


def job_script(plan: RunPlan, run: RunPaths, attempt: AttemptPaths) -> str:
    """The script of a run's job, for a person to read and for sbatch to take."""
    launch = (sys.executable, "-m", "trainctl.launch", str(run.root))
    lines = [
        "#!/bin/bash",
        *directives(plan, run.root.name, attempt.launcher_log),
        "",
        f"# Attempt {attempt.number} of {shlex.quote(str(run.root))}, or, after a requeue, the",
        "# next one: this starts one agent on each node, saves and requeues when Slurm wants it.",
        *modules(plan),
        f"exec {shlex.join((*launch, '--attempt', str(attempt.number)))}",
    ]
    return "\n".join(lines) + "\n"


def array_script(plan: RunPlan, folder: Path, *, count: int, parallel: int | None) -> str:
    """The script of a sweep: an array whose task K runs the run `folder/K`.

    Args:
        plan: What every task asks for.
        folder: Of the sweep.
        count: How many runs it has.
        parallel: How many of them run at a time; None leaves it to the cluster.
    """
    limit = f"%{parallel}" if parallel is not None else ""
    log = RunPaths(folder / ARRAY_TASK).attempt(1).launcher_log
    run = f'{shlex.quote(str(folder))}/"$SLURM_ARRAY_TASK_ID"'
    launch = f"{shlex.quote(sys.executable)} -m trainctl.launch {run} --attempt 1"
    lines = [
        "#!/bin/bash",
        *directives(plan, folder.name, log, array=f"0-{count - 1}{limit}"),
        "",
        "# Task K trains the run K of this folder; see sweep.json for its values.",
        *modules(plan),
        f"exec {launch}",
    ]
    return "\n".join(lines) + "\n"


def submit_array(folder: Path, attempts: Sequence[tuple[RunPaths, AttemptPaths]]) -> str:
    """Submit the array of a sweep, whose script is in its folder; the array's job id.

    Raises:
        TrainctlError: Slurm refuses it (exit code 4).
    """
    now = time.time()
    for run, attempt in attempts:
        _write_queued(run, attempt, now)
    try:
        job = run_tool(("sbatch", "--parsable", str(folder / SCRIPT))).strip().partition(";")[0]
    except TrainctlError as error:
        for run, _ in attempts:
            _set_status(run, State.failed, int(error.exit_code), error.message)
        raise
    for index, (_, attempt) in enumerate(attempts):
        record = Job(kind="slurm", id=f"{job}_{index}", submitted=now, host=socket.gethostname())
        write_job(attempt, record)
    return job


def directives(plan: RunPlan, name: str, log: Path, *, array: str = "") -> Iterator[str]:
    """The `#SBATCH` lines.

    Args:
        plan: What to ask for.
        name: Name of the run.
        log: Output of the job; in an array `ARRAY_TASK` in it stands for the task's number.
        array: Indices of an array's tasks, such as `0-3%2`.
    """
    launcher, hardware = plan.config.launcher, plan.hardware
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
        ("partition", launcher.slurm_partition),
        ("account", launcher.slurm_account),
        ("qos", launcher.slurm_qos),
        ("constraint", launcher.slurm_constraint),
        ("time", launcher.slurm_time_minutes),
        ("dependency", launcher.slurm_dependency),
        ("array", array or None),
    ]
    pattern = str(log).replace("%", "%%")
    options.append(("output", pattern.replace(ARRAY_TASK, "%a") if array else pattern))
    for option, value in options:
        if value is not None:
            yield f"#SBATCH --{option}={_quoted(str(value))}"
    if launcher.slurm_cpus_per_node is None:
        yield "#SBATCH --exclusive"
    yield "#SBATCH --open-mode=append"
    yield f"#SBATCH --{'requeue' if launcher.slurm_requeue else 'no-requeue'}"
    if launcher.stop_grace_seconds > 0:
        lead = math.ceil(launcher.stop_grace_seconds) + _SIGNAL_MARGIN_SECONDS
        yield f"#SBATCH --signal=B:TERM@{lead}"
    yield from (f"#SBATCH {option}" for option in launcher.slurm_options)


def modules(plan: RunPlan) -> Iterator[str]:
    """Lines that load the modules. After them the launcher takes the shell's place: Slurm signals
    the process that it started."""
    for module in plan.config.launcher.slurm_modules:
        yield f"module load {shlex.quote(module)} || exit {int(ExitCode.environment)}"


def _quoted(value: str) -> str:
    """A value as sbatch reads it from a script: it knows quotes and backslashes, and no more."""
    if re.fullmatch(r"[A-Za-z0-9_.,:;+@%/=&|*()\[\]?!~^-]+", value):
        return value
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def _srun(
    plan: RunPlan, run: RunPaths, attempt: AttemptPaths, agent: tuple[str, ...]
) -> tuple[str, ...]:
    launcher, nodes = plan.config.launcher, plan.hardware.nodes
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
    """The names in Slurm's list of nodes, such as `gpu[01-03,7],login`.

    >>> node_names("a[08-10,12]-x,b")
    ['a08-x', 'a09-x', 'a10-x', 'a12-x', 'b']
    """
    names = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", listed):
        expanded = [""]
        for text, ranges in re.findall(r"([^\[]+)|\[([^\]]*)\]", part):
            ends = [text] if text else [name for item in ranges.split(",") for name in _range(item)]
            expanded = [start + end for start in expanded for end in ends]
        names += expanded
    return names


def _range(item: str) -> list[str]:
    first, _, last = item.partition("-")
    if not last:
        return [first]
    return [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]


def _port(job: str | None) -> int:
    """A port that two jobs on one node hardly share."""
    digits = re.sub(r"\D", "", job or "0")
    return _PORTS[int(digits or "0") % len(_PORTS)]


def run_launch(
    run: RunPaths,
    attempt: AttemptPaths,
    plan: RunPlan,
    on_event: Callable[[Event], None],
    *,
    rank_command: Sequence[str] | None = None,
    checkpoint_bytes: int | None = None,
) -> Outcome:
    """Submit the attempt, or, inside a job, run it and those that replace it to their end.

    Args: As those of `trainctl.launch.local.run_launch`.

    Raises:
        TrainctlError: The run is in use (5), Slurm refuses the job or the allocation has too few
            nodes (4), or its disk has no space for a checkpoint (4).
    """
    if checkpoint_bytes is not None:
        require_space(run.root, checkpoint_bytes)
    if JOB_VARIABLE not in os.environ:
        return _submit(run, attempt, plan, rank_command)
    names = node_names(os.environ.get("SLURM_JOB_NODELIST", ""))
    if len(names) < plan.hardware.nodes:
        raise TrainctlError(
            f"the allocation (job {os.environ[JOB_VARIABLE]}) has {len(names)} nodes, "
            f"and the plan is for {plan.hardware.nodes}",
            hint=f"hardware.nodes={len(names)}, or a larger allocation",
            exit_code=ExitCode.environment,
        )
    address = _address(names[0]) if plan.hardware.nodes > 1 else None
    ended = run_steps(
        run,
        attempt,
        plan,
        on_event,
        render=lambda attempt, plan: render(
            plan,
            run,
            attempt,
            environment=os.environ,
            cores=cores(),
            rank_command=rank_command,
            folder=program.folder(plan.config, run),
            address=address,
        ),
        start=_start,
    )
    outcome = ended.outcome
    if outcome.exit_code == ExitCode.requeue and ended.is_cancelled:
        outcome = replace(outcome, exit_code=int(ExitCode.terminated))
        _set_status(run, outcome.state, outcome.exit_code, outcome.message)
    return outcome


def _start(rendered: Rendered, attempt: AttemptPaths, tag: RunTag, lock: int) -> OneProcess:
    log = attempt.logs / "srun.log"
    process = start_tied(
        rendered.commands[0],
        tag=tag,
        environment=rendered.command.nodes[0].environment,
        log=log,
        lock=lock,
        death_signal=signal.SIGHUP,
    )
    return Step(process, log, "srun")


@dataclass(frozen=True, slots=True)
class Step(OneProcess):
    """`srun`. Its agents would take SIGTERM for a preemption, so another signal ends them."""

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGHUP)


def requeue(run: RunPaths) -> None:
    """Put this job into its queue again; Slurm ends this process.

    Raises:
        TrainctlError: Slurm refuses (exit code 4).
    """
    job = os.environ[JOB_VARIABLE]
    _set_status(run, State.queued, None, f"job {job} is requeued")
    run_tool(("scontrol", "requeue", job))


def _submit(
    run: RunPaths, attempt: AttemptPaths, plan: RunPlan, rank_command: Sequence[str] | None
) -> Outcome:
    rendered = render(
        plan,
        run,
        attempt,
        environment=os.environ,
        cores=cores(),
        rank_command=rank_command,
        folder=program.folder(plan.config, run),
    )
    with hold(run):
        rendered.write(attempt)
        return submit(run, attempt, rendered.commands[0])


def submit(run: RunPaths, attempt: AttemptPaths, command: Sequence[str]) -> Outcome:
    """Submit a job and record it in the attempt.

    Raises:
        TrainctlError: Slurm refuses it (exit code 4).
    """
    now = time.time()
    # Before the job is there: its own launcher writes the next state.
    _write_queued(run, attempt, now)
    try:
        job = run_tool(command).strip().partition(";")[0]
    except TrainctlError as error:
        _set_status(run, State.failed, int(error.exit_code), error.message)
        raise
    write_job(attempt, Job(kind="slurm", id=job, submitted=now, host=socket.gethostname()))
    return Outcome(exit_code=0, state=State.queued, message=f"job {job} is submitted")


def _write_queued(run: RunPaths, attempt: AttemptPaths, now: float) -> None:
    status = Status(
        state=State.queued,
        attempt=attempt.number,
        host=socket.gethostname(),
        pid=os.getpid(),
        started=now,
        updated=now,
    )
    write_status(run, status)


def _set_status(run: RunPaths, state: State, exit_code: int | None, message: str) -> None:
    status = read_status(run)
    if status is not None:
        write_status(run, status.changed(state, exit_code=exit_code, message=message))


def _address(name: str) -> str:
    """Where Slurm itself reaches a node: its name need not resolve."""
    shown = run_tool(("scontrol", "show", "node", "--oneliner", name))
    found = re.search(r"\bNodeAddr=(\S+)", shown)
    return found[1] if found else name
