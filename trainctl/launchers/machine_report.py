"""Reports on this machine: whether it can run one configuration, and which recipes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainctl.config.catalog import list_recipes
from trainctl.config.compose import ComposedConfig
from trainctl.engines.patch_checks import check_definitions, list_uses
from trainctl.errors import Finding, TrainctlError
from trainctl.hardware import Hardware, resolve_hardware
from trainctl.hardware.host_checks import CheckResult, examine_machine
from trainctl.launchers.planning import can_launch, compose_config, name_sources, plan_config
from trainctl.rules.kernel_choice import with_kernels
from trainctl.runs.directory import DEFAULT_ROOT


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineReport:
    """Checks of this machine for one configuration."""

    hardware: Hardware
    checks: tuple[CheckResult, ...]
    uses: tuple[dict[str, Any], ...]
    """Changes that a run makes in other packages, and undocumented internals that it uses."""
    notes: tuple[Finding, ...]
    """Warnings of the composition."""

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Findings of all checks; an error means that the configuration cannot run here."""
        return tuple(finding for check in self.checks for finding in check.findings)


def examine(composed: ComposedConfig) -> MachineReport:
    """Check this machine for a configuration: packages, compilers, limits, devices."""
    hardware = resolve_hardware(composed.config.hardware, launches=True)
    config = with_kernels(composed.config, hardware)
    checks = (*examine_machine(config, hardware), *check_definitions(config))
    return MachineReport(
        hardware=hardware,
        checks=tuple(
            replace(check, findings=tuple(name_sources(composed, check.findings)))
            for check in checks
        ),
        uses=tuple(list_uses(config)),
        notes=composed.findings,
    )


def recipe_verdicts(config_dir: Path | None) -> list[dict[str, Any]]:
    """Return each recipe with its hardware and whether this machine can launch it.

    Data and weights, which the user must name, are not checked.
    """
    return [
        {
            "name": info.name,
            "what": info.summary,
            "description": info.description,
            "hardware": info.hardware,
            "path": str(info.path),
            **_recipe_verdict(info.name, config_dir),
        }
        for info in list_recipes(config_dir)
    ]


def _recipe_verdict(name: str, config_dir: Path | None) -> dict[str, Any]:
    try:
        fits, reason = can_launch(
            plan_config(compose_config([f"recipe={name}"], config_dir)), DEFAULT_ROOT
        )
    except TrainctlError as error:
        fits, reason = False, error.findings[0].message if error.findings else error.message
    return {"fits_here": fits, "reason": reason}
