"""Committed checkpoints of a run: names, pointers, rotation. No torch.

A checkpoint is written under a temporary name and renamed when every file is complete, so a folder
named `step-…` with an undamaged manifest of this run and step, whose files all have the listed
sizes, is a whole one. Everything else is ignored by whoever loads, lists or counts. Whole is what a
look at names and sizes tells; `manifest.verify` also reads every byte, and that is done before
anything is loaded.

A folder named `weights-…` has the weights alone, for everything but a resume: it is asked for by
`weights_only`, never found where a checkpoint is looked for.

The pointers `latest` and `best` are written for people and never read.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from trainctl.runs import atomic
from trainctl.runs.atomic import sync_directory, write_text
from trainctl.runs.directory import run_id
from trainctl.runs.layout import RunPaths
from trainctl.runs.manifest import NAME, read_manifest

LATEST = "latest"
BEST = "best"

Reached = Callable[[str], None]
"""Told the phases of a save as they begin: a hook for tests that kill there."""


def _unwatched(phase: str) -> None:
    """No test is watching."""


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """A committed checkpoint."""

    step: int
    """Optimizer steps done when it was saved."""
    path: Path
    size_bytes: int
    """Sum of its files."""
    metrics: dict[str, float]
    """Figures of the evaluation at that step, if there was one."""
    kept_for: str = ""
    """Why it is never rotated away ("stable_phase": a longer run goes on from it); empty if it may
    be."""
    attempt: int = 0
    """Number of the attempt that saved it; 0 if it does not say."""
    patience: Mapping[str, float] = field(default_factory=dict)
    """State of early stopping: `best`, `best_step` and `evaluations_since`, if anything."""
    weights_only: bool = False
    """Whether it has the weights alone: nothing goes on from it."""


@dataclass(frozen=True, slots=True)
class CheckpointLook:
    """What a look at a folder with a checkpoint's name found."""

    step: int
    """Optimizer step, by its name."""
    path: Path
    info: CheckpointInfo | None
    """What is known of a whole checkpoint; None if it is none."""
    problem: str
    """What is wrong with it then."""


def checkpoint_name(step: int, *, weights_only: bool = False) -> str:
    """Folder name of the checkpoint after `step` optimizer steps."""
    return f"{'weights' if weights_only else 'step'}-{step:08d}"


def temporary_path(run: RunPaths, step: int, *, weights_only: bool = False) -> Path:
    """Where a checkpoint is written before it is committed."""
    return atomic.temporary_path(run.checkpoints / checkpoint_name(step, weights_only=weights_only))


def own_id(run: RunPaths) -> str | None:
    """What the manifests of a run's checkpoints name it; None where nothing says so.

    Raises:
        TrainctlError: Its record cannot be read (exit code 5).
    """
    return run_id(run) if run.record.is_file() else None


def set_aside(path: Path) -> Path:
    """Rename a damaged checkpoint, so that it no longer counts; a person may look at it."""
    aside = path.with_name(f"{path.name}.damaged-{time.time_ns()}")
    path.rename(aside)
    return aside


def leave_behind(run: RunPaths, step: int, *, attempt: int) -> list[Path]:
    """Rename the checkpoints after `step`, whole or not, so that `step` has the newest one.

    For an attempt that goes on from an earlier one: what was trained after it stays, for a person
    to look at or to remove, and counts no more.

    Args:
        run: The run; its lock is held.
        step: Of the checkpoint to go on from; 0 is the beginning.
        attempt: Number of the attempt that goes on from it.

    Returns:
        Where they are now, the newest first: whatever interrupts this, no gap is left behind.
    """
    aside = leave_weights_behind(run, step, attempt=attempt)
    for number, path in reversed(checkpoint_folders(run)):
        if number > step:
            aside.append(_leave(path, attempt))
        elif number == step:
            _point(run, LATEST, path)
    if not checkpoint_folders(run):
        for pointer in (LATEST, BEST):
            (run.checkpoints / pointer).unlink(missing_ok=True)
    sync_directory(run.checkpoints)
    return aside


def leave_weights_behind(run: RunPaths, step: int, *, attempt: int) -> list[Path]:
    """Return the same with those of the weights alone: an attempt may not make them again."""
    later = [path for at, path in checkpoint_folders(run, weights_only=True) if at > step]
    return [_leave(path, attempt) for path in reversed(later)]


def _leave(path: Path, attempt: int) -> Path:
    return path.rename(path.with_name(f"{path.name}.before-attempt-{attempt}"))


def list_checkpoints(run: RunPaths, *, weights_only: bool = False) -> list[CheckpointInfo]:
    """Whole checkpoints of the run, oldest first; those of the weights alone if these are asked
    for."""
    looks = examine(run, weights_only=weights_only)
    return [look.info for look in looks if look.info is not None]


