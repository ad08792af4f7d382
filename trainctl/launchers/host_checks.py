"""Hosts of an attempt: chosen, probed, and checked for what the plan needs."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trainctl.config.hosts import Host, chosen_hosts
from trainctl.config.user_code import user_code_files
from trainctl.errors import Finding
from trainctl.hardware.detect import error_finding
from trainctl.hardware.devices import Machine, lacking_devices
from trainctl.hardware.host_checks import lacking_memory
from trainctl.hardware.storage import lacking_space
from trainctl.launchers.host_probe import HostReport, probe_hosts
from trainctl.launchers.probe import PACKAGES, code_digest
from trainctl.options.launcher import section_of
from trainctl.options.launcher.ssh import SshConfig
from trainctl.plans.types import RunPlan
from trainctl.runs.provenance import file_digest, package_versions

CLOCK_SECONDS = 5.0
"""Largest clock offset without a finding: records of several nodes are ordered by their times."""
_HOSTS = "launcher.hosts"
_FILES = 5
"""Largest number of the user's files that a finding names."""
_SSH_FAILURES = (
    (
        "TC181",
        r"REMOTE HOST IDENTIFICATION HAS CHANGED|Host key verification failed"
        r"|No .* host key is known",
        "its host key is not the one that ssh knows",
        "make sure that it is that machine; then `ssh-keygen -R {host}` and `ssh {host}` once",
    ),
    (
        "TC182",
        r"Permission denied",
        "ssh may not log in without a password",
        "`ssh-copy-id {host}`, or name the key in ~/.ssh/config or launcher.ssh_config",
    ),
    (
        "TC183",
        r"No module named|not found|No such file or directory|cannot execute|Error\b",
        "trainctl cannot be started there",
        "install the same environment at the same path, or name its Python in launcher.python",
    ),
)
"""Reasons for no answer, by patterns in ssh's output, most telling first."""


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

    group: HostGroup | None
    """Hosts to start on; None if there is an error among the findings."""
    findings: list[Finding]
    """Errors and warnings."""
    answering: tuple[Host, ...]
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
        folder: The run's folder, or its planned path: the part of it that exists is used.
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
    findings = host_problems(plan, reports, here, code_digest(), own, checkpoint_bytes)
    is_wrong = any(finding.is_error for finding in findings)
    return HostCheckResult(
        group=None if is_wrong else _host_group(reports),
        findings=findings,
        answering=tuple(report.host for report in reports if report.facts is not None),
    )


def unprobed_hosts(plan: RunPlan) -> HostGroup:
    """Return the group as far as it is known before any host is probed."""
    launcher, hosts = section_of(plan.config, SshConfig), planned_hosts(plan)
    return HostGroup(
        hosts=hosts,
        interfaces=tuple(launcher.interfaces.get(host.name, launcher.interface) for host in hosts),
        cores=(None,) * len(hosts),
        address=hosts[0].address,
        port=launcher.port,
    )


def _host_group(reports: Sequence[HostReport]) -> HostGroup:
    facts = [report.facts for report in reports if report.facts is not None]
    assert len(facts) == len(reports)
    return HostGroup(
        hosts=tuple(report.host for report in reports),
        interfaces=tuple(str(of_host["interface"]) for of_host in facts),
        cores=tuple(int(of_host["machine"]["cores"]) for of_host in facts),
        address=str(facts[0]["address"]),
        port=int(facts[0]["port"]["number"]),
    )


def host_problems(
    plan: RunPlan,
    reports: Sequence[HostReport],
    here: Mapping[str, str],
    code: str,
    own: Mapping[str, str],
    checkpoint_bytes: int | None,
) -> list[Finding]:
    """Return every problem of every host.

    Args:
        here: Versions of packages on this machine, which made the plan.
        code: Digest of trainctl's source on this machine.
        own: Checksums of the files of the user's code on this machine.
    """
    answered = [report for report in reports if report.facts is not None]
    return [
        *(_no_answer_finding(report, plan) for report in reports if report.facts is None),
        *(finding for report in answered for finding in _check_versions(report, here, code)),
        *(finding for report in answered for finding in _check_user_code(report, own)),
        *(finding for report in answered for finding in _check_machine(report, plan)),
        *(finding for report in answered for finding in _check_builds(report)),
        *(finding for report in answered for finding in _check_network(report, plan)),
        *(finding for report in answered for finding in _check_storage(report, checkpoint_bytes)),
        *(finding for report in answered for finding in _check_clock(report)),
        *(finding for report in answered for finding in _check_reach(report)),
    ]


def _no_answer_finding(report: HostReport, plan: RunPlan) -> Finding:
    host, lines = report.host.name, report.stderr.splitlines()
    last_line = lines[-1].strip() if lines else ""
    if report.return_code is None:
        seconds = section_of(plan.config, SshConfig).preflight_seconds
        return error_finding(
            "TC180",
            _HOSTS,
            f"{host} did not answer within {seconds:.0f} s",
            "look at the machine, or give it more time with launcher.preflight_seconds",
        )
    for rule, pattern, what, hint in _SSH_FAILURES:
        if re.search(pattern, report.stderr) and "Could not resolve" not in report.stderr:
            return error_finding(
                rule, _HOSTS, f"{host}: {what} ({last_line})", hint.format(host=host)
            )
    return error_finding(
        "TC180",
        _HOSTS,
        f"{host} cannot be reached ({last_line or f'ssh ended with {report.return_code}'})",
        f"`ssh {host} true` must work here, or leave the host out with launcher.exclude={host}",
    )


