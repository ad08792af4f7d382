"""The local launcher: one agent on this machine, and its ranks."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

from trainctl.config.schema import Accelerator
from trainctl.engines import patch_checks as declared
from trainctl.errors import Finding, TrainctlError
from trainctl.hardware.health import preflight
from trainctl.hardware.storage import lacking_space
from trainctl.launchers.attempts import run_attempts, start_one_agent
from trainctl.launchers.interface import AttemptRequest, LaunchRequest, Outcome, RenderedLaunch
from trainctl.launchers.rank_command import attempt_command, rank_variables
from trainctl.plans.types import RunPlan
from trainctl.runs.directory import run_id
from trainctl.runs.lock import hold_lock
from trainctl.runs.processes import RunTag, terminate_processes

_LEFTOVER_GRACE_SECONDS = 1.0


def render(request: AttemptRequest) -> RenderedLaunch:
    """Render what `run_launch` starts for an attempt. Pure: reads and starts nothing."""
    on_cpu = request.plan.hardware.accelerator is Accelerator.cpu
    variables = rank_variables(request, {"GLOO_SOCKET_IFNAME": "lo"} if on_cpu else None)
    port = request.plan.config.launcher.port
    command = attempt_command(request, [socket.gethostname()], [variables], port=port)
    return RenderedLaunch(command=command, commands=(command.nodes[0].argv,))


def check(plan: RunPlan, folder: Path, checkpoint_bytes: int | None) -> list[Finding]:
    """Return how this machine differs from what the plan needs, space for a checkpoint included."""
    return [
        *preflight(plan.config, plan.hardware),
        *declared.check_needed_definitions(plan.config),
        *_no_space(folder, checkpoint_bytes),
    ]


def _no_space(folder: Path, checkpoint_bytes: int | None) -> Iterator[Finding]:
    """Yield a finding if the disk of the folder (or of its parent) lacks space for a checkpoint.

    `run_launch` checks again.
    """
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    yield from lacking_space(shutil.disk_usage(there).free, checkpoint_bytes, str(there))


def run_launch(launch: LaunchRequest) -> Outcome:
    """Run an attempt on this machine, and those that replace it when it fails, to the end.

    Call it in the main thread. SIGINT, SIGTERM and SIGHUP stop every rank, a second one without
    grace; see `StopHandler` for when SIGTERM saves first. When this returns or raises, no process
    of the run is left.

    Raises:
        TrainctlError: The run is in use (5), or its disk has no space for a checkpoint (4).
    """
    run = launch.run
    if launch.checkpoint_bytes is not None:
        require_space(run.root, launch.checkpoint_bytes)
    with hold_lock(run):
        # Finds processes only if an earlier attempt's launcher and agent were killed at once.
        terminate_processes(RunTag(run_id(run), run.root), grace_seconds=_LEFTOVER_GRACE_SECONDS)
        return run_attempts(launch, render=render, start=start_one_agent)


def require_space(folder: Path, needed_bytes: int) -> None:
    """Raise if the disk of a folder has less free space than `needed_bytes`.

    Raises:
        TrainctlError: Exit code 4.
    """
    for lacking in lacking_space(shutil.disk_usage(folder).free, needed_bytes, str(folder)):
        raise TrainctlError(lacking.message, hint=lacking.hint, exit_code=lacking.exit_code)
