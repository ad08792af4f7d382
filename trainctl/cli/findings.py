"""Printing of findings and errors on stderr."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainctl.cli.console import say
from trainctl.errors import ExitCode, Finding, TrainctlError
from trainctl.rules.handbook import hint_line


def show_findings(findings: Sequence[Finding]) -> None:
    """Print each finding: severity, rule, key and message; then what set the key, and the hint.

    Warnings come first, then errors, then where to read more about all of them.
    """
    findings = sorted(findings, key=lambda finding: finding.is_error)
    for finding in findings:
        about = f"{finding.key}: " if finding.key else ""
        say(
            f"{finding.severity}[{finding.rule}]: {about}{finding.message}",
            style=finding.severity.value,
        )
        if finding.source:
            say(f"  set by: {finding.source}")
        if finding.hint:
            say(f"  hint: {finding.hint}")
    rules = list(dict.fromkeys(finding.rule for finding in findings if finding.rule))
    if rules:
        show_explain_hint(rules)


def show_error(message: str, hint: str = "") -> None:
    """Print one error and its hint."""
    say(f"error: {message}", style="error")
    if hint:
        say(f"hint: {hint}")


def show_trainctl_error(error: TrainctlError) -> None:
    """Print the findings of an error, then its message and hint.

    Without findings, an exit code other than 2 gets a line on where it is explained.
    """
    show_findings(error.findings)
    show_error(error.message, error.hint)
    if not error.findings and error.exit_code not in (ExitCode.success, ExitCode.bad_input):
        show_explain_hint([str(int(error.exit_code))])


def show_explain_hint(words: list[str]) -> None:
    """Print where rules, a cause or an exit code are explained, as the last line of a message."""
    say(f"more: {hint_line(words)}")


def findings_to_json(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    """Return the findings as JSON objects."""
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
