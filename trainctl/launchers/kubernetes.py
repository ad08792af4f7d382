"""The Kubernetes launcher: a JobSet or a Kubeflow TrainJob, of one pod per node, given to kubectl.

Each pod runs `trainctl.launchers.pod`. The first pod is the launcher as well: it makes the attempt,
supervises it, and writes the run's status. The controller restarts all pods after a failure,
`launcher.max_restarts` times; each restart is a new attempt that resumes.

Fields follow jobset.x-k8s.io/v1alpha2 and trainer.kubeflow.org/v1alpha1. A manifest is written as
JSON, which is YAML too: every value is quoted, whatever characters it has.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from trainctl.config.literal_secrets import referenced_variables
from trainctl.config.registry import trusted_folder_variable
from trainctl.config.schema import Accelerator
from trainctl.errors import Finding
from trainctl.launchers.config_checks import check_kubernetes
from trainctl.launchers.interface import (
    AttemptRequest,
    LaunchRequest,
    Outcome,
    RenderedLaunch,
    submit_attempt,
)
from trainctl.launchers.rank_command import (
    attempt_command,
    redact_references,
    scheduled_rank_variables,
)
from trainctl.options.launcher import section_of
from trainctl.options.launcher.kubernetes import KubernetesApi, KubernetesConfig
from trainctl.plans.types import RunPlan
from trainctl.runs.command import AttemptCommand
from trainctl.runs.layout import AttemptPaths, RunPaths
from trainctl.runs.processes import run_tool
from trainctl.runs.status import SchedulerJob

MANIFEST = "manifest.yaml"
NOT_MOUNTED = "TC165"

_INDEX_ANNOTATION = "batch.kubernetes.io/job-completion-index"
PORT = 29500
_NAME_LENGTH = 40
"""Longest name of a job: names of its pods are longer, and host names, which end at 63 characters.
"""
_GRACE_MARGIN_SECONDS = 30
_RESOURCES = {Accelerator.cuda: "nvidia.com/gpu", Accelerator.rocm: "amd.com/gpu"}


def check(plan: RunPlan, folder: Path, checkpoint_bytes: int | None) -> list[Finding]:
    """Return what the manifest lacks (an image, a volume for the run), and invalid names."""
    launcher = _launcher_section(plan)
    findings = check_kubernetes(plan.config, plan.hardware)
    path = PurePosixPath(folder.absolute())
    if not any(path.is_relative_to(mount) for mount in launcher.kubernetes_claims.values()):
        findings.append(
            Finding(
                rule=NOT_MOUNTED,
                key="launcher.kubernetes_claims",
                message=f"no volume claim is mounted where the run is: {path}",
                hint=f"launcher.kubernetes_claims={{CLAIM: {path}}}, mounted at the same path here",
            )
        )
    return findings


def render(request: AttemptRequest) -> RenderedLaunch:
    """Return the manifest and the command that applies it. Pure."""
    plan, run, attempt = request.plan, request.run, request.attempt
    kinds = {KubernetesApi.jobset: _job_set, KubernetesApi.trainjob: _train_job}
    manifest = kinds[_launcher_section(plan).kubernetes_api](plan, run, attempt, job_name(run))
    kubectl = _kubectl_command(_launcher_section(plan).kubernetes_namespace)
    text = json.dumps(manifest, indent=2, ensure_ascii=False) + "\n"
    return RenderedLaunch(
        command=pod_command(redact_references(request)),
        commands=((*kubectl, "create", "--filename", str(attempt.root / MANIFEST)),),
        files={MANIFEST: text},
    )


def pod_command(request: AttemptRequest) -> AttemptCommand:
    """Return the command of an attempt's pods, which the agents read from the run directory."""
    launcher, nodes = _launcher_section(request.plan), request.plan.hardware.nodes
    name = job_name(request.run)
    return attempt_command(
        request,
        [pod_host(name, node) for node in range(nodes)],
        [scheduled_rank_variables(request)] * nodes,
        python=launcher.kubernetes_python,
        port=launcher.port or PORT,
        address=pod_host(name, 0) if nodes > 1 else None,
    )


def job_name(run: RunPaths) -> str:
    """Return a job name from the run directory's name and a digest of its path."""
    words = re.sub(r"[^a-z0-9]+", "-", run.root.name.lower()).strip("-")
    digest = hashlib.sha256(os.fsencode(run.root)).hexdigest()[:6]
    return f"t-{words[: _NAME_LENGTH - 9]}".rstrip("-") + f"-{digest}"


def pod_host(name: str, node: int) -> str:
    """Return the host name of a node's pod: JobSet sets it and makes it resolvable."""
    return f"{name}-node-0-{node}.{name}"


def _launcher_section(plan: RunPlan) -> KubernetesConfig:
    return section_of(plan.config, KubernetesConfig)


def _kubectl_command(namespace: str | None) -> tuple[str, ...]:
    return ("kubectl", *(("--namespace", namespace) if namespace is not None else ()))


def _job_metadata(plan: RunPlan, name: str) -> dict[str, Any]:
    launcher = _launcher_section(plan)
    metadata: dict[str, Any] = {"name": name, "labels": {"app.kubernetes.io/part-of": "trainctl"}}
    if launcher.kubernetes_namespace is not None:
        metadata["namespace"] = launcher.kubernetes_namespace
    if launcher.kubernetes_queue is not None:
        metadata["labels"]["kueue.x-k8s.io/queue-name"] = launcher.kubernetes_queue
    return metadata


