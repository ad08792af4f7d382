"""Checks of everything on this machine that can fail a run, for launches and `trainctl doctor`.

No check imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from trainctl.config.schema import RunConfig
from trainctl.errors import Finding
from trainctl.hardware import builds, devices, host_checks, packages, storage
from trainctl.hardware.facts import Hardware
from trainctl.hardware.packages import check_kernels

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
