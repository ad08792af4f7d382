"""`trainctl doctor` and `trainctl recipes`: what this machine can run; they start nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer

from trainctl import api
from trainctl.cli.arguments import ConfigDir, Json, TargetAndOverrides
from trainctl.cli.console import (
    findings_to_json,
    print_data,
    print_json,
    print_table,
    show_findings,
)
from trainctl.errors import ExitCode
from trainctl.hardware.host_checks import CheckResult


def doctor(
    target: TargetAndOverrides = None, config_dir: ConfigDir = None, as_json: Json = False
) -> None:
    """Check whether this machine can run a configuration: packages, compilers, limits, devices.

    Exits with 4 if it cannot. Without arguments it looks for what every run needs.

    Example: trainctl doctor recipe=7b-zero3-nvme offload.nvme_path=/local_nvme
    """
    report = api.check_machine(*(target or ()), config_dir=config_dir)
    show_findings(report.notes)
    if as_json:
        print_json(
            {
                "schema": 1,
                "hardware": report.hardware.name,
                "checks": [
                    {
                        "name": check.name,
                        "verdict": _check_verdict(check),
                        "facts": list(check.facts),
                        "findings": findings_to_json(check.findings),
                    }
                    for check in report.checks
                ],
                "uses": report.uses,
            }
        )
    else:
        _print_checks(report.checks, report.hardware.name)
        _print_uses(report.uses)
        show_findings(report.findings)
    if any(finding.is_error for finding in report.findings):
        raise typer.Exit(ExitCode.environment)


def _check_verdict(check: CheckResult) -> str:
    if any(finding.is_error for finding in check.findings):
        return "error"
    if check.findings:
        return "warning"
    return "good" if check.facts else "not needed"


def _print_checks(checks: Sequence[CheckResult], name: str) -> None:
    print_data(f"This machine, for {name}")
    for check in checks:
        verdict = _check_verdict(check)
        style = verdict if verdict in ("good", "warning", "error") else ""
        facts = "; ".join(check.facts)
        print_data(f"  {verdict:<10}  {check.name}{f': {facts}' if facts else ''}", style=style)


def _print_uses(uses: Sequence[dict[str, Any]]) -> None:
    """Print what a run changes in other packages, or uses of their undocumented internals."""
    print_data("What it changes in other packages, or uses of their inside (why: --json)")
    for use in uses:
        if use["is_needed"] and use["difference"] is not None:
            style = "good" if not use["difference"] else "warning" if use["fallback"] else "error"
            print_data(f"  {style:<10}  {use['how']:<8}  {use['name']}", style=style)


VERDICTS = {True: "yes", False: "no", None: "perhaps"}


def recipes(config_dir: ConfigDir = None, as_json: Json = False) -> None:
    """List the recipes, for which hardware each is, and whether this machine can launch it."""
    rows = api.list_recipes(config_dir)
    if as_json:
        print_json(rows)
    else:
        heads = ("recipe", "what it is", "hardware", "fits here")
        cells = ((r["name"], r["what"], r["hardware"], VERDICTS[r["fits_here"]]) for r in rows)
        print_table(heads, cells, whole=(0, 2, 3))
