"""The MPI launcher: `mpirun` starts one agent on each node. MPI itself is not used by the ranks."""

from __future__ import annotations

import math
import shutil
import signal
import socket
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from trainctl.errors import ExitCode, Finding
from trainctl.launchers.attempts import require_space, run_attempts, start_program
from trainctl.launchers.config_checks import check_mpi, hosts_in
from trainctl.launchers.interface import AttemptRequest, LaunchRequest, Outcome, RenderedLaunch
from trainctl.launchers.rank_command import attempt_command, rank_variables
from trainctl.options.launcher import section_of
from trainctl.options.launcher.mpi import MpiConfig, MpiFlavor
from trainctl.plans.types import RunPlan

NO_PROGRAM = "TC162"


def check(plan: RunPlan, folder: Path, checkpoint_bytes: int | None) -> list[Finding]:
    """Return a finding if mpirun is missing, or its hostfile names too few hosts."""
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
    return [*findings, *check_mpi(plan.config, plan.hardware)]


def render(request: AttemptRequest, *, hosts: Sequence[str] = ()) -> RenderedLaunch:
    """Render the commands that `run_launch` starts. Pure.

    Args:
        hosts: Hosts of the hostfile; empty where a scheduler knows them, this machine being the
            first.
    """
    plan, nodes = request.plan, request.plan.hardware.nodes
    variables = rank_variables(request)
    names = (*hosts[:nodes], *[""] * (nodes - len(hosts))) if hosts else ("",) * nodes
    command = attempt_command(
        request,
        names,
        [variables] * nodes,
        is_numbered=False,
        port=plan.config.launcher.port,
        address=(names[0] or socket.gethostname()) if nodes > 1 else None,
    )
    agent = command.nodes[0].argv
    return RenderedLaunch(command=command, commands=((*_mpirun_command(plan, variables), *agent),))


def _mpirun_command(plan: RunPlan, variables: Mapping[str, str]) -> list[str]:
    """Return mpirun's part of the command line, before the agent's command.

    It has only the names of variables, not their values.
    """
    launcher, nodes = section_of(plan.config, MpiConfig), str(plan.hardware.nodes)
    hostfile = launcher.mpi_hostfile
    if launcher.mpi_flavor is MpiFlavor.mpich:
        argv = [launcher.mpi_program, "-n", nodes, "-ppn", "1", "-prepend-rank"]
        argv += ["-f", hostfile] if hostfile is not None else []
        argv += ["-genvlist", ",".join(variables)]
    else:
        # Leave an agent its own grace to end its ranks.
        patience = str(math.ceil(launcher.grace_seconds) + 2)
        argv = [launcher.mpi_program, "-n", nodes, "--map-by", "ppr:1:node", "--bind-to", "none"]
        argv += ["--tag-output", "--mca", "odls_base_sigkill_timeout", patience]
        argv += ["--hostfile", hostfile] if hostfile is not None else []
        for name in variables:
            argv += ["-x", name]
    return [*argv, *launcher.mpi_options]


def run_launch(launch: LaunchRequest) -> Outcome:
    """Start mpirun and see the attempt, and those that replace it when it fails, to the end.

    Raises:
        TrainctlError: The run is in use (5), or its disk has no space for a checkpoint (4).
    """
    require_space(launch.run.root, launch.checkpoint_bytes)
    hostfile = section_of(launch.plan.config, MpiConfig).mpi_hostfile
    hosts = hosts_in(Path(hostfile).read_text(encoding="utf-8")) if hostfile is not None else []
    start = partial(start_program, name="mpirun", death_signal=signal.SIGTERM)
    return run_attempts(launch, render=partial(render, hosts=hosts), start=start)
