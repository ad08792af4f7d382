"""Ray: a job on a cluster of the user's, with an agent on each node of a placement group."""

from __future__ import annotations

from dataclasses import dataclass

from trainctl.config.schema.option import option
from trainctl.options.launcher import Launcher
from trainctl.options.launcher._elastic import ElasticConfig, check_min_nodes

JOB_VARIABLE = "RAY_JOB_CONFIG_JSON_ENV_VAR"
"""Variable that Ray sets for the command of a job, and for none of the job's workers."""


@dataclass
class RayConfig(ElasticConfig):
    """Keys of Ray."""

    address: str | None = option(
        None,
        "URL of the cluster's job server, such as http://HEAD:8265; none is RAY_API_SERVER_ADDRESS "
        "or RAY_ADDRESS, else a cluster on this machine.",
    )
    cpus_per_node: int | None = option(
        None, "CPUs reserved on each node; none reserves one for each rank.", minimum=1
    )
    resources: dict[str, float] = option(
        {}, "Custom resources of Ray reserved on each node, such as `{spot: 1}`."
    )
    python: str | None = option(
        None,
        "Python interpreter on every node, for Ray; none is the path of this process's "
        "interpreter.",
        local=True,
        runs_code=True,
    )
    node_wait_seconds: float = option(
        600.0, "Maximum time to wait for the nodes before a start.", unit="seconds", minimum=0
    )


SPEC = Launcher(
    name="ray",
    keys=RayConfig,
    build="trainctl.launchers.ray:run_launch",
    modules=("ray",),
    render="trainctl.launchers.ray:render",
    check="trainctl.launchers.ray:check",
    check_config="trainctl.launchers.config_checks:check_ray",
    resolves_here=False,
    queue="Ray",
    job_variable=JOB_VARIABLE,
    cancel="trainctl.launchers.ray:cancel",
    job_state="trainctl.launchers.ray:job_state",
    job_log="trainctl.launchers.ray:job_log",
    sweep_hint="launch the runs one by one: Ray queues what its nodes have no room for",
    reach=check_min_nodes,
)
