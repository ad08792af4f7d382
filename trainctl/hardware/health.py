"""Checks of everything on this machine that can fail a run, for launches and `trainctl doctor`.

No check imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from trainctl.config.schema import RunConfig
from trainctl.errors import Finding
from trainctl.hardware import builds, devices, limits, network, packages, storage
from trainctl.hardware.facts import Hardware
from trainctl.hardware.kernels import kernels_are_installed

Check = Callable[[RunConfig, Hardware], Iterable[str | Finding]]
"""A check yields a text for what is well, and a finding for what is wrong."""

CHECKS: tuple[tuple[str, Check], ...] = (
    ("packages", packages.go_together),
    ("loggers", packages.loggers_are_installed),
    ("bytecode", packages.bytecode_is_kept),
    ("torch", packages.torch_matches_the_device),
    ("devices", devices.are_here),
    ("visible devices", devices.visible_ones_exist),
    ("number formats", devices.compute_in_the_format),
    ("kernels", kernels_are_installed),
    ("compiler", builds.compiler_is_here),
    ("libaio", builds.libaio_is_here),
    ("unfinished builds", builds.no_build_was_left),
    ("CUDA toolkit", builds.toolkit_matches_torch),
    ("shared memory", limits.shared_memory_is_large),
    ("locked memory", limits.memory_can_be_locked),
    ("host memory", limits.memory_is_there),
    ("NVMe", storage.nvme_keeps_what_is_written),
    ("caches", storage.caches_are_roots_own),
    ("network", network.interfaces_exist),
)
"""Names and checks in the order of their output."""


@dataclass(frozen=True, slots=True)
class Examined:
    """Result of one check; without facts and findings the plan needs nothing of the kind."""

    name: str
    facts: tuple[str, ...]
    """Texts about what is well."""
    findings: tuple[Finding, ...]


def examine_machine(config: RunConfig, hardware: Hardware) -> list[Examined]:
    """Run all checks of this machine for a plan on `hardware` (from `resolve_hardware`)."""
    examined = []
    for name, check in CHECKS:
        found = list(check(config, hardware))
        facts = tuple(each for each in found if isinstance(each, str))
        findings = tuple(each for each in found if isinstance(each, Finding))
        examined.append(Examined(name, facts, findings))
    return examined


def preflight(config: RunConfig, hardware: Hardware) -> list[Finding]:
    """Find what this machine lacks for a local launch."""
    return [finding for each in examine_machine(config, hardware) for finding in each.findings]
