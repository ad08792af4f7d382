"""Folder of a sweep: `sweep.json`, and the runs `0`, `1`, ... beside it."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from trainctl.config.codec import from_plain, to_plain
from trainctl.config.overrides import SweepPoint
from trainctl.config.reading import read_json
from trainctl.errors import ExitCode, RunStateError, TrainctlError
from trainctl.runs.directory import is_run
from trainctl.runs.failures import Cause
from trainctl.runs.files import write_json
from trainctl.runs.layout import RunPaths
from trainctl.runs.listing import RunSummary, summarise_run
from trainctl.runs.provenance import redact_argv
from trainctl.runs.records import events_from_end, number, read_events
from trainctl.runs.status import State

SWEEP_SCHEMA = 1
"""Version of `sweep.json`."""
RECORD = "sweep.json"
DEFAULT_ROOT = Path("sweeps")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """Content of `sweep.json`."""

    created: float
    """Creation time, in Unix seconds."""
    overrides: tuple[str, ...]
    points: tuple[dict[str, str], ...]
    """The swept keys and values of each run, by its index."""
    runs: tuple[tuple[str, ...], ...] = ()
    """All overrides of each run, with one value each; a run without a directory is made from them.
    """
    config_dir: str | None = None
    """The user's own configuration folder (`--config-dir`), if there is one."""
    schema: int = SWEEP_SCHEMA


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """State and result of one run of a sweep."""

    index: int
    values: dict[str, str]
    """Values of the swept keys."""
    summary: RunSummary | None
    """Summary of its directory; None while that is not made or is damaged."""
    held_out_loss: float | None
    """Loss of the newest evaluation, in nats per token."""


class SweepAction(StrEnum):
    """Action for a run when its sweep is resumed."""

    make = "make"
    """Make the run: it has no directory yet."""
    start = "start"
    """Start its newest attempt, which was made but never started."""
    resume = "resume"
    """Resume it, from its newest checkpoint or the beginning: it was interrupted."""
    leave = "leave"
    """Leave it: it is done, or runs, or would fail again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemainingRun:
    """Work left on one run of a sweep."""

    index: int
    run: RunPaths
    next: SweepAction
    """Action for the run when its sweep is resumed."""
    why: str
    """Reason, in words."""


def new_sweep(
    folder: Path | None,
    overrides: Sequence[str],
    points: Sequence[SweepPoint],
    config_dir: Path | None = None,
) -> Path:
    """Make the folder of a sweep.

    Args:
        folder: The folder; None makes one under `sweeps/`.
        config_dir: The user's own configuration folder.

    Raises:
        TrainctlError: The folder is not empty, or cannot be made (exit code 5).
    """
    if folder is None:
        recipe = next((text for text in overrides if text.startswith("recipe=")), "sweep")
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", recipe.partition("=")[2] or recipe)
        stamp = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        folder = DEFAULT_ROOT / f"{name.strip('-.') or 'sweep'}-{stamp}"
    folder = folder.resolve()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        taken = sorted(path.name for path in folder.iterdir())
    except OSError as error:
        raise RunStateError(f"cannot make the sweep's folder: {error}") from None
    if taken:
        raise RunStateError(
            f"{folder} is not empty: it holds {', '.join(taken[:3])}",
            hint="name a new folder; `trainctl sweep FOLDER` shows one that is there",
        )
    sweep = Sweep(
        created=time.time(),
        overrides=tuple(redact_argv(overrides)),
        points=tuple(point.values for point in points),
        runs=tuple(tuple(redact_argv(point.overrides)) for point in points),
        config_dir=None if config_dir is None else str(config_dir.absolute()),
    )
    write_json(folder / RECORD, to_plain(sweep))
    return folder


def read_sweep(folder: Path) -> Sweep:
    """Return the sweep in a folder.

    Raises:
        TrainctlError: The folder has no sweep (exit code 5).
    """
    try:
        return from_plain(Sweep, read_json(folder / RECORD))
    except (OSError, ValueError, TypeError) as error:
        raise RunStateError(
            f"{folder} is no sweep: {error}", hint="trainctl sweep recipe=NAME KEY=1,2 makes one"
        ) from None


def is_sweep(folder: Path) -> bool:
    """Return True if a folder holds the record of a sweep."""
    return (folder / RECORD).is_file()


def existing_runs(folder: Path) -> list[RunPaths]:
    """Return the runs of a sweep that have a directory, by index.

    Raises:
        TrainctlError: The folder is no sweep, or has no run yet (exit code 5).
    """
    runs = [RunPaths((folder / str(n)).resolve()) for n in range(len(read_sweep(folder).points))]
    made = [run for run in runs if is_run(run.root)]
    if not made:
        raise RunStateError(
            f"none of the {len(runs)} runs of the sweep {folder} has been made yet",
            hint=f"trainctl sweep {folder} --resume makes them",
        )
    return made


def remaining_runs(folder: Path) -> list[RemainingRun]:
    """Return the work left on each run, by index.

    Raises:
        TrainctlError: The folder is no sweep, or a run's record is damaged (exit code 5).
    """
    found = []
    for index in range(len(read_sweep(folder).points)):
        run = RunPaths((folder / str(index)).resolve())
        what, why = _next_action(run)
        found.append(RemainingRun(index=index, run=run, next=what, why=why))
    return found


def _next_action(run: RunPaths) -> tuple[SweepAction, str]:
    if not is_run(run.root):
        return SweepAction.make, "not made yet"
    summary = summarise_run(run)
    if summary.is_live or summary.state == State.finished:
        return SweepAction.leave, summary.state
    if summary.state == State.failed and _fails_again(run, summary):
        return SweepAction.leave, f"failed by itself: {summary.message}"
    launched = {event["attempt"] for event in read_events(run.events, "launch")}
    if summary.attempt and summary.attempt not in launched:
        return SweepAction.start, "not started yet"
    return SweepAction.resume, f"{summary.state} at step {summary.step:,}"


def _fails_again(run: RunPaths, summary: RunSummary) -> bool:
    """Return True if trainctl itself reported that the training fails (a NaN loss, say)."""
    if summary.exit_code != ExitCode.training_failed:
        return False
    failures = read_events(run.events, "failure")
    causes = {event["cause"] for event in failures if event["attempt"] == summary.attempt}
    return Cause.reported.value in causes


def sweep_results(folder: Path) -> list[Result]:
    """Return the results of a sweep's runs, by index."""
    found = []
    for index, values in enumerate(read_sweep(folder).points):
        run = RunPaths((folder / str(index)).resolve())
        try:
            summary = summarise_run(run)
        except TrainctlError:
            summary = None
        found.append(
            Result(index=index, values=values, summary=summary, held_out_loss=_held_out_loss(run))
        )
    return found


def _held_out_loss(run: RunPaths) -> float | None:
    evaluations = events_from_end(run.events, "evaluation")
    last = next((event["loss"] for event in evaluations if "loss" in event), None)
    return None if last is None else number(last)
