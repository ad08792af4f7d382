"""Constructors of the findings of machine checks."""

from __future__ import annotations

from trainctl.errors import ExitCode, Finding, Severity


def problem(rule: str, key: str, message: str, hint: str = "") -> Finding:
    """Return an error: the run cannot start, or would not be what the plan says."""
    return Finding(rule=rule, key=key, message=message, hint=hint, exit_code=ExitCode.environment)


def warning_finding(rule: str, key: str, message: str, hint: str) -> Finding:
    """Return a warning: something may fail or be slow."""
    return Finding(
        rule=rule,
        key=key,
        message=message,
        hint=hint,
        severity=Severity.warning,
        exit_code=ExitCode.environment,
    )
