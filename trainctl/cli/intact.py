"""Which checkpoint a command works on, verified before it is used."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trainctl.cli.console import say
from trainctl.cli.meter import Meter
from trainctl.errors import ExitCode, TrainctlError

if TYPE_CHECKING:
    from trainctl.runs.layout import RunPaths


def open_or_newest(path: Path | None) -> RunPaths:
    """The run in a directory, or the newest one if none is named.

    Raises:
        TrainctlError: It is not a run, or there is none (exit code 5).
    """
    from trainctl.runs.directory import newest_run, open_run

    return newest_run() if path is None else open_run(path)


def choose_checkpoint(run: RunPaths, meter: Meter, *, step: int | None, best: bool) -> Path:
    """An intact checkpoint, every byte of it verified; says which damaged ones it passed over.

    Args:
        run: The run.
        meter: Shows how far the verification has come.
        step: Of the checkpoint; None takes the best or the newest that is intact.
        best: By the metric of `checkpoint.best_of`, else by the held-out loss.

    Raises:
        TrainctlError: There is none, or the one of that step is damaged (exit code 5).
    """
    if step is not None and best:
        raise TrainctlError("--step and --best name two checkpoints", hint="leave one of them out")
    for path in _candidates(run, step=step, best=best):
        problems = verify(path, meter)
        if not problems:
            return path
        if step is not None:
            raise TrainctlError(problems[0], exit_code=ExitCode.run_state)
        say(f"warning: checkpoint passed over: {problems[0]}", style="warning")
    raise TrainctlError(f"{run.root} has no intact checkpoint", exit_code=ExitCode.run_state)


def _candidates(run: RunPaths, *, step: int | None, best: bool) -> list[Path]:
    """Folders to try in turn."""
    from trainctl.runs.attempts import config_of
    from trainctl.runs.checkpoints import checkpoint_folders, list_checkpoints

    if step is not None:
        return [path for _, path in select(run, [step])]
    if not best:
        return [path for _, path in reversed(checkpoint_folders(run))]
    metric = config_of(run).checkpoint.best_of or "loss"
    scored = [info for info in list_checkpoints(run) if metric in info.metrics]
    if not scored:
        raise TrainctlError(
            f"no checkpoint of {run.root} was saved at an evaluation: none is the best by {metric}",
            hint="name one with --step; checkpoint.best_of keeps the best of a run",
            exit_code=ExitCode.run_state,
        )
    return [info.path for info in sorted(scored, key=lambda info: info.metrics[metric])]


def select(run: RunPaths, steps: Sequence[int] | None = None) -> list[tuple[int, Path]]:
    """Step and path of the checkpoints of these steps, or of all: whole or not, oldest first.

    Raises:
        TrainctlError: There is none, or none of one of the steps (exit code 5).
    """
    from trainctl.runs.checkpoints import checkpoint_folders

    folders = checkpoint_folders(run)
    if not folders:
        raise TrainctlError(f"{run.root} has no checkpoint", exit_code=ExitCode.run_state)
    here = [step for step, _ in folders]
    for step in steps or ():
        if step not in here:
            raise TrainctlError(
                f"{run.root} has no checkpoint of step {step}",
                hint=f"steps with a checkpoint: {', '.join(map(str, here))}",
                exit_code=ExitCode.run_state,
            )
    return [item for item in folders if steps is None or item[0] in steps]


def verify(path: Path, meter: Meter) -> list[str]:
    """What is wrong with a checkpoint, having read every byte of it; empty if it is intact."""
    from trainctl.runs.checkpoints import read_manifest, verify_files

    try:
        entries = read_manifest(path)["files"]
    except ValueError as error:
        return [str(error)]
    problems: list[str] = []
    done, total = 0, sum(entry["bytes"] for entry in entries)
    for entry in entries:
        meter(f"verifying {path.name}", done, total)
        problems += verify_files(path, [entry])
        done += entry["bytes"]
    meter(f"verifying {path.name}", done, total)
    return problems
