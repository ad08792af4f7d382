"""Kubernetes: a JobSet, or a Kubeflow TrainJob, with one pod per node."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from trainctl.config.schema import LauncherConfig
from trainctl.config.schema.option import option
from trainctl.options.launcher import Launcher


class KubernetesApi(Enum):
    """Controllers that start a set of pods together."""

    jobset = "jobset"
    trainjob = "trainjob"


@dataclass
class KubernetesConfig(LauncherConfig):
    """Keys of Kubernetes."""

    kubernetes_api: KubernetesApi = option(
        KubernetesApi.jobset, "Which controller the manifest is for."
    )
    kubernetes_image: str | None = option(
        None, "Container image that has trainctl; required for launcher=kubernetes."
    )
    kubernetes_namespace: str | None = option(None, "Namespace; none is kubectl's current one.")
    kubernetes_queue: str | None = option(None, "Kueue's local queue that admits the job.")
    kubernetes_claims: dict[str, str] = option(
        {}, "Persistent volume claims and where each is mounted; the run's folder must be on one."
    )
    kubernetes_shared_memory: str | None = option(
        "16Gi", "Size of /dev/shm, in memory; none leaves the 64 MiB of the container runtime."
    )
    kubernetes_node_selector: dict[str, str] = option({}, "Labels that the nodes must have.")
    kubernetes_service_account: str | None = option(None, "Service account of the pods.")
    kubernetes_python: str = option("python", "The interpreter inside the image.")
    kubernetes_secret: str | None = option(
        None, "Secret of Kubernetes with the variables that `${oc.env:NAME}` names in a pod."
    )


SPEC = Launcher(
    name="kubernetes",
    keys=KubernetesConfig,
    build="trainctl.launch.kubernetes:run_launch",
    render="trainctl.launch.kubernetes:render",
    check="trainctl.launch.kubernetes:check",
    check_config="trainctl.launch.refusals.kubernetes:check_config",
    resolves_here=False,
    queue="Kubernetes",
    tool="kubectl",
    cancel="trainctl.launch.kubernetes:cancel",
    sweep_hint="launch the runs one by one, and let Kueue queue them (launcher.kubernetes_queue)",
)
