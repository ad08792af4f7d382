"""Configurations that the ssh launcher refuses."""

from __future__ import annotations

from trainctl.config.hosts import chosen_hosts
from trainctl.config.schema import RunConfig
from trainctl.errors import Finding, TrainctlError
from trainctl.hardware import Hardware
from trainctl.launch.quoting import check_programs
from trainctl.options.launcher import section_of
from trainctl.options.launcher.ssh import SshConfig

WRONG_HOSTS = "TC169"


def check_config(config: RunConfig, hardware: Hardware) -> list[Finding]:
    """Return problems with the names of the hosts, and with the hostfile."""
    launcher = section_of(config, SshConfig)
    findings = [*check_programs([("launcher.python", launcher.python)])]
    findings += [
        Finding(
            rule=WRONG_HOSTS,
            key="launcher.hosts",
            message=f"{name} is there twice: each node is another host",
            hint="name each host once; hardware.devices_per_node says how many devices it has",
        )
        for name in sorted({name for name in launcher.hosts if launcher.hosts.count(name) > 1})
    ]
    if (
        launcher.hostfile is not None
        or launcher.include is not None
        or launcher.exclude is not None
    ):
        try:
            chosen_hosts(launcher, hardware.nodes, hardware.devices_per_node)
        except TrainctlError as error:
            key = "launcher.hosts" if launcher.hostfile is None else "launcher.hostfile"
            findings.append(
                Finding(rule=WRONG_HOSTS, key=key, message=error.message, hint=error.hint)
            )
    return findings
