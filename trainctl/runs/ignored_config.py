"""Warnings of settings that a run ignores: in an edited `config.yaml`, or of a failed attempt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainctl.config.codec import to_plain
from trainctl.config.secrets import redact_setting
from trainctl.config.store import Change, diff
from trainctl.errors import Finding, Severity, TrainctlError
from trainctl.runs.attempts import EffectiveAttempt, config_of, edited_by_hand
from trainctl.runs.layout import RunPaths

EDITED, FAILED_AT_START = "TC045", "TC046"


def ignored_config_findings(run: RunPaths, standing: EffectiveAttempt | None) -> list[Finding]:
    """Return warnings of edits and of failed attempts whose settings have no effect.

    `standing` names the attempt that was taken and those passed over; None if the user chose one.
    """
    return [*_edited(run), *(_failed(run, standing) if standing is not None else ())]


def changes_text(changes: Sequence[Change]) -> str:
    """Format changes, such as ``optimizer.lr: 0.003 -> 0.1, zero_stage.stage: 1 -> 2``; hide
    secrets.
    """
    return ", ".join(
        f"{change.key}: {_shown(change.key, change.left)} -> {_shown(change.key, change.right)}"
        for change in changes
    )


def _shown(key: str, value: Any) -> str:
    return redact_setting(f"{key}={to_plain(value)}").partition("=")[2]


def _edited(run: RunPaths) -> list[Finding]:
    hint = f"give it as an override: trainctl resume {run.root}"
    try:
        changes = edited_by_hand(run)
    except TrainctlError as error:
        message = f"{error.message}; it has no effect: the attempts have the configuration"
        return [_warning(EDITED, message, "it is there to be read; leave it as it was")]
    if not changes:
        return []
    overrides = " ".join(
        f"{change.key}={_shown(change.key, change.right)}" for change in changes[:4]
    )
    message = (
        f"{run.config} was edited after the run was made, which has no effect: "
        f"{changes_text(changes)}"
    )
    return [_warning(EDITED, message, f"{hint} {overrides}")]


def _failed(run: RunPaths, standing: EffectiveAttempt) -> list[Finding]:
    found = []
    taken = config_of(run, standing.number) if standing.failed else None
    for number, how in standing.failed.items():
        changes = diff(taken, config_of(run, number)) if taken is not None else []
        if changes:
            message = (
                f"attempt {number} failed before its first step, and what it changed is left out: "
                f"{changes_text(changes)} ({how})"
            )
            hint = f"--attempt {number} takes it all the same"
            found.append(_warning(FAILED_AT_START, message, hint))
    return found


def _warning(rule: str, message: str, hint: str) -> Finding:
    return Finding(rule=rule, message=message, hint=hint, severity=Severity.warning)
