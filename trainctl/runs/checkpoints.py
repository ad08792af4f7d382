"""Committed checkpoints of a run: names, pointers, rotation. No torch.

A checkpoint is written under a temporary name and renamed when every file is complete. So a folder
named `step-…` is whole if its manifest is undamaged, names this run and step, and lists files that
all have their sizes. Loading, listing and counting ignore every other folder. This checks names and
sizes only; `manifest.verify` also reads every byte, and is called before anything is loaded.

A folder named `weights-…` has the weights alone, for every use but a resume. Functions return it
only with `weights_only`.

The pointers `latest` and `best` are written for people and never read.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from trainctl.config.schema import CheckpointConfig
from trainctl.runs import files
from trainctl.runs.directory import run_id
from trainctl.runs.files import sync_directory, write_text
from trainctl.runs.layout import RunPaths
from trainctl.runs.manifest import NAME, UNFINISHED, read_manifest

LATEST = "latest"
BEST = "best"

Spare = Callable[[Sequence["CheckpointInfo"], set[Path]], set[Path]]
"""Returns checkpoints to keep, from all and those that are kept anyway."""

PhaseHook = Callable[[str], None]
"""Called with each phase of a save as it begins: a hook for tests that kill the process there."""


def _ignore_phase(phase: str) -> None:
    """Do nothing: the default hook."""


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """A committed checkpoint."""

    step: int
    """Optimizer steps done when it was saved."""
    path: Path
    size_bytes: int
    """Sum of the sizes of its files."""
    metrics: dict[str, float]
    """Metrics of the evaluation at that step, if there was one."""
    kept_for: str = ""
    """Reason never to rotate it away ("stable_phase": longer runs start from it); may be empty."""
    attempt: int = 0
    """Number of the attempt that saved it; 0 if unknown."""
    patience: Mapping[str, float] = field(default_factory=dict)
    """State of early stopping: `best`, `best_step`, `evaluations_since`; may be empty."""
    weights_only: bool = False
    """Whether it has the weights alone, so that nothing can resume from it."""
    is_unfinished: bool = False
    """Whether an evaluation or another hook of its step was not done: a resume does it."""


@dataclass(frozen=True, slots=True)
class CheckpointStatus:
    """Result of checking a folder with a checkpoint's name."""

    step: int
    """Optimizer step in its name."""
    path: Path
    info: CheckpointInfo | None
    """The checkpoint; None if it is not whole."""
    problem: str
    """Reason why it is not whole; empty if it is."""


def checkpoint_name(step: int, *, weights_only: bool = False) -> str:
    """Return the folder name of the checkpoint after `step` optimizer steps."""
    return f"{'weights' if weights_only else 'step'}-{step:08d}"


def temporary_path(run: RunPaths, step: int, *, weights_only: bool = False) -> Path:
    """Return the folder in which a checkpoint is written before it is committed."""
    return files.temporary_path(run.checkpoints / checkpoint_name(step, weights_only=weights_only))


def manifest_run_id(run: RunPaths) -> str | None:
    """Return the run id that manifests of its checkpoints must have; None if the run has no record.

    Raises:
        TrainctlError: Its record cannot be read (exit code 5).
    """
    return run_id(run) if run.record.is_file() else None


def quarantine_checkpoint(path: Path) -> Path:
    """Rename a damaged checkpoint, so that it no longer counts, and return its new path."""
    aside = path.with_name(f"{path.name}.damaged-{time.time_ns()}")
    path.rename(aside)
    return aside


