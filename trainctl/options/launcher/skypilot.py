"""SkyPilot: a managed job on machines of a cloud, recovered after a preemption."""

from __future__ import annotations

from dataclasses import dataclass

from trainctl.config.schema import LauncherConfig
from trainctl.config.schema.option import option
from trainctl.options.launcher import Launcher


@dataclass
class SkypilotConfig(LauncherConfig):
    """Keys of SkyPilot."""

    skypilot_infra: str | None = option(
        None,
        "Cloud, region, zone or Kubernetes context, such as aws/us-east-1; none leaves the choice "
        "to SkyPilot.",
    )
    skypilot_accelerator: str | None = option(
        None,
        "SkyPilot's name of the device, such as H100; none follows from the name of the hardware.",
    )
    skypilot_use_spot: bool = option(False, "Request spot instances, which may be preempted.")
    skypilot_resources: dict[str, str] = option(
        {}, "Further fields of the task's resources, such as `{cpus: 64+, image_id: docker:IMAGE}`."
    )
    skypilot_setup: list[str] = option(
        [],
        "Shell commands that install trainctl on each new machine, one per entry.",
        runs_code=True,
    )
    skypilot_python: str = option("python", "Python interpreter on the machines.", runs_code=True)
    skypilot_folder: str = option(
        "trainctl-runs",
        "Folder of the run directory on the machines, absolute or in the home directory; on a "
        "volume for several nodes.",
    )
    skypilot_volumes: dict[str, str] = option(
        {}, "Mount paths on the machines and the SkyPilot volumes mounted there."
    )


SPEC = Launcher(
    name="skypilot",
    keys=SkypilotConfig,
    build="trainctl.launchers.skypilot:run_launch",
    render="trainctl.launchers.skypilot:render",
    check="trainctl.launchers.skypilot:check",
    check_config="trainctl.launchers.config_checks:check_skypilot",
    queue="SkyPilot",
    tool="sky",
    tool_hint="in an environment of its own: pip install 'skypilot[CLOUD]', and add it to PATH",
    node_command="trainctl.launchers.skypilot:node_command",
    cancel="trainctl.launchers.skypilot:cancel",
    job_log="trainctl.launchers.skypilot:job_log",
    sweep_hint="launch the runs one by one: SkyPilot queues its jobs",
)
