"""Launcher of a fleet of machines, which consists of this one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from trainctl.config.schema import LauncherConfig
from trainctl.config.schema.option import option
from trainctl.errors import Finding
from trainctl.options.launcher import KeyProblem, Launcher


@dataclass
class FleetKeys(LauncherConfig):
    """Keys of `launcher=fleet`."""

    fleet_size: int = option(1, "Machines of the fleet.", minimum=1, maximum=64)
    fleet_name: str | None = option(None, "Name of the fleet.")


def reach(section: FleetKeys, nodes: int) -> Iterator[KeyProblem]:
    """Yield the problem of a fleet that is too small for the plan."""
    if section.fleet_size < nodes:
        yield KeyProblem(
            "launcher.fleet_size",
            f"launcher.fleet_size={section.fleet_size}, and the plan is for {nodes} nodes",
            f"launcher.fleet_size={nodes}",
        )


def check_config(config: Any, hardware: Any) -> list[Finding]:
    """Refuse a fleet whose name is taken."""
    if config.launcher.fleet_name != "taken":
        return []
    return [Finding(rule="FLEET1", key="launcher.fleet_name", message="the name is taken")]


def run_launch(launch: Any) -> Any:
    """Start an agent on this machine, and note the size of the fleet."""
    from trainctl.launchers.attempts import run_on_this_machine

    (launch.run.root / "fleet.txt").write_text(str(launch.plan.config.launcher.fleet_size))
    return run_on_this_machine(launch)


SPEC = Launcher(
    name="fleet",
    keys=FleetKeys,
    build=run_launch,
    render="trainctl.launchers.local:render",
    check_config=check_config,
    reach=reach,
)
