"""Configurations that the Kubernetes launcher refuses."""

from __future__ import annotations

import re

from trainctl.config.environment_references import references
from trainctl.config.schema import RunConfig
from trainctl.errors import Finding
from trainctl.hardware import Hardware
from trainctl.launch.quoting import UNSET, check_programs, check_words
from trainctl.options.launcher import section_of
from trainctl.options.launcher.kubernetes import KubernetesConfig

NO_IMAGE, BAD_NAME = "TC164", "TC166"

_LABEL = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")


def check_config(config: RunConfig, hardware: Hardware) -> list[Finding]:
    """Return problems with the image, the names and the secret; not with where the run is."""
    launcher = section_of(config, KubernetesConfig)
    findings = []
    if launcher.kubernetes_image is None:
        findings.append(
            Finding(
                rule=NO_IMAGE,
                key="launcher.kubernetes_image",
                message="launcher=kubernetes needs an image that has trainctl",
                hint="launcher.kubernetes_image=REGISTRY/NAME:TAG",
            )
        )
    names = {
        "kubernetes_namespace": launcher.kubernetes_namespace,
        "kubernetes_queue": launcher.kubernetes_queue,
        "kubernetes_secret": launcher.kubernetes_secret,
        "kubernetes_service_account": launcher.kubernetes_service_account,
    }
    labels = [*names.items(), *(("kubernetes_claims", name) for name in launcher.kubernetes_claims)]
    for key, value in labels:
        if value is not None and not _LABEL.fullmatch(value):
            findings.append(
                Finding(
                    rule=BAD_NAME,
                    key=f"launcher.{key}",
                    message=f"launcher.{key}: {value!r} is no name of Kubernetes",
                    hint="lower-case letters, digits, - and .",
                )
            )
    findings += check_words([("launcher.kubernetes_image", launcher.kubernetes_image)])
    findings += check_programs([("launcher.kubernetes_python", launcher.kubernetes_python)])
    if launcher.kubernetes_secret is None:
        findings += [
            Finding(
                rule=UNSET,
                key="launcher.kubernetes_secret",
                message=f"nothing gives the pods {name}, which ${{oc.env:{name}}} stands for",
                hint=f"kubectl create secret generic NAME --from-literal={name}=..., and "
                "launcher.kubernetes_secret=NAME",
            )
            for name in references(config)
        ]
    return findings
