"""The attempt whose configuration is the run's, for every command that is given a run.

It is the newest attempt that did not fail before its first step: what a failed attempt was started
with did not work, so nothing continues from it unless the user asks for that.
Warnings name the settings that have no effect: of a failed attempt, or in an edited `config.yaml`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainctl.config.codec import to_plain
from trainctl.config.schema import RunConfig
from trainctl.config.secrets import redact_setting
from trainctl.config.store import Change, diff_configs, load_config
from trainctl.errors import Finding, RunStateError, Severity, TrainctlError
from trainctl.runs.directory import is_run, last_attempt, open_run, read_plan
from trainctl.runs.failures import OF_THE_DISK, Cause, describe_failure
from trainctl.runs.layout import RunPaths
from trainctl.runs.records import Event, events_from_end

_TAIL_BYTES = 1 << 20
"""Part of the records that is read: attempts that failed at their start leave a few lines each."""

_PROGRESS_RECORDS = ("step", "end", "program")
"""Kinds of records that show that an attempt got going (`program`: a user's program)."""

_OF_THE_MACHINE = tuple(cause.value for cause in (Cause.lost_node, *OF_THE_DISK))
"""Causes of a failure that lie in the machine, not in the configuration."""


@dataclass(frozen=True, slots=True)
class EffectiveAttempt:
    """The attempt that stands for the run."""

    number: int
    """Number of the attempt; 0 before the first."""
    failed: dict[int, str] = field(default_factory=dict)
    """Newer attempts that failed before their first step, newest first, with a sentence."""


def effective_attempt(run: RunPaths) -> EffectiveAttempt:
    """Return the newest attempt that did not fail before its first step; the newest one if all did.

    An attempt that was stopped before its first step, or whose launcher was killed, has not failed.
    """
    newest = last_attempt(run)
    records = _last_records(run.events)
    failed: dict[int, str] = {}
    for number in range(newest, 0, -1):
        how = _failure_at_start([event for event in records if event.get("attempt") == number])
        if how is None:
            return EffectiveAttempt(number, failed)
        failed[number] = how
    return EffectiveAttempt(newest)


def config_of(run: RunPaths, attempt: int | None = None) -> RunConfig:
    """Return the configuration of an attempt.

    Args:
        attempt: Number of the attempt; None is the one that stands for the run, or `config.yaml`
            before the first.

    Raises:
        TrainctlError: There is no such attempt, or its files are damaged (exit code 5).
    """
    number = effective_attempt(run).number if attempt is None else attempt
    file = run.attempt(number).plan
    if file.is_file():
        return read_plan(file).config
    if attempt is not None:
        there = last_attempt(run)
        raise RunStateError(
            f"{run.root} has no attempt {attempt}",
            hint=f"attempts: 1 to {there}" if there else "nothing of it was started yet",
        )
    return load_config(run.config)


def edited_by_hand(run: RunPaths) -> list[Change]:
    """Return the user's later changes to `config.yaml`; it is not read from the first attempt on.

    Raises:
        TrainctlError: `config.yaml` is not a configuration any more (exit code 5).
    """
    first = run.attempt(1).plan
    return diff_configs(read_plan(first).config, load_config(run.config)) if first.is_file() else []


def find_attempt(path: Path) -> tuple[RunPaths, int | None] | None:
    """Return the run in a directory, or run and attempt of a `RUN/attempts/N`; None for neither.

    Raises:
        TrainctlError: The run's record is damaged (exit code 5).
    """
    if is_run(path):
        return open_run(path), None
    parents = path.absolute().parents
    if path.name.isdecimal() and path.parent.name == "attempts" and is_run(parents[1]):
        return open_run(parents[1]), int(path.name)
    return None


def _failure_at_start(records: Iterable[Event]) -> str | None:
    """Return how an attempt failed before its first step; None if it did not."""
    found: str | None = None
    launched = False
    for event in records:
        launched |= event["event"] == "launch"
        if event["event"] in _PROGRESS_RECORDS:
            return None
        if event["event"] == "failure" and found is None and not _is_the_machines(event):
            found = describe_failure(event)
    return found if launched else None


def _is_the_machines(failure: Event) -> bool:
    return bool(failure.get("launcher_lost")) or failure.get("cause") in _OF_THE_MACHINE


def _last_records(path: Path) -> list[Event]:
    """Return records near the end of the file, oldest first; none if there is no file."""
    try:
        return list(events_from_end(path, most_bytes=_TAIL_BYTES))[::-1]
    except TrainctlError:
        return []


EDITED, FAILED_AT_START = "TC045", "TC046"


def ignored_config_findings(run: RunPaths, standing: EffectiveAttempt | None) -> list[Finding]:
    """Return warnings of edits and of failed attempts whose settings have no effect.

    `standing` names the attempt that was taken and those passed over; None if the user chose one.
    """
    return [
        *_edited_findings(run),
        *(_failed_at_start_findings(run, standing) if standing is not None else ()),
    ]


def changes_text(changes: Sequence[Change]) -> str:
    """Format changes, such as ``optimizer.lr: 0.003 -> 0.1, zero_stage.stage: 1 -> 2``; hide
    secrets.
    """
    return ", ".join(
        f"{change.key}: {_shown_value(change.key, change.left)} -> "
        f"{_shown_value(change.key, change.right)}"
        for change in changes
    )


def _shown_value(key: str, value: Any) -> str:
    return redact_setting(f"{key}={to_plain(value)}").partition("=")[2]


def _edited_findings(run: RunPaths) -> list[Finding]:
    hint = f"give it as an override: trainctl resume {run.root}"
    try:
        changes = edited_by_hand(run)
    except TrainctlError as error:
        message = f"{error.message}; it has no effect: the attempts have the configuration"
        return [_warning(EDITED, message, "it is there to be read; leave it as it was")]
    if not changes:
        return []
    overrides = " ".join(
        f"{change.key}={_shown_value(change.key, change.right)}" for change in changes[:4]
    )
    message = (
        f"{run.config} was edited after the run was made, which has no effect: "
        f"{changes_text(changes)}"
    )
    return [_warning(EDITED, message, f"{hint} {overrides}")]


def _failed_at_start_findings(run: RunPaths, standing: EffectiveAttempt) -> list[Finding]:
    found = []
    taken = config_of(run, standing.number) if standing.failed else None
    for number, how in standing.failed.items():
        changes = diff_configs(taken, config_of(run, number)) if taken is not None else []
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
