"""Selection of the checkpoint that a command uses, with verification."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trainctl.errors import RunStateError, TrainctlError
from trainctl.runs.attempts import config_of
from trainctl.runs.checkpoints import (
    best_checkpoint,
    checkpoint_folders,
    examine_checkpoints,
    list_checkpoints,
    manifest_run_id,
    newest_checkpoint,
)
from trainctl.runs.layout import RunPaths
from trainctl.runs.manifest import read_manifest, verify_files
from trainctl.runs.records import Progress

Warn = Callable[[str], None]
"""Called with the text of a warning."""

_SHOWN_STEPS = 10
"""Steps at each end that a message names."""


def choose_checkpoint(
    run: RunPaths, progress: Progress, warn: Warn, *, step: int | None = None, best: bool = False
) -> Path:
    """Return an intact checkpoint, with every byte verified; warn of damaged ones passed over.

    Args:
        step: Step of the checkpoint; None takes the best or the newest that is intact.
        best: Take the one with the lowest `checkpoint.best_of` metric, by default held-out loss.

    Raises:
        TrainctlError: There is no intact checkpoint, or the one of `step` is damaged (exit code 5).
    """
    if step is not None and best:
        raise TrainctlError("--step and --best name two checkpoints", hint="leave one of them out")
    for path in candidates(run, step=step, best=best):
        problems = verify_checkpoint(run, path, progress)
        if not problems:
            return path
        if step is not None:
            raise RunStateError(problems[0])
        warn(f"checkpoint passed over: {problems[0]}")
    raise RunStateError(f"{run.root} has no intact checkpoint")


def candidates(run: RunPaths, *, step: int | None, best: bool) -> list[Path]:
    """Return the checkpoint folders in the order to try them; at least one.

    Raises:
        TrainctlError: There is none (exit code 5).
    """
    if step is not None or not best:
        return [
            path for _, path in reversed(select_checkpoints(run, None if step is None else [step]))
        ]
    metric = config_of(run).checkpoint.best_of or "loss"
    found = [info for alone in (False, True) for info in list_checkpoints(run, weights_only=alone)]
    scored = [info for info in found if metric in info.metrics]
    if not scored:
        raise RunStateError(
            f"no checkpoint of {run.root} was saved at an evaluation: none is the best by {metric}",
            hint="name one with --step; checkpoint.best_of keeps the best of a run",
        )
    return [info.path for info in sorted(scored, key=lambda info: info.metrics[metric])]


def select_checkpoints(run: RunPaths, steps: Sequence[int] | None = None) -> list[tuple[int, Path]]:
    """Return step and path of the checkpoints of these steps, or of all, oldest first.

    Damaged and weights-only checkpoints are included; the latter come before the full checkpoint
    of their step.

    Raises:
        TrainctlError: There is no checkpoint, or none of one of the steps (exit code 5).
    """
    alone = checkpoint_folders(run, weights_only=True)
    folders = sorted([*alone, *checkpoint_folders(run)], key=lambda item: item[0])
    if not folders:
        raise RunStateError(f"{run.root} has no checkpoint")
    here = list(dict.fromkeys(step for step, _ in folders))
    for step in steps or ():
        if step not in here:
            raise RunStateError(
                f"{run.root} has no checkpoint of step {step}",
                hint=f"steps with a checkpoint: {steps_text(here)}",
            )
    return [item for item in folders if steps is None or item[0] in steps]


def steps_text(steps: Sequence[int]) -> str:
    """Return steps as text, the first and last of many."""
    shown = [*map(str, steps[:_SHOWN_STEPS]), "...", *map(str, steps[-_SHOWN_STEPS:])]
    return ", ".join(map(str, steps) if len(steps) <= 2 * _SHOWN_STEPS else shown)


def verify_checkpoint(run: RunPaths, path: Path, progress: Progress) -> list[str]:
    """Read every byte of a checkpoint and return its problems; empty if it is intact."""
    try:
        manifest = read_manifest(path, manifest_run_id(run))
    except ValueError as error:
        return [str(error)]
    problems: list[str] = []
    entries = manifest["files"]
    done, total = 0, sum(entry["bytes"] for entry in entries)
    for entry in entries:
        progress(f"verifying {path.name}", done, total)
        problems += verify_files(path, manifest, [entry])
        done += entry["bytes"]
    progress(f"verifying {path.name}", done, total)
    return problems


def require_another(run: RunPaths, doomed: Sequence[Path], progress: Progress) -> None:
    """Refuse to remove the last intact checkpoint.

    Raises:
        TrainctlError: None would be left (exit code 5).
    """
    full = [path for _, path in reversed(checkpoint_folders(run))]
    if any(not verify_checkpoint(run, path, progress) for path in full if path not in doomed):
        return
    last = next(
        (path for path in full if path in doomed and not verify_checkpoint(run, path, progress)),
        None,
    )
    if last is not None:
        raise RunStateError(
            f"{last.name} is the last intact checkpoint of {run.root}",
            hint="--force removes it all the same",
        )


def require_no_checkpoint(run: RunPaths) -> None:
    """Refuse to remove a run with a complete checkpoint.

    Raises:
        TrainctlError: It has one (exit code 5).
    """
    checkpoint, _ = newest_checkpoint(run)
    if checkpoint is not None:
        raise RunStateError(
            f"{run.root} has a checkpoint of step {checkpoint.step:,}",
            hint="--force removes it all the same",
        )


def describe_checkpoints(run: RunPaths) -> list[dict[str, Any]]:
    """Return the facts of each checkpoint, oldest first; a damaged one comes with its problem."""
    full = examine_checkpoints(run)
    infos = [look.info for look in full if look.info is not None]
    metric = config_of(run).checkpoint.best_of or "loss"
    best = best_checkpoint(infos, metric)
    newest = infos[-1] if infos else None
    rows = []
    for look in sorted(
        [*examine_checkpoints(run, weights_only=True), *full], key=lambda look: look.step
    ):
        info = look.info
        rows.append(
            {
                "step": look.step,
                "path": str(look.path),
                "saved": look.path.stat().st_mtime,
                "bytes": info.size_bytes if info else None,
                "metrics": info.metrics if info else {},
                "weights_only": look.path.name.startswith("weights"),
                "newest": info is not None and info is newest,
                "best": info is not None and info is best,
                "kept_for": info.kept_for if info else "",
                "problem": look.problem,
            }
        )
    return rows
