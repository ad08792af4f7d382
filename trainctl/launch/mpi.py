"""The MPI launcher: `mpirun` starts one agent on each node. MPI itself is not used by the ranks."""

from __future__ import annotations

import math
import shutil
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from trainctl.config.hosts import HOST_NAME_HINT, is_host_name
from trainctl.config.schema import RunConfig
from trainctl.errors import ExitCode, Finding
from trainctl.hardware import Hardware
from trainctl.launch import program
from trainctl.launch.agents import OneProcess
from trainctl.launch.local import require_space
from trainctl.launch.order import Launch, Start
from trainctl.launch.outcome import Outcome
from trainctl.launch.processes import start_tied
from trainctl.launch.rendered import Rendered
from trainctl.launch.step import run_steps
from trainctl.launch.variables import rank_variables
from trainctl.launch.words import UNSAFE_WORD
from trainctl.options.launcher import section_of
from trainctl.options.launcher.mpi import MpiConfig, MpiFlavor
from trainctl.plan.types import RunPlan
from trainctl.runs.command import AttemptCommand, NodeCommand
from trainctl.runs.layout import AttemptPaths
from trainctl.runs.processes import RunTag

NO_PROGRAM, FEW_HOSTS = "TC162", "TC163"


def check(plan: RunPlan, folder: Path, checkpoint_bytes: int | None) -> list[Finding]:
    """Whether mpirun is here, and its hostfile names enough hosts."""
    launcher = section_of(plan.config, MpiConfig)
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
    return [*findings, *check_config(plan.config, plan.hardware)]


def check_config(config: RunConfig, hardware: Hardware) -> list[Finding]:
    """Whether the hostfile names enough hosts, and nothing else."""
    launcher, nodes = section_of(config, MpiConfig), hardware.nodes
    findings: list[Finding] = []
    if launcher.mpi_hostfile is not None:
        path = Path(launcher.mpi_hostfile)
        if not path.is_file():
            message = f"there is no file {path}"
            return [Finding(rule=FEW_HOSTS, key="launcher.mpi_hostfile", message=message)]
        names = _named(path.read_text(encoding="utf-8", errors="replace"))
        findings += [
            Finding(
                rule=UNSAFE_WORD,
                key="launcher.mpi_hostfile",
                message=f"{path}: {name!r} is not a host name",
                hint=HOST_NAME_HINT,
            )
            for name in names
            if not is_host_name(name.strip("[]"))
        ]
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
    return [name.rpartition("@")[2] for name in _named(text)]


def _named(text: str) -> list[str]:
    """The same, each with its user if the file has one."""
    lines = (line.partition("#")[0].split() for line in text.splitlines())
    names = [words[0] for words in lines if words]
    return [name.partition(":")[0] if name.count(":") == 1 else name for name in names]


def render(start: Start, *, hosts: Sequence[str] = ()) -> Rendered:
    """What `run_launch` starts. Pure.

    Args:
        start: What the attempt is started from.
        hosts: Of the hostfile; where a scheduler knows them, this machine is the first.
    """
    plan, nodes = start.plan, start.plan.hardware.nodes
    variables = rank_variables(plan, start.attempt, start.environment, threads=start.threads)
    number = ("--attempt", str(start.attempt.number))
    argv = (sys.executable, "-m", "trainctl.agent", str(start.run.root), *number)
    names = (*hosts[:nodes], *[""] * (nodes - len(hosts))) if hosts else ("",) * nodes
    command = AttemptCommand(
        nodes=tuple(
            NodeCommand(node=node, host=names[node], argv=argv, environment=variables)
            for node in range(nodes)
        ),
        ranks_per_node=start.ranks_per_node,
        **program.of_ranks(start),
        port=plan.config.launcher.port,
        address=(names[0] or socket.gethostname()) if nodes > 1 else None,
    )
    return Rendered(command=command, commands=((*_mpirun(plan, variables), *argv),))


def _mpirun(plan: RunPlan, variables: Mapping[str, str]) -> list[str]:
    """The part before the agent's command. Values of variables are not in it, only their names."""
    launcher, nodes = section_of(plan.config, MpiConfig), str(plan.hardware.nodes)
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


def run_launch(launch: Launch) -> Outcome:
    """Start mpirun and see the attempt, and those that replace it when it fails, to the end.

    Raises:
        TrainctlError: The run is in use (5), or its disk has no space for a checkpoint (4).
    """
    if launch.checkpoint_bytes is not None:
        require_space(launch.run.root, launch.checkpoint_bytes)
    hostfile = section_of(launch.plan.config, MpiConfig).mpi_hostfile
    hosts = hosts_in(Path(hostfile).read_text(encoding="utf-8")) if hostfile is not None else []
    return run_steps(launch, render=partial(render, hosts=hosts), start=_start).outcome


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