def archive_later_checkpoints(run: RunPaths, step: int, *, attempt: int) -> list[Path]:
    """Rename the checkpoints after `step`, whole or not, so that `step` has the newest one.

    For an attempt that resumes from an earlier checkpoint: later checkpoints stay on disk for a
    person to inspect or remove, but count no more. Hold the run's lock.

    Args:
        step: Step of the checkpoint to resume from; 0 is the beginning.
        attempt: Number of the attempt that resumes from it.

    Returns:
        Their new paths, the newest first: an interruption leaves no gap between the remaining ones.
    """
    aside = archive_later_weights(run, step, attempt=attempt)
    for number, path in reversed(checkpoint_folders(run)):
        if number > step:
            aside.append(_move_aside(path, attempt))
        elif number == step:
            _update_link(run, LATEST, path)
    if not checkpoint_folders(run):
        for pointer in (LATEST, BEST):
            (run.checkpoints / pointer).unlink(missing_ok=True)
    sync_directory(run.checkpoints)
    return aside


def archive_later_weights(run: RunPaths, step: int, *, attempt: int) -> list[Path]:
    """Rename the weights-only checkpoints after `step`, and return their new paths, newest first.

    The attempt that resumes from `step` may not save them again.
    """
    later = [path for at, path in checkpoint_folders(run, weights_only=True) if at > step]
    return [_move_aside(path, attempt) for path in reversed(later)]


def _move_aside(path: Path, attempt: int) -> Path:
    return path.rename(path.with_name(f"{path.name}.before-attempt-{attempt}"))


def list_checkpoints(run: RunPaths, *, weights_only: bool = False) -> list[CheckpointInfo]:
    """Return the whole checkpoints of the run, or its weights-only checkpoints, oldest first."""
    looks = examine_checkpoints(run, weights_only=weights_only)
    return [look.info for look in looks if look.info is not None]


def newest_checkpoint(run: RunPaths) -> tuple[CheckpointInfo | None, list[str]]:
    """Return the newest whole checkpoint, and the problem of each newer folder."""
    passed_over: list[str] = []
    for look in reversed(examine_checkpoints(run)):
        if look.info is not None:
            return look.info, passed_over
        passed_over.append(look.problem)
    return None, passed_over


def checkpoint_folders(run: RunPaths, *, weights_only: bool = False) -> list[tuple[int, Path]]:
    """Return step and path of every folder with a checkpoint's name, whole or not, oldest first."""
    found: list[tuple[int, Path]] = []
    if run.checkpoints.is_dir():
        for path in run.checkpoints.iterdir():
            match = NAME.fullmatch(path.name)
            if match and (match[1] == "weights") == weights_only and path.is_dir():
                found.append((int(match[2]), path))
    return sorted(found)


def examine_checkpoints(run: RunPaths, *, weights_only: bool = False) -> list[CheckpointStatus]:
    """Check every folder with a checkpoint's name, whole or not, oldest first."""
    run_id = manifest_run_id(run)
    looks = []
    for step, path in checkpoint_folders(run, weights_only=weights_only):
        info, problem = None, ""
        try:
            manifest = read_manifest(path, run_id)
        except ValueError as error:
            problem = str(error)
        else:
            info = CheckpointInfo(
                step=step,
                path=path,
                size_bytes=sum(entry["bytes"] for entry in manifest["files"]),
                metrics=manifest["metrics"],
                kept_for=manifest.get("kept_for", ""),
                attempt=manifest.get("attempt", 0),
                patience=manifest.get("patience", {}),
                weights_only=weights_only,
                is_unfinished=bool(manifest.get(UNFINISHED)),
            )
        looks.append(CheckpointStatus(step, path, info, problem))
    return looks


def commit_checkpoint(
    run: RunPaths, step: int, reached: PhaseHook = _ignore_phase, *, weights_only: bool = False
) -> Path:
    """Rename a complete temporary checkpoint to its final name, then update the `latest` pointer.

    An existing folder of that name, saved before the run resumed from an earlier step, is replaced.

    Args:
        step: Optimizer steps of the checkpoint.
        reached: Called with ``rename`` and ``pointer`` as they begin.
        weights_only: Whether it has the weights alone; `latest` then stays.

    Raises:
        OSError: It could not be renamed, and does not count.
    """
    temporary = temporary_path(run, step, weights_only=weights_only)
    final = run.checkpoints / checkpoint_name(step, weights_only=weights_only)
    sync_directory(temporary)
    reached("rename")
    if os.path.lexists(final):
        _remove(final)
    temporary.rename(final)
    sync_directory(run.checkpoints)
    if not weights_only:
        reached("pointer")
        _update_link(run, LATEST, final)
    return final


