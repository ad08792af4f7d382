"""The MPI launcher: `mpirun` starts one agent on each node. MPI itself is not used by the ranks."""

from __future__ import annotations

import math
import os
import shutil
import signal
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from trainctl.config.schema import MpiFlavor
from trainctl.errors import ExitCode, Finding
from trainctl.launch import program
from trainctl.launch.agents import OneProcess
from trainctl.launch.local import require_space
from trainctl.launch.outcome import Outcome
from trainctl.launch.processes import start_tied
from trainctl.launch.rendered import Rendered
from trainctl.launch.step import cores as own_cores
from trainctl.launch.step import run_steps
from trainctl.launch.variables import rank_variables
from trainctl.launch.words import check_words
from trainctl.plan.types import RunPlan
from trainctl.runs.command import AttemptCommand, NodeCommand
from trainctl.runs.layout import AttemptPaths, RunPaths
from trainctl.runs.processes import RunTag
from trainctl.runs.records import Event

NO_PROGRAM, FEW_HOSTS = "TC162", "TC163"


def check(plan: RunPlan, folder: Path, checkpoint_bytes: int | None) -> list[Finding]:
    """Whether mpirun is here, and its hostfile names enough hosts."""
    launcher, nodes = plan.config.launcher, plan.hardware.nodes
    findings = []
    if shutil.which(launcher.mpi_program) is None:
        findings.append(
            Finding(
                rule=NO_PROGRAM,
                key="launcher.mpi_program",
                message=f"there is no program {launcher.mpi_program!r} on this machine",
                hint="install Open MPI or MPICH, load its module, or name its path",
                exit_code=ExitCode.environment,
            )
        )
    if launcher.mpi_hostfile is not None:
        path = Path(launcher.mpi_hostfile)
        if not path.is_file():
            message = f"there is no file {path}"
            return [
                *findings,
                Finding(rule=FEW_HOSTS, key="launcher.mpi_hostfile", message=message),
            ]
        names = hosts_in(path.read_text(encoding="utf-8", errors="replace"))
        findings += check_words((f"{path}", name) for name in names)
        if len(names) < nodes:
            findings.append(
                Finding(
                    rule=FEW_HOSTS,
                    key="launcher.mpi_hostfile",
                    message=f"{path} names {len(names)} hosts, and the plan is for {nodes}",
                    hint=f"name {nodes} hosts, or hardware.nodes={len(names)}",
                )
            )
    return findings


def hosts_in(text: str) -> list[str]:
    """The hosts of a hostfile: `HOST slots=N` of Open MPI, `HOST:N` of MPICH."""
    lines = (line.partition("#")[0].split() for line in text.splitlines())
    names = [words[0].rpartition("@")[2] for words in lines if words]
    return [name.partition(":")[0] if name.count(":") == 1 else name for name in names]


def render(
    plan: RunPlan,
    run: RunPaths,
    attempt: AttemptPaths,
    *,
    environment: Mapping[str, str],
    cores: int,
    rank_command: Sequence[str] | None = None,
    folder: Path | None = None,
    hosts: Sequence[str] = (),
) -> Rendered:
    """What `run_launch` starts. Pure.

    Args:
        plan: The plan.
        run: The run.
        attempt: The attempt.
        environment: Of the user's shell; of it `launcher.forward_environment` is taken.
        cores: Processors of this machine, taken for those of each.
        rank_command: Another command line for the ranks, which then needs no corpus prepared.
        folder: Where agents and ranks run; None is where they are started.
        hosts: Of the hostfile; where a scheduler knows them, this machine is the first.
    """
    nodes = plan.hardware.nodes
    ranks = plan.mesh.world_size // nodes
    variables = rank_variables(plan, attempt, environment, threads=max(1, cores // ranks))
    number = ("--attempt", str(attempt.number))
    argv = (sys.executable, "-m", "trainctl.agent", str(run.root), *number)
    names = (*hosts[:nodes], *[""] * (nodes - len(hosts))) if hosts else ("",) * nodes
    command = AttemptCommand(
        nodes=tuple(
            NodeCommand(node=node, host=names[node], argv=argv, environment=variables)
            for node in range(nodes)
        ),
        ranks_per_node=ranks,
        **program.of_ranks(plan.config, run, attempt, rank_command=rank_command, folder=folder),
        port=plan.config.launcher.port,
        address=(names[0] or socket.gethostname()) if nodes > 1 else None,
    )
    return Rendered(command=command, commands=((*_mpirun(plan, variables), *argv),))


def _mpirun(plan: RunPlan, variables: Mapping[str, str]) -> list[str]:
    """The part before the agent's command. Values of variables are not in it, only their names."""
    launcher, nodes = plan.config.launcher, str(plan.hardware.nodes)
    hostfile = launcher.mpi_hostfile
    if launcher.mpi_flavor is MpiFlavor.mpich:
        argv = [launcher.mpi_program, "-n", nodes, "-ppn", "1", "-prepend-rank"]
        argv += ["-f", hostfile] if hostfile is not None else []
        argv += ["-genvlist", ",".join(variables)]
    else:
        # An agent has its own grace to end its ranks in.
        patience = str(math.ceil(launcher.grace_seconds) + 2)
        argv = [launcher.mpi_program, "-n", nodes, "--map-by", "ppr:1:node", "--bind-to", "none"]
        argv += ["--tag-output", "--mca", "odls_base_sigkill_timeout", patience]
        argv += ["--hostfile", hostfile] if hostfile is not None else []
        for name in variables:
            argv += ["-x", name]
    return [*argv, *launcher.mpi_options]


def run_launch(
    run: RunPaths,
    attempt: AttemptPaths,
    plan: RunPlan,
    on_event: Callable[[Event], None],
    *,
    rank_command: Sequence[str] | None = None,
    checkpoint_bytes: int | None = None,
) -> Outcome:
    """Start mpirun and see the attempt, and those that replace it when it fails, to the end.

    Args: As those of `trainctl.launch.local.run_launch`.

    Raises:
        TrainctlError: The run is in use (5), or its disk has no space for a checkpoint (4).
    """
    if checkpoint_bytes is not None:
        require_space(run.root, checkpoint_bytes)
    hostfile = plan.config.launcher.mpi_hostfile
    hosts = hosts_in(Path(hostfile).read_text(encoding="utf-8")) if hostfile is not None else []
    return run_steps(
        run,
        attempt,
        plan,
        on_event,
        render=lambda attempt, plan: render(
            plan,
            run,
            attempt,
            environment=os.environ,
            cores=own_cores(),
            rank_command=rank_command,
            folder=program.folder(plan.config, run),
            hosts=hosts,
        ),
        start=_start,
    ).outcome


def _start(rendered: Rendered, attempt: AttemptPaths, tag: RunTag, lock: int) -> OneProcess:
    log = attempt.logs / "mpirun.log"
    process = start_tied(
        rendered.commands[0],
        tag=tag,
        environment=rendered.command.nodes[0].environment,
        log=log,
        lock=lock,
        death_signal=signal.SIGTERM,
    )
    return OneProcess(process, log, "mpirun")
