"""Checks of this machine that can fail a run, for launches and `trainctl doctor`.

Here are those of a host: its memory limits (of the system or a container) and network interfaces.
No check imports torch.
"""

from __future__ import annotations

import ipaddress
import os
import resource
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from trainctl.config.quantities import memory_text
from trainctl.config.schema import OffloadDevice, RunConfig
from trainctl.config.secrets import resolve_variables
from trainctl.errors import Finding
from trainctl.hardware import builds, devices, host_checks, packages, storage
from trainctl.hardware.detect import Hardware, error_finding, warning_finding
from trainctl.hardware.devices import Machine, this_machine
from trainctl.hardware.packages import check_kernels
from trainctl.hardware.resolve import falls_short

SHARED_MEMORY = Path("/dev/shm")

SHARED_BYTES_PER_PROCESS = 64 * 2**20
"""Upper bound of shared memory for communication per process at default settings. Docker's default
is this much for a whole container.
"""


def check_shared_memory(config: RunConfig, hardware: Hardware) -> Iterator[str | Finding]:
    """Find a missing or too small `/dev/shm`.

    NCCL, gloo and data loaders of a node exchange data through it.
    """
    processes = hardware.devices_per_node
    if processes < 2:
        return
    try:
        space = shutil.disk_usage(SHARED_MEMORY)
    except OSError:
        yield error_finding(
            "TC129",
            "hardware.devices_per_node",
            f"there is no {SHARED_MEMORY}, through which the processes of a node communicate",
            f"mount -t tmpfs tmpfs {SHARED_MEMORY}",
        )
        return
    wanted = processes * SHARED_BYTES_PER_PROCESS
    free, total = (size / 2**20 for size in (space.free, space.total))
    if space.free >= wanted:
        yield f"{free:,.0f} of {total:,.0f} MiB free in {SHARED_MEMORY}"
        return
    yield warning_finding(
        "TC129",
        "hardware.devices_per_node",
        f"{SHARED_MEMORY} has {free:,.0f} of {total:,.0f} MiB free; {processes} processes may need "
        f"{wanted / 2**20:,.0f}, and die of SIGBUS without",
        "docker run --shm-size=8g (or --ipc=host); in Kubernetes an emptyDir of medium Memory",
    )


def check_locked_memory(config: RunConfig, hardware: Hardware) -> Iterator[str | Finding]:
    """Find a low limit of locked memory (ulimit -l).

    Memory registered with a network card, and memory pinned for NVMe, counts against it.
    """
    offload = config.offload
    to_nvme = OffloadDevice.nvme in (offload.optimizer, offload.parameters)
    if hardware.nodes == 1 and not to_nvme:
        return
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        yield "unlimited"
        return
    what = "reading and writing NVMe" if to_nvme else "InfiniBand and RoCE between the nodes"
    yield warning_finding(
        "TC130",
        "offload" if to_nvme else "hardware.nodes",
        f"at most {soft / 2**20:,.1f} MiB of memory can be locked (ulimit -l); {what} may fail "
        "or be slow",
        "ulimit -l unlimited, in limits.conf or the scheduler's; docker run --ulimit memlock=-1",
    )


def check_host_memory(config: RunConfig, hardware: Hardware) -> Iterator[str | Finding]:
    """Find host memory below the plan's budget, by the limit of this process."""
    machine = this_machine()
    found = list(lacking_memory(hardware, machine))
    yield from found or (f"{memory_text(machine.memory_bytes)} may be used",)


def lacking_memory(hardware: Hardware, machine: Machine) -> Iterator[Finding]:
    """Find what a machine lacks of the host memory that a plan is budgeted against."""
    planned, there = hardware.host_memory_bytes, machine.memory_bytes
    if planned is not None and falls_short(there, planned):
        yield error_finding(
            "TC131",
            "hardware.host_memory_bytes",
            f"the plan is for {memory_text(planned)} of host memory, and {machine.name} has "
            f"{memory_text(there)} of memory for it (its own, or the control group's)",
            f"more memory for the job or container, or hardware.host_memory_bytes={there}",
        )


VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


