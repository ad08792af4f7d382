"""Findings and errors in words, on stderr."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainctl.cli.console import say
from trainctl.errors import Finding, TrainctlError


def show_findings(findings: Sequence[Finding]) -> None:
    """Each finding: severity, rule, key, message; then what set the key, and the hint.

    Errors come last, where a screen ends.
    """
    for finding in sorted(findings, key=lambda finding: finding.is_error):
        about = f"{finding.key}: " if finding.key else ""
        say(
            f"{finding.severity}[{finding.rule}]: {about}{finding.message}",
            style=finding.severity.value,
        )
        if finding.source:
            say(f"  set by: {finding.source}")
        if finding.hint:
            say(f"  hint: {finding.hint}")


def show_error(message: str, hint: str = "") -> None:
    """One error and what to do about it."""
    say(f"error: {message}", style="error")
    if hint:
        say(f"hint: {hint}")


def show_trainctl_error(error: TrainctlError) -> None:
    """All findings of the error, then its message and hint."""
    show_findings(error.findings)
    show_error(error.message, error.hint)


def findings_to_json(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """Findings as JSON objects."""
    return [
        {
            "rule": finding.rule,
            "severity": finding.severity.value,
            "key": finding.key,
            "message": finding.message,
            "hint": finding.hint,
            "source": finding.source,
            "exit_code": int(finding.exit_code),
        }
        for finding in findings
    ]
