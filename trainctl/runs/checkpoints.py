"""Committed checkpoints of a run: names, manifests, pointers, rotation. No torch.

A checkpoint is written under a temporary name and renamed when every file is complete, so a folder
named `step-…` with a readable manifest whose files all have the listed sizes is a whole one.
Everything else is ignored by whoever loads, lists or counts.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainctl.runs.atomic import sync_directory, write_text
from trainctl.runs.layout import RunPaths

FORMAT = 1
"""Version of the manifest and of the files that it lists."""

MANIFEST = "manifest.json"
LATEST = "latest"
BEST = "best"

_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """A committed checkpoint.

    Attributes:
        step: Optimizer steps done when it was saved.
        path: Its folder.
        size_bytes: Sum of its files.
        metrics: Of the evaluation at that step, if there was one.
    """

    step: int
    path: Path
    size_bytes: int
    metrics: dict[str, float]


def checkpoint_name(step: int) -> str:
    """Folder name of the checkpoint after `step` optimizer steps."""
    return f"step-{step:08d}"


def temporary_path(run: RunPaths, step: int) -> Path:
    """Where a checkpoint is written before it is committed."""
    return run.checkpoints / f".{checkpoint_name(step)}.tmp"


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint folder.

    Raises:
        ValueError: It is missing, unreadable, of a newer format, or a listed file is not there
            with its size; says which.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path.name}: manifest is not readable ({error})") from None
    if not isinstance(manifest, dict) or not isinstance(manifest.get("files"), list):
        raise ValueError(f"{path.name}: not a manifest")
    if manifest.get("format", 0) > FORMAT:
        raise ValueError(
            f"{path.name}: format {manifest['format']} is newer than this trainctl reads ({FORMAT})"
        )
    for entry in manifest["files"]:
        file = path / Path(entry["name"]).name
        size = file.stat().st_size if file.is_file() else None
        if size != entry["bytes"]:
            found = "is missing" if size is None else f"has {size} bytes, not {entry['bytes']}"
            raise ValueError(f"{path.name}: {file.name} {found}")
    return manifest


def list_checkpoints(run: RunPaths) -> list[CheckpointInfo]:
    """Whole checkpoints of the run, oldest first."""
    return [info for info, _ in _examine(run) if info is not None]


def newest_checkpoint(run: RunPaths) -> tuple[CheckpointInfo | None, list[str]]:
    """The newest whole checkpoint, and why newer folders were passed over."""
    passed_over: list[str] = []
    for info, problem in reversed(_examine(run)):
        if info is not None:
            return info, passed_over
        passed_over.append(problem)
    return None, passed_over


def _examine(run: RunPaths) -> list[tuple[CheckpointInfo | None, str]]:
    """Every folder with a checkpoint's name, oldest first: what it is, or what is wrong with it."""
    found: list[tuple[int, Path]] = []
    if run.checkpoints.is_dir():
        for path in run.checkpoints.iterdir():
            match = _NAME.fullmatch(path.name)
            if match and path.is_dir():
                found.append((int(match[1]), path))
    results: list[tuple[CheckpointInfo | None, str]] = []
    for step, path in sorted(found):
        try:
            manifest = read_manifest(path)
        except ValueError as error:
            results.append((None, str(error)))
            continue
        size = sum(entry["bytes"] for entry in manifest["files"])
        results.append((CheckpointInfo(step, path, size, dict(manifest.get("metrics", {}))), ""))
    return results


def commit(run: RunPaths, step: int) -> Path:
    """Give a complete temporary checkpoint its name, then move the `latest` pointer to it.

    A folder of that name that an earlier attempt left (it then resumed from before it) is replaced.
    """
    temporary, final = temporary_path(run, step), run.checkpoints / checkpoint_name(step)
    sync_directory(temporary)
    if final.exists():
        shutil.rmtree(final)
    temporary.rename(final)
    sync_directory(run.checkpoints)
    write_text(run.checkpoints / LATEST, final.name + "\n")
    return final


def rotate(run: RunPaths, *, keep: int, best_of: str | None) -> list[Path]:
    """Delete all but the newest `keep` whole checkpoints and the best one; say which went.

    The best has the smallest `best_of` among the metrics in the manifests; the `best` pointer names
    it. Folders that are not whole checkpoints are left for a person to look at.
    """
    checkpoints = list_checkpoints(run)
    kept = {info.path for info in checkpoints[-keep:]}
    if best_of is not None:
        scored = [info for info in checkpoints if best_of in info.metrics]
        if scored:
            best = min(scored, key=lambda info: info.metrics[best_of])
            kept.add(best.path)
            write_text(run.checkpoints / BEST, best.path.name + "\n")
    removed = [info.path for info in checkpoints if info.path not in kept]
    for path in removed:
        # Renamed first: a deletion that is cut short must not leave a folder that looks whole.
        doomed = path.with_name(f".{path.name}.removed")
        path.rename(doomed)
        shutil.rmtree(doomed)
    return removed


def clean_temporary(run: RunPaths) -> None:
    """Remove what interrupted saves and deletions left."""
    if run.checkpoints.is_dir():
        for path in run.checkpoints.glob(".step-*"):
            shutil.rmtree(path, ignore_errors=True)
