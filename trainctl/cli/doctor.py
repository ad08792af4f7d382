"""`trainctl doctor`: checks of this machine that start nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import typer

from trainctl.cli.arguments import ConfigDir, Json, TargetAndOverrides, split_target
from trainctl.cli.console import findings_to_json, print_data, print_json, show_findings
from trainctl.engines.patch_checks import check_definitions, list_uses
from trainctl.errors import ExitCode
from trainctl.hardware import resolve_hardware
from trainctl.hardware.health import CheckResult, examine_machine
from trainctl.launchers.planning import compose_target, name_sources


def doctor(
    target: TargetAndOverrides = None, config_dir: ConfigDir = None, as_json: Json = False
) -> None:
    """Check whether this machine can run a configuration: packages, compilers, limits, devices.

    Exits with 4 if it cannot. Without arguments it looks for what every run needs.

    Example: trainctl doctor recipe=7b-zero3-nvme offload.nvme_path=/local_nvme
    """
    composed = compose_target(*split_target(target), config_dir)
    show_findings(composed.findings)
    hardware = resolve_hardware(composed.config.hardware)
    checks = [
        replace(check, findings=tuple(name_sources(composed, check.findings)))
        for check in (
            *examine_machine(composed.config, hardware),
            *check_definitions(composed.config),
        )
    ]
    findings = [finding for check in checks for finding in check.findings]
    uses = list_uses(composed.config)
    if as_json:
        print_json(
            {
                "schema": 1,
                "hardware": hardware.name,
                "checks": [
                    {
                        "name": check.name,
                        "verdict": _check_verdict(check),
                        "facts": list(check.facts),
                        "findings": findings_to_json(check.findings),
                    }
                    for check in checks
                ],
                "uses": uses,
            }
        )
    else:
        _print_checks(checks, hardware.name)
        _print_uses(uses)
        show_findings(findings)
    if any(finding.is_error for finding in findings):
        raise typer.Exit(ExitCode.environment)


def _check_verdict(check: CheckResult) -> str:
    if any(finding.is_error for finding in check.findings):
        return "error"
    if check.findings:
        return "warning"
    return "good" if check.facts else "not needed"


def _print_checks(checks: list[CheckResult], name: str) -> None:
    print_data(f"This machine, for {name}")
    for check in checks:
        verdict = _check_verdict(check)
        style = verdict if verdict in ("good", "warning", "error") else ""
        facts = "; ".join(check.facts)
        print_data(f"  {verdict:<10}  {check.name}{f': {facts}' if facts else ''}", style=style)


def _print_uses(uses: list[dict[str, Any]]) -> None:
    """Print what a run changes in other packages, or uses of their undocumented internals."""
    print_data("What it changes in other packages, or uses of their inside (why: --json)")
    for use in uses:
        if use["is_needed"] and use["difference"] is not None:
            style = "good" if not use["difference"] else "warning" if use["fallback"] else "error"
            print_data(f"  {style:<10}  {use['how']:<8}  {use['name']}", style=style)
