"""How a check of the machine says what is wrong."""

from __future__ import annotations

from trainctl.errors import ExitCode, Finding, Severity


def problem(rule: str, key: str, message: str, hint: str = "") -> Finding:
    """Something that keeps the run from starting, or from being what the plan says."""
    return Finding(rule=rule, key=key, message=message, hint=hint, exit_code=ExitCode.environment)


def doubt(rule: str, key: str, message: str, hint: str) -> Finding:
    """Something that may go wrong, or be slow."""
    return Finding(
        rule=rule,
        key=key,
        message=message,
        hint=hint,
        severity=Severity.warning,
        exit_code=ExitCode.environment,
    )