def _pod_argv(plan: RunPlan, run: RunPaths, attempt: AttemptPaths) -> list[str]:
    python = _launcher_section(plan).kubernetes_python
    number = str(attempt.number)
    # Kubernetes replaces $(NAME) by the variable's value, and $$ by a dollar.
    folder = str(run.root).replace("$(", "$$(")
    return [python, "-P", "-m", "trainctl.launchers.pod", folder, "--attempt", number]


def _pod_variables(plan: RunPlan) -> list[dict[str, Any]]:
    """Return the environment of each pod.

    Variables that the configuration refers to come from a Secret; their values are not in the
    manifest.
    """
    index = f"metadata.annotations['{_INDEX_ANNOTATION}']"
    return [
        {"name": "TRAINCTL_NODE", "valueFrom": {"fieldRef": {"fieldPath": index}}},
        *({"name": name, "value": value} for name, value in trusted_folder_variable().items()),
        *(
            {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": name}}}
            for name in referenced_variables(plan.config)
            if (secret := _launcher_section(plan).kubernetes_secret) is not None
        ),
    ]


def _pod_resources(plan: RunPlan) -> dict[str, Any]:
    resource = _RESOURCES.get(plan.hardware.accelerator)
    if resource is None:
        return {}
    return {"limits": {resource: plan.hardware.devices_per_node}}


def _volumes_and_mounts(plan: RunPlan) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    launcher = _launcher_section(plan)
    volumes: list[dict[str, Any]] = []
    mounts: list[dict[str, Any]] = []
    for number, (claim, path) in enumerate(launcher.kubernetes_claims.items()):
        source = {"claimName": claim}
        volumes.append({"name": f"claim-{number}", "persistentVolumeClaim": source})
        mounts.append({"name": f"claim-{number}", "mountPath": path})
    if launcher.kubernetes_shared_memory is not None:
        memory = {"medium": "Memory", "sizeLimit": launcher.kubernetes_shared_memory}
        volumes.append({"name": "shared-memory", "emptyDir": memory})
        mounts.append({"name": "shared-memory", "mountPath": "/dev/shm"})
    return volumes, mounts


def _pod_fields(plan: RunPlan) -> dict[str, Any]:
    """Return the fields of a pod's specification that both kinds of manifest share."""
    launcher = _launcher_section(plan)
    seconds = launcher.stop_grace_seconds + launcher.grace_seconds + _GRACE_MARGIN_SECONDS
    fields: dict[str, Any] = {"terminationGracePeriodSeconds": round(seconds)}
    if launcher.kubernetes_service_account is not None:
        fields["serviceAccountName"] = launcher.kubernetes_service_account
    if launcher.kubernetes_node_selector:
        fields["nodeSelector"] = dict(launcher.kubernetes_node_selector)
    return fields


def _job_set(plan: RunPlan, run: RunPaths, attempt: AttemptPaths, name: str) -> dict[str, Any]:
    launcher, nodes = _launcher_section(plan), plan.hardware.nodes
    volumes, mounts = _volumes_and_mounts(plan)
    container = {
        "name": "node",
        "image": launcher.kubernetes_image,
        "command": _pod_argv(plan, run, attempt),
        "env": _pod_variables(plan),
        "ports": [{"containerPort": launcher.port or PORT}],
        "resources": _pod_resources(plan),
        "volumeMounts": mounts,
    }
    pod = {
        **_pod_fields(plan),
        "restartPolicy": "Never",
        "containers": [container],
        "volumes": volumes,
    }
    job = {
        "parallelism": nodes,
        "completions": nodes,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "template": {"spec": pod},
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": _job_metadata(plan, name),
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "failurePolicy": {"maxRestarts": launcher.max_restarts},
            "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": job}}],
        },
    }


def _train_job(plan: RunPlan, run: RunPaths, attempt: AttemptPaths, name: str) -> dict[str, Any]:
    volumes, mounts = _volumes_and_mounts(plan)
    pod = {
        **_pod_fields(plan),
        "containers": [{"name": "node", "volumeMounts": mounts}],
        "volumes": volumes,
    }
    job = {"name": "node", "template": {"spec": {"template": {"spec": pod}}}}
    template = {"spec": {"replicatedJobs": [job]}}
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": _job_metadata(plan, name),
        "spec": {
            "runtimeRef": {"name": "torch-distributed"},
            "trainer": {
                "image": _launcher_section(plan).kubernetes_image,
                "command": _pod_argv(plan, run, attempt),
                "numNodes": plan.hardware.nodes,
                "env": _pod_variables(plan),
                "resourcesPerNode": _pod_resources(plan),
            },
            "runtimePatches": [
                {"manager": "trainctl", "trainingRuntimeSpec": {"template": template}}
            ],
        },
    }


def run_launch(launch: LaunchRequest) -> Outcome:
    """Write the manifest, apply it and return; the pods do the rest.

    Raises:
        TrainctlError: kubectl is missing or refuses the manifest (exit code 4).
    """
    launcher = _launcher_section(launch.plan)
    kind = launcher.kubernetes_api.value
    identity = f"{launcher.kubernetes_namespace or ''}/{kind}/{job_name(launch.run)}"
    rendered = render(launch.attempt_request(launch.attempt, launch.plan))
    return submit_attempt(launch, rendered, job_id=lambda _: identity, is_known=True, name=kind)


def cancel(job: SchedulerJob) -> None:
    """Delete a job and its pods, if they still exist.

    Raises:
        TrainctlError: kubectl is missing or fails (exit code 4).
    """
    namespace, kind, name = job.id.split("/")
    run_tool((*_kubectl_command(namespace or None), "delete", "--ignore-not-found", kind, name))
