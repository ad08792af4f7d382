"""What a launcher refuses of a configuration by itself: found by `validate`, before any launch.

A file for each launcher, apart from the code that starts it: whoever only checks loads none of it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib import import_module

from trainctl.config.references import references
from trainctl.config.schema import LauncherKind, RunConfig
from trainctl.errors import ExitCode, Finding
from trainctl.hardware import Hardware

UNSET = "TC168"


def refusals(config: RunConfig, hardware: Hardware) -> list[Finding]:
    """What keeps the configuration's launcher from starting it, wherever it is started from."""
    found = import_module(f"trainctl.launch.refusals.{config.launcher.kind.value}")
    own: list[Finding] = found.check_config(config, hardware)
    return [*own, *_unset_variables(config)]


def _unset_variables(config: RunConfig) -> Iterator[Finding]:
    """Variables that the configuration refers to, and that a start would not find."""
    launcher = config.launcher
    in_pods = launcher.kind is LauncherKind.kubernetes
    for name in references(config):
        if in_pods and launcher.kubernetes_secret is None:
            yield Finding(
                rule=UNSET,
                key="launcher.kubernetes_secret",
                message=f"nothing gives the pods {name}, which ${{oc.env:{name}}} stands for",
                hint=f"kubectl create secret generic NAME --from-literal={name}=..., and "
                "launcher.kubernetes_secret=NAME",
            )
        elif not in_pods and name not in os.environ:
            yield Finding(
                rule=UNSET,
                key=_key_of(config, name),
                message=f"${{oc.env:{name}}} cannot be resolved: {name} is not set here",
                hint=f"export {name}",
                exit_code=ExitCode.environment,
            )


def _key_of(config: RunConfig, name: str) -> str:
    """The first key that refers to a variable."""
    for variable, value in config.launcher.environment.items():
        if f"oc.env:{name}" in value.replace(" ", ""):
            return f"launcher.environment.{variable}"
    return "script_arguments"