def newest_checkpoint(run: RunPaths) -> tuple[CheckpointInfo | None, list[str]]:
    """Return the newest whole checkpoint, and why newer folders were passed over."""
    passed_over: list[str] = []
    for look in reversed(examine(run)):
        if look.info is not None:
            return look.info, passed_over
        passed_over.append(look.problem)
    return None, passed_over


def checkpoint_folders(run: RunPaths, *, weights_only: bool = False) -> list[tuple[int, Path]]:
    """Step and path of every folder with a checkpoint's name, whole or not, oldest first."""
    found: list[tuple[int, Path]] = []
    if run.checkpoints.is_dir():
        for path in run.checkpoints.iterdir():
            match = NAME.fullmatch(path.name)
            if match and (match[1] == "weights") == weights_only and path.is_dir():
                found.append((int(match[2]), path))
    return sorted(found)


def examine(run: RunPaths, *, weights_only: bool = False) -> list[CheckpointLook]:
    """What each of these folders is, or what is wrong with it."""
    run_id = own_id(run)
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
            )
        looks.append(CheckpointLook(step, path, info, problem))
    return looks


def commit(
    run: RunPaths, step: int, reached: Reached = _unwatched, *, weights_only: bool = False
) -> Path:
    """Give a complete temporary checkpoint its name, then move the `latest` pointer to it.

    A folder of that name that an earlier attempt left (it then resumed from before it) is replaced.

    Args:
        step: Optimizer steps of the checkpoint.
        reached: Told ``rename`` and ``pointer`` as they begin.
        weights_only: Of the weights alone; `latest` stays where it is.

    Raises:
        OSError: It could not be renamed, and does not count.
    """
    temporary = temporary_path(run, step, weights_only=weights_only)
    final = run.checkpoints / checkpoint_name(step, weights_only=weights_only)
    sync_directory(temporary)
    reached("rename")
    if final.exists():
        _remove(final)
    temporary.rename(final)
    sync_directory(run.checkpoints)
    if not weights_only:
        reached("pointer")
        _point(run, LATEST, final)
    return final


def rotate(
    run: RunPaths, *, keep: int, best_of: str | None, reached: Reached = _unwatched
) -> list[Path]:
    """Delete all but the newest `keep` whole checkpoints, the best and those kept for a purpose.

    The best has the smallest `best_of` among the metrics in the manifests; the `best` pointer names
    it. Folders that are not whole checkpoints are left for a person to look at.

    Args:
        keep: Number of the newest to keep, at least 1.
        best_of: Metric of the best.
        reached: Told ``rotation`` when there is something to delete.

    Returns:
        Those that went.

    Raises:
        OSError: One could not be deleted.
    """
    checkpoints = list_checkpoints(run)
    kept = {info.path for info in checkpoints[-keep:]}
    kept |= {info.path for info in checkpoints if info.kept_for}
    if best_of is not None:
        scored = [info for info in checkpoints if best_of in info.metrics]
        if scored:
            best = min(scored, key=lambda info: info.metrics[best_of])
            kept.add(best.path)
            _point(run, BEST, best.path)
    removed = [info.path for info in checkpoints if info.path not in kept]
    for path in removed:
        _remove(path, reached)
    return removed


def rotate_weights(run: RunPaths, *, keep: int | None, reached: Reached = _unwatched) -> list[Path]:
    """Delete all but the newest `keep` of the weights alone; None keeps all.

    Returns:
        Those that went.

    Raises:
        OSError: One could not be deleted.
    """
    found = list_checkpoints(run, weights_only=True) if keep is not None else []
    removed = [info.path for info in found[: -(keep or 0)]]
    for path in removed:
        _remove(path, reached)
    return removed


def delete(run: RunPaths, path: Path) -> None:
    """Delete one checkpoint and take the pointers off it; call it while holding the run's lock.

    Raises:
        OSError: It could not be deleted.
    """
    _remove(path)
    newest, _ = newest_checkpoint(run)
    if newest is not None:
        _point(run, LATEST, newest.path)
    else:
        (run.checkpoints / LATEST).unlink(missing_ok=True)
    best = run.checkpoints / BEST
    if best.is_file() and best.read_text().strip() == path.name:
        best.unlink()


def _remove(path: Path, reached: Reached = _unwatched) -> None:
    """Delete a checkpoint; renamed first, so that one whose deletion is cut short never counts."""
    doomed = atomic.temporary_path(path, "removed")
    shutil.rmtree(doomed, ignore_errors=True)
    path.rename(doomed)
    reached("rotation")
    shutil.rmtree(doomed)


def _point(run: RunPaths, pointer: str, path: Path) -> None:
    """Move a pointer; it is a convenience, so a disk that is full for it spoils no checkpoint."""
    try:
        write_text(run.checkpoints / pointer, path.name + "\n")
    except OSError as error:
        print(f"the pointer {pointer} stays where it was: {error}", flush=True)


def clean_temporary(run: RunPaths) -> None:
    """Remove what interrupted saves and deletions left; nobody else may be writing here."""
    atomic.sweep_temporary(run.checkpoints)
