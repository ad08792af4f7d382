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
from trainctl.hardware.packages import kernels_are_installed

Check = Callable[[RunConfig, Hardware], Iterable[str | Finding]]
"""A check yields a text for what is well, and a finding for what is wrong."""

CHECKS: tuple[tuple[str, Check], ...] = (
    ("packages", packages.requirements_are_met),
    ("extras", packages.extras_are_installed),
    ("loggers", packages.loggers_are_installed),
    ("bytecode", packages.bytecode_is_cached),
    ("torch", packages.torch_matches_the_device),
    ("devices", devices.devices_exist),
    ("visible devices", devices.visible_devices_exist),
    ("number formats", devices.devices_support_format),
    ("kernels", kernels_are_installed),
    ("compiler", builds.compiler_is_installed),
    ("libaio", builds.libaio_is_installed),
    ("unfinished builds", builds.no_stale_build_locks),
    ("CUDA toolkit", builds.toolkit_matches_torch),
    ("shared memory", host_checks.shared_memory_is_large),
    ("locked memory", host_checks.memory_can_be_locked),
    ("host memory", host_checks.host_memory_suffices),
    ("NVMe", storage.nvme_reads_back_writes),
    ("caches", storage.root_caches_are_protected),
    ("network", host_checks.interfaces_exist),
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