def kept_checkpoints(
    checkpoints: Sequence[CheckpointInfo], config: CheckpointConfig, *, weights_only: bool = False
) -> set[Path]:
    """Return the checkpoints of one kind that `checkpoint.keep` and its like keep.

    They are the newest, the best by `checkpoint.best_of`, and those with a `kept_for`.

    Args:
        checkpoints: Whole checkpoints, oldest first.
    """
    if weights_only:
        keep = config.weights_only_keep
        return {info.path for info in checkpoints[-(keep or 0) :]}
    kept = {info.path for info in checkpoints[-config.keep :]}
    kept |= {info.path for info in checkpoints if info.kept_for}
    best = best_checkpoint(checkpoints, config.best_of)
    return kept if best is None else kept | {best.path}


def best_checkpoint(
    checkpoints: Sequence[CheckpointInfo], metric: str | None
) -> CheckpointInfo | None:
    """Return the checkpoint with the smallest metric; None if none has it."""
    scored = [info for info in checkpoints if metric is not None and metric in info.metrics]
    return min(scored, key=lambda info: info.metrics[metric or ""], default=None)


def rotate_checkpoints(
    run: RunPaths,
    config: CheckpointConfig,
    *,
    weights_only: bool = False,
    spare: Spare | None = None,
    reached: PhaseHook = _ignore_phase,
) -> list[Path]:
    """Delete whole checkpoints of one kind that are not to be kept (`kept_checkpoints`).

    The `best` pointer names the best. Folders that are not whole checkpoints are left for a person
    to look at.

    Args:
        spare: Returns more checkpoints to keep; None keeps no more.
        reached: Called with ``rotation`` before each deletion.

    Returns:
        The deleted folders.

    Raises:
        OSError: One could not be deleted.
    """
    if weights_only and config.weights_only_keep is None:
        return []
    checkpoints = list_checkpoints(run, weights_only=weights_only)
    kept = kept_checkpoints(checkpoints, config, weights_only=weights_only)
    best = None if weights_only else best_checkpoint(checkpoints, config.best_of)
    if best is not None:
        _update_link(run, BEST, best.path)
    if spare is not None:
        kept |= spare(checkpoints, kept)
    removed = [info.path for info in checkpoints if info.path not in kept]
    for path in removed:
        _remove(path, reached)
    return removed


def delete_checkpoint(run: RunPaths, path: Path) -> None:
    """Delete one checkpoint and update the pointers. Hold the run's lock.

    Raises:
        OSError: It could not be deleted.
    """
    _remove(path)
    newest, _ = newest_checkpoint(run)
    if newest is not None:
        _update_link(run, LATEST, newest.path)
    else:
        (run.checkpoints / LATEST).unlink(missing_ok=True)
    best = run.checkpoints / BEST
    if best.is_file() and best.read_text().strip() == path.name:
        best.unlink()


def _remove(path: Path, reached: PhaseHook = _ignore_phase) -> None:
    """Delete a checkpoint, renamed first, so that an interrupted deletion leaves none."""
    doomed = files.temporary_path(path, "removed")
    with suppress(OSError):
        files.remove_path(doomed)
    path.rename(doomed)
    reached("rotation")
    files.remove_path(doomed)


def _update_link(run: RunPaths, pointer: str, path: Path) -> None:
    """Update a pointer. It is a convenience, so a failure (a full disk) is only printed."""
    try:
        write_text(run.checkpoints / pointer, path.name + "\n")
    except OSError as error:
        print(f"the pointer {pointer} stays where it was: {error}", flush=True)


def clean_temporary(run: RunPaths) -> None:
    """Remove what interrupted saves and deletions left; no other process may be writing here."""
    files.remove_stale_temporary(run.checkpoints)
