"""Hosts of an attempt: chosen, probed, and found fit or not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainctl.config.hosts import Host, chosen_hosts
from trainctl.config.user_files import user_code_files
from trainctl.errors import Finding
from trainctl.launch.host_probe import HostReport, probe_hosts
from trainctl.launch.preflight import problems
from trainctl.launch.probe import PACKAGES, code_digest
from trainctl.options.launcher import section_of
from trainctl.options.launcher.ssh import SshConfig
from trainctl.plan.types import RunPlan
from trainctl.runs.provenance import file_digest, package_versions


@dataclass(frozen=True, slots=True, kw_only=True)
class HostGroup:
    """The hosts of an attempt, with their answers."""

    hosts: tuple[Host, ...]
    """Hosts in the order of the nodes."""
    interfaces: tuple[str | None, ...]
    """Network interface used on each host; None where it is not known yet."""
    cores: tuple[int | None, ...]
    """Number of CPU cores of each host; None where it is not known yet."""
    address: str
    """Address of the rendezvous: the first host's, on its interface."""
    port: int | None
    """Port of the rendezvous; None where a free one is still to be found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostCheckResult:
    """Result of probing the hosts."""

    site: HostGroup | None
    """Hosts to start on; None if there is an error among the findings."""
    findings: list[Finding]
    """Errors and warnings."""
    there: tuple[Host, ...]
    """Hosts that answered."""


def planned_hosts(plan: RunPlan) -> tuple[Host, ...]:
    """Return the hosts that a plan names.

    Raises:
        TrainctlError: The hostfile is missing or wrong, or there are too few hosts (exit code 2).
    """
    hardware = plan.hardware
    launcher = section_of(plan.config, SshConfig)
    return chosen_hosts(launcher, hardware.nodes, hardware.devices_per_node)


def check_hosts(
    plan: RunPlan,
    hosts: Sequence[Host],
    folder: Path,
    checkpoint_bytes: int | None,
    code_folder: Path | None = None,
) -> HostCheckResult:
    """Probe the hosts, all at once.

    Args:
        plan: The plan that is to run on them.
        folder: The run's folder, or its planned path: the part of it that exists is used.
        checkpoint_bytes: Size of a checkpoint, if known.
        code_folder: Folder in which ranks run and find the user's code; None is the current folder.
    """
    folder = folder.absolute()
    while not folder.is_dir():
        folder = folder.parent
    files = user_code_files(plan.config, code_folder or Path.cwd())
    own = {str(file): file_digest(file) for file in files}
    reports = probe_hosts(hosts, plan, folder, list(own))
    installed = package_versions()
    here = {package: installed.get(package, "") for package in PACKAGES}
    findings = problems(plan, reports, here, code_digest(), own, checkpoint_bytes)
    is_wrong = any(finding.is_error for finding in findings)
    return HostCheckResult(
        site=None if is_wrong else _site(reports),
        findings=findings,
        there=tuple(report.host for report in reports if report.facts is not None),
    )


def unprobed_hosts(plan: RunPlan) -> HostGroup:
    """Return the site as far as it is known before any host is probed."""
    launcher, hosts = section_of(plan.config, SshConfig), planned_hosts(plan)
    return HostGroup(
        hosts=hosts,
        interfaces=tuple(launcher.interfaces.get(host.name, launcher.interface) for host in hosts),
        cores=(None,) * len(hosts),
        address=hosts[0].address,
        port=launcher.port,
    )


def _site(reports: Sequence[HostReport]) -> HostGroup:
    facts = [report.facts for report in reports if report.facts is not None]
    assert len(facts) == len(reports)
    return HostGroup(
        hosts=tuple(report.host for report in reports),
        interfaces=tuple(str(of_host["interface"]) for of_host in facts),
        cores=tuple(int(of_host["machine"]["cores"]) for of_host in facts),
        address=str(facts[0]["address"]),
        port=int(facts[0]["port"]["number"]),
    )
