"""Local: one agent on this machine, which starts the ranks."""

from __future__ import annotations

from trainctl.config.schema import LauncherConfig
from trainctl.options.launcher import Launcher

SPEC = Launcher(
    name="local",
    keys=LauncherConfig,
    build="trainctl.launchers.attempts:run_on_this_machine",
    render="trainctl.launchers.local:render",
    check="trainctl.launchers.local:check",
    several_nodes=False,
)
