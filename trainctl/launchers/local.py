"""The local launcher: one agent on this machine, and its ranks."""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

from trainctl.config.schema import Accelerator
from trainctl.engines import patch_checks as declared
from trainctl.errors import Finding
from trainctl.hardware.host_checks import preflight
from trainctl.hardware.storage import lacking_space
from trainctl.launchers.interface import AttemptRequest, RenderedLaunch
from trainctl.launchers.rank_command import attempt_command, rank_variables
from trainctl.plans.types import RunPlan


def render(request: AttemptRequest) -> RenderedLaunch:
    """Render the agent's command for an attempt. Pure: reads and starts nothing."""
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

    The launch checks again.
    """
    there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    yield from lacking_space(shutil.disk_usage(there).free, checkpoint_bytes, str(there))
