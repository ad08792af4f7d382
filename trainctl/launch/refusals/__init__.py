"""Configurations that a launcher refuses by itself: found by `validate`, before any launch.

Each launcher has a file here, apart from the code that starts it: a check imports none of that.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from trainctl.config.environment_references import references
from trainctl.config.registry import function_of
from trainctl.config.schema import RunConfig
from trainctl.config.secrets import names_in
from trainctl.errors import ExitCode, Finding
from trainctl.hardware import Hardware
from trainctl.launch.quoting import UNSET
from trainctl.options.launcher import spec_of

UNREACHED_NODES = "TC077"


def refusals(config: RunConfig, hardware: Hardware) -> list[Finding]:
    """Return what keeps the configuration's launcher from starting it, on whichever machine."""
    spec = spec_of(config.launcher)
    found = list(_unreached_nodes(config, hardware))
    if spec.check_config:
        found += function_of("launcher", spec.name, "check_config")(config, hardware)
    if spec.resolves_here:
        found += _unset_variables(config)
    return found


def _unreached_nodes(config: RunConfig, hardware: Hardware) -> Iterator[Finding]:
    """Check that the launcher starts as many nodes as the plan has.

    Commands that only plan skip this: how a cluster is reached does not change a plan.
    """
    spec, nodes = spec_of(config.launcher), hardware.nodes
    if not spec.several_nodes and nodes > 1:
        yield Finding(
            rule=UNREACHED_NODES,
            key="launcher.kind",
            message=f"launcher.kind={spec.name} starts one node, and the plan is for {nodes}",
            hint="launcher=slurm or launcher=ssh, or hardware of one node",
        )
    if spec.reach is not None:
        for problem in spec.reach(config.launcher, nodes):
            yield Finding(rule=UNREACHED_NODES, **problem._asdict())


def _unset_variables(config: RunConfig) -> Iterator[Finding]:
    """Yield a finding for each variable that the configuration refers to but that is unset."""
    for name in references(config):
        if name not in os.environ:
            yield Finding(
                rule=UNSET,
                key=_key_of(config, name),
                message=f"${{oc.env:{name}}} cannot be resolved: {name} is not set here",
                hint=f"export {name}",
                exit_code=ExitCode.environment,
            )


def _key_of(config: RunConfig, name: str) -> str:
    """Return the first key that refers to a variable."""
    for variable, value in config.launcher.environment.items():
        if f"oc.env:{name}" in value.replace(" ", ""):
            return f"launcher.environment.{variable}"
    if any(name in names_in(url) for url in config.logging.alerts.urls):
        return "logging.alerts.urls"
    return "script_arguments"