def _check_versions(report: HostReport, here: Mapping[str, str], code: str) -> Iterator[Finding]:
    assert report.facts is not None
    host, there = report.host.name, report.facts["packages"]
    for package, version in here.items():
        if there.get(package) != version:
            found = there.get(package) or "none"
            yield error_finding(
                "TC184",
                _HOSTS,
                f"{host} has {package} {found}, and this machine {version}",
                "install the same versions everywhere, or share one environment",
            )
    if there == dict(here) and report.facts["code"] != code:
        yield error_finding(
            "TC185",
            _HOSTS,
            f"{host} has another code of trainctl ({report.facts['code']}) than this machine "
            f"({code}), under the same version",
            "copy the changed files there, or share one environment",
        )


def _check_user_code(report: HostReport, own: Mapping[str, str]) -> Iterator[Finding]:
    assert report.facts is not None
    host, there = report.host.name, report.facts["files"]
    lacking = [file for file in own if not there[file]]
    other = [file for file, digest in own.items() if there[file] not in ("", digest)]
    for files, what in ((lacking, "does not have"), (other, "has another version of")):
        if files:
            more = f" and {len(files) - _FILES} more files" if len(files) > _FILES else ""
            yield error_finding(
                "TC194",
                _HOSTS,
                f"{host} {what} {', '.join(files[:_FILES])}{more}",
                "copy your code there, to the same path, or keep it on storage that all share",
            )


def _check_machine(report: HostReport, plan: RunPlan) -> Iterator[Finding]:
    assert report.facts is not None
    host, there = report.host, report.facts["machine"]
    machine = Machine(
        name=host.name,
        devices=there["devices"],
        cores=there["cores"],
        memory_bytes=there["memory_bytes"],
        remedy=f"look at nvidia-smi there, or launcher.exclude={host.name}",
        visibility_note=there.get("visibility_note", ""),
    )
    wanted = host.devices or range(plan.hardware.devices_per_node)
    for found in lacking_devices(plan.hardware, machine, wanted):
        yield replace(found, rule="TC186")
    for found in lacking_memory(plan.hardware, machine):
        yield replace(found, rule="TC186")


def _check_builds(report: HostReport) -> Iterator[Finding]:
    """Yield what keeps DeepSpeed from compiling the plan's operators on the host."""
    assert report.facts is not None
    for found in report.facts["builds"]:
        message = f"{report.host.name}: {found['message']}"
        yield error_finding(found["rule"], found["key"], message, found["hint"])


def _check_network(report: HostReport, plan: RunPlan) -> Iterator[Finding]:
    assert report.facts is not None
    host, facts = report.host.name, report.facts
    launcher = section_of(plan.config, SshConfig)
    if facts["address"] is None:
        named = launcher.interfaces.get(host, launcher.interface)
        what = f"has no interface {named} with an address" if named else "has no outer interface"
        yield error_finding(
            "TC191",
            "launcher.interfaces" if host in launcher.interfaces else "launcher.interface",
            f"{host} {what}",
            f"`ssh {host} ip -brief address` lists them",
        )
    elif facts["listens"] is None:
        yield error_finding(
            "TC191",
            "launcher.interface",
            f"{host} cannot listen on {facts['address']} ({facts['interface']})",
        )
    if facts["port"] and facts["port"]["problem"]:
        yield error_finding(
            "TC189",
            "launcher.port",
            f"port {facts['port']['number']} on {host} cannot be used: {facts['port']['problem']}",
            "launcher.port=null takes a free one",
        )


def _check_storage(report: HostReport, checkpoint_bytes: int | None) -> Iterator[Finding]:
    assert report.facts is not None
    host, storage = report.host.name, report.facts["storage"]
    what = ""
    if storage["problem"]:
        what = f"cannot write where the run is kept: {storage['problem']}"
    elif report.unseen:
        what = f"does not see what {', '.join(report.unseen)} wrote where the run is kept"
    if what:
        hint = "--run-dir must be on storage that all hosts share, at the same path"
        yield error_finding("TC187", "", f"{host} {what}", hint)
        return
    where = f"the folder of the run, as {host} sees it,"
    for found in lacking_space(storage["free_bytes"], checkpoint_bytes, where):
        yield replace(found, rule="TC188")


def _check_clock(report: HostReport) -> Iterator[Finding]:
    if abs(report.clock_seconds) > CLOCK_SECONDS:
        ahead = "ahead of" if report.clock_seconds > 0 else "behind"
        yield error_finding(
            "TC190",
            _HOSTS,
            f"the clock of {report.host.name} is {abs(report.clock_seconds):.0f} s {ahead} that "
            f"of {socket.gethostname()}",
            "let all hosts take the time from one server (chrony, ntpd)",
        )


def _check_reach(report: HostReport) -> Iterator[Finding]:
    if report.unreached:
        assert report.facts is not None
        yield error_finding(
            "TC192",
            "launcher.interface",
            f"{report.host.name} by {report.facts['interface']} ({report.facts['address']}) does "
            f"not reach {', '.join(report.unreached)}",
            "name interfaces of one network with launcher.interface or launcher.interfaces, "
            "or open the firewall between the hosts",
        )