def check_interfaces(config: RunConfig, hardware: Hardware) -> Iterator[str | Finding]:
    """Find interfaces of NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME that are missing or down.

    With several nodes and neither variable set, the host's own name must not resolve to a loopback
    address.
    """
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    own = resolve_variables(config.launcher.environment, os.environ)
    named = False
    for variable in VARIABLES:
        value = own.get(variable, os.environ.get(variable))
        if not value:
            continue
        named = True
        missing = [
            entry
            for entry in _interface_entries(variable, value)
            if not _matches_interface(entry, up)
        ]
        if missing:
            yield error_finding(
                "TC135",
                "launcher.environment" if variable in own else "launcher.forward_environment",
                f"{variable}={value}, and no interface of this machine that is up is called "
                f"{' or '.join(entry.lstrip('=') for entry in missing)}",
                f"one of {', '.join(sorted(up))}; or unset {variable}",
            )
        else:
            yield f"{variable}={value}"
    if hardware.nodes > 1 and not named:
        yield _own_address(sorted(up - {"lo"}))


def _own_address(up: list[str]) -> str | Finding:
    """Check the address of the host's own name, which gloo binds."""
    host = socket.gethostname()
    try:
        address = socket.gethostbyname(host)
        is_loopback = ipaddress.ip_address(address).is_loopback
    except (OSError, ValueError):
        address, is_loopback = "no address", True
    if not is_loopback:
        return f"{host} is {address}"
    return warning_finding(
        "TC135",
        "launcher.environment",
        f"this host's name, {host}, stands for {address}, which other nodes cannot reach",
        f"launcher.environment.GLOO_SOCKET_IFNAME={up[0] if up else 'NAME'}, and the same for "
        "NCCL_SOCKET_IFNAME; or mend /etc/hosts",
    )


def _interface_entries(variable: str, value: str) -> list[str]:
    """Return the interfaces that must exist.

    NCCL accepts prefixes, ``=name``, and ``^name`` to exclude.
    """
    if value.startswith("^"):
        return []
    entries = [entry.strip() for entry in value.lstrip("=").split(",") if entry.strip()]
    is_exact = value.startswith("=") or variable.startswith("GLOO")
    return [f"={entry}" if is_exact else entry for entry in entries]


def _matches_interface(entry: str, names: set[str]) -> bool:
    if entry.startswith("="):
        return entry[1:] in names
    return any(name.startswith(entry) for name in names)


Check = Callable[[RunConfig, Hardware], Iterable[str | Finding]]
"""A check yields a text for what is well, and a finding for what is wrong."""

CHECKS: tuple[tuple[str, Check], ...] = (
    ("packages", packages.check_requirements),
    ("extras", packages.check_extras),
    ("loggers", packages.check_loggers),
    ("bytecode", packages.check_bytecode_cache),
    ("torch", packages.check_torch_build),
    ("devices", devices.check_devices),
    ("visible devices", devices.check_visible_devices),
    ("number formats", devices.check_number_formats),
    ("kernels", check_kernels),
    ("compiler", builds.check_compiler),
    ("libaio", builds.check_libaio),
    ("unfinished builds", builds.check_build_locks),
    ("CUDA toolkit", builds.check_cuda_toolkit),
    ("shared memory", host_checks.check_shared_memory),
    ("locked memory", host_checks.check_locked_memory),
    ("host memory", host_checks.check_host_memory),
    ("NVMe", storage.check_nvme),
    ("caches", storage.check_root_caches),
    ("network", host_checks.check_interfaces),
)
"""Names and checks in the order of their output."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Result of one check; without facts and findings the plan needs nothing of the kind."""

    name: str
    facts: tuple[str, ...]
    """Texts about what is well."""
    findings: tuple[Finding, ...]


def examine_machine(config: RunConfig, hardware: Hardware) -> list[CheckResult]:
    """Run all checks of this machine for a plan on `hardware` (from `resolve_hardware`)."""
    examined = []
    for name, check in CHECKS:
        found = list(check(config, hardware))
        facts = tuple(each for each in found if isinstance(each, str))
        findings = tuple(each for each in found if isinstance(each, Finding))
        examined.append(CheckResult(name, facts, findings))
    return examined


def preflight(config: RunConfig, hardware: Hardware) -> list[Finding]:
    """Find what this machine lacks for a local launch."""
    return [finding for each in examine_machine(config, hardware) for finding in each.findings]
