"""Committed checkpoints of a run: names, manifests, checksums, pointers, rotation. No torch.

A checkpoint is written under a temporary name and renamed when every file is complete, so a folder
named `step-…` with an undamaged manifest whose files all have the listed sizes is a whole one.
Everything else is ignored by whoever loads, lists or counts. Whole is what a look at names and
sizes tells; `verify` also reads every byte, and that is done before anything is loaded.

The pointers `latest` and `best` are written for people and never read.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainctl.runs.atomic import sync_directory, write_json, write_text
from trainctl.runs.layout import RunPaths

FORMAT = 1
"""Version of the manifest and of the files that it lists."""

MANIFEST = "manifest.json"
LATEST = "latest"
BEST = "best"

_NAME = re.compile(r"step-(\d{8,})")
_DIGEST = "sha256"
"""Key of the manifest's own checksum, over everything else in it."""

Reached = Callable[[str], None]
"""Told the phases of a save as they begin: a hook for tests that kill there."""


def _unwatched(phase: str) -> None:
    """No test is watching."""


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """A committed checkpoint.

    Attributes:
        step: Optimizer steps done when it was saved.
        path: Its folder.
        size_bytes: Sum of its files.
        metrics: Of the evaluation at that step, if there was one.
        kept_for: Why it is never rotated away ("stable_phase": a longer run goes on from it);
            empty if it may be.
        attempt: Number of the attempt that saved it; 0 if it does not say.
        patience: Of early stopping: `best`, `best_step` and `evaluations_since`, if anything.
    """

    step: int
    path: Path
    size_bytes: int
    metrics: dict[str, float]
    kept_for: str = ""
    attempt: int = 0
    patience: Mapping[str, float] = field(default_factory=dict)


def checkpoint_name(step: int) -> str:
    """Folder name of the checkpoint after `step` optimizer steps."""
    return f"step-{step:08d}"


def temporary_path(run: RunPaths, step: int) -> Path:
    """Where a checkpoint is written before it is committed."""
    return run.checkpoints / f".{checkpoint_name(step)}.tmp"


def write_manifest(folder: Path, fields: Mapping[str, Any]) -> None:
    """Write the manifest of a checkpoint, with the checksum of its own content.

    Raises:
        OSError: The disk is full, or the folder is gone.
    """
    write_json(folder / MANIFEST, {**fields, _DIGEST: _digest(fields)})


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint folder.

    Raises:
        ValueError: It is missing, damaged or of a newer format, or a listed file is not there with
            its size; says which.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path.name}: manifest is not readable ({error})") from None
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), list):
        raise ValueError(f"{path.name}: not a manifest")
    digest = manifest.pop(_DIGEST, None)
    if digest is not None and digest != _digest(manifest):
        raise ValueError(f"{path.name}: {MANIFEST} is damaged (its checksum does not match)")
    found = manifest.get("format")
    if not isinstance(found, int) or found > FORMAT:
        raise ValueError(
            f"{path.name}: format {found} is newer than this trainctl reads ({FORMAT})"
        )
    for entry in manifest["files"]:
        try:
            file, expected = path / Path(entry["name"]).name, int(entry["bytes"])
        except (TypeError, KeyError, ValueError):
            raise ValueError(f"{path.name}: not a manifest") from None
        size = file.stat().st_size if file.is_file() else None
        if size != expected:
            problem = "is missing" if size is None else f"has {size} bytes, not {expected}"
            raise ValueError(f"{path.name}: {file.name} {problem}")
    return manifest


def verify(path: Path) -> list[str]:
    """What is wrong with a checkpoint, having read every byte of it; empty if it is intact."""
    try:
        manifest = read_manifest(path)
    except ValueError as error:
        return [str(error)]
    return verify_files(path, manifest["files"])


