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
        KubernetesApi.jobset, "Controller that the Kubernetes manifest is written for."
    )
    kubernetes_image: str | None = option(
        None,
        "Container image with trainctl installed; required for launcher=kubernetes.",
        runs_code=True,
    )
    kubernetes_namespace: str | None = option(
        None, "Kubernetes namespace; none is kubectl's current one."
    )
    kubernetes_queue: str | None = option(None, "Local queue of Kueue that admits the job.")
    kubernetes_claims: dict[str, str] = option(
        {},
        "Persistent volume claims and their mount paths; the run directory must be on one of them.",
    )
    kubernetes_shared_memory: str | None = option(
        "16Gi", "Size of /dev/shm, counted as memory; none keeps the container runtime's 64 MiB."
    )
    kubernetes_node_selector: dict[str, str] = option({}, "Node labels required by the pods.")
    kubernetes_service_account: str | None = option(None, "Service account of the pods.")
    kubernetes_python: str = option(
        "python", "Python interpreter inside the image.", runs_code=True
    )
    kubernetes_secret: str | None = option(
        None, "Kubernetes Secret with the variables that `${oc.env:NAME}` refers to in a pod."
    )


SPEC = Launcher(
    name="kubernetes",
    keys=KubernetesConfig,
    build="trainctl.launchers.kubernetes:run_launch",
    render="trainctl.launchers.kubernetes:render",
    check="trainctl.launchers.kubernetes:check",
    check_config="trainctl.launchers.config_checks:check_kubernetes",
    resolves_here=False,
    queue="Kubernetes",
    tool="kubectl",
    node_command="trainctl.launchers.kubernetes:pod_command",
    cancel="trainctl.launchers.kubernetes:cancel",
    sweep_hint="launch the runs one by one, and let Kueue queue them (launcher.kubernetes_queue)",
)