def verify_files(path: Path, entries: Iterable[Mapping[str, Any]]) -> list[str]:
    """What is wrong with some of a checkpoint's files; `read_manifest` has found them in size.

    Args:
        path: The checkpoint.
        entries: From its manifest; ranks share out the work by these.
    """
    problems = []
    for entry in entries:
        file = path / Path(entry["name"]).name
        try:
            with file.open("rb") as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
        except OSError as error:
            problems.append(f"{path.name}: {file.name} cannot be read ({error.strerror})")
            continue
        if digest != entry.get("sha256"):
            problems.append(f"{path.name}: {file.name} is damaged (its checksum does not match)")
    return problems


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
    aside = []
    for number, path in reversed(checkpoint_folders(run)):
        if number > step:
            aside.append(path.rename(path.with_name(f"{path.name}.before-attempt-{attempt}")))
        elif number == step:
            _point(run, LATEST, path)
    if not checkpoint_folders(run):
        for pointer in (LATEST, BEST):
            (run.checkpoints / pointer).unlink(missing_ok=True)
    sync_directory(run.checkpoints)
    return aside


def _digest(fields: Mapping[str, Any]) -> str:
    """SHA-256 of JSON values, whatever the layout of the text that held them."""
    text = json.dumps(fields, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def list_checkpoints(run: RunPaths) -> list[CheckpointInfo]:
    """Whole checkpoints of the run, oldest first."""
    return [info for info, _ in examine(run) if info is not None]


def newest_checkpoint(run: RunPaths) -> tuple[CheckpointInfo | None, list[str]]:
    """The newest whole checkpoint, and why newer folders were passed over."""
    passed_over: list[str] = []
    for info, problem in reversed(examine(run)):
        if info is not None:
            return info, passed_over
        passed_over.append(problem)
    return None, passed_over


def checkpoint_folders(run: RunPaths) -> list[tuple[int, Path]]:
    """Step and path of every folder with a checkpoint's name, whole or not, oldest first."""
    found: list[tuple[int, Path]] = []
    if run.checkpoints.is_dir():
        for path in run.checkpoints.iterdir():
            match = _NAME.fullmatch(path.name)
            if match and path.is_dir():
                found.append((int(match[1]), path))
    return sorted(found)


def examine(run: RunPaths) -> list[tuple[CheckpointInfo | None, str]]:
    """What each of these folders is, or what is wrong with it."""
    results: list[tuple[CheckpointInfo | None, str]] = []
    for step, path in checkpoint_folders(run):
        try:
            manifest = read_manifest(path)
        except ValueError as error:
            results.append((None, str(error)))
            continue
        size = sum(entry["bytes"] for entry in manifest["files"])
        info = CheckpointInfo(
            step=step,
            path=path,
            size_bytes=size,
            metrics=dict(manifest.get("metrics", {})),
            kept_for=manifest.get("kept_for", ""),
            attempt=manifest.get("attempt", 0),
            patience=manifest.get("patience", {}),
        )
        results.append((info, ""))
    return results


def commit(run: RunPaths, step: int, reached: Reached = _unwatched) -> Path:
    """Give a complete temporary checkpoint its name, then move the `latest` pointer to it.

    A folder of that name that an earlier attempt left (it then resumed from before it) is replaced.

    Args:
        run: The run.
        step: Optimizer steps of the checkpoint.
        reached: Told ``rename`` and ``pointer`` as they begin.

    Raises:
        OSError: It could not be renamed, and does not count.
    """
    temporary, final = temporary_path(run, step), run.checkpoints / checkpoint_name(step)
    sync_directory(temporary)
    reached("rename")
    if final.exists():
        _remove(final)
    temporary.rename(final)
    sync_directory(run.checkpoints)
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
        run: The run.
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
    doomed = path.with_name(f".{path.name}.removed")
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
    """Remove what interrupted saves and deletions left."""
    if run.checkpoints.is_dir():
        for path in run.checkpoints.glob(".step-*"):
            shutil.rmtree(path, ignore_errors=True)
