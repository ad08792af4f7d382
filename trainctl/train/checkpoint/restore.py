"""Choice of the checkpoint to read: the newest intact one, by agreement of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trainctl.engines.process import Process
from trainctl.errors import ExitCode, TrainctlError
from trainctl.runs import checkpoints
from trainctl.runs.layout import RunPaths
from trainctl.runs.manifest import MANIFEST, read_manifest, verify_files
from trainctl.train.checkpoint.content import Checkpoint


def newest_valid_checkpoint(run: RunPaths, process: Process) -> Checkpoint | None:
    """Return a run's newest checkpoint with intact content; None if the run has no checkpoint.

    The first rank lists the folder, so that all ranks read the same checkpoint. Skipped
    checkpoints are named in its log and in the result. A skipped checkpoint with the right
    sizes but wrong content is set aside, since it would otherwise count as the newest.

    Raises:
        TrainctlError: There are checkpoints and none is intact. Starting from scratch without being
            told to would throw the run away.
    """
    candidates: list[Path] = []
    passed_over: list[str] = []
    if process.is_first:
        checkpoints.clean_temporary(run)
        candidates, passed_over = _newest_first(run)
    candidates, passed_over = process.broadcast_from_first((candidates, passed_over))
    damaged: list[Path] = []
    chosen: Path | None = None
    for path in candidates:
        problems = _damage(path, process)
        if not problems:
            chosen = path
            break
        damaged.append(path)
        passed_over += problems
    if process.is_first:
        for problem in passed_over:
            print(f"checkpoint passed over: {problem}", flush=True)
    if chosen is None:
        if passed_over:
            raise TrainctlError(
                f"no checkpoint of the run is intact: {'; '.join(passed_over)}",
                hint=f"to begin anew all the same: trainctl resume {run.root} --from-start",
                exit_code=ExitCode.run_state,
            )
        return None
    if process.is_first:
        for path in damaged:
            checkpoints.set_aside(path)
    return Checkpoint(chosen, passed_over)


def weights_of(path: Path, process: Process) -> Checkpoint | None:
    """Return the checkpoint to take only weights from: the folder itself, or the newest of a run.

    A weights-only checkpoint is as good as a full one.

    Returns:
        None if the folder is neither a run nor a checkpoint.

    Raises:
        TrainctlError: The checkpoint is damaged, or the run has none.
    """
    if (path / MANIFEST).is_file():
        problems = _damage(path, process)
    elif (path / "checkpoints").is_dir():
        found, problems = _newest_first(RunPaths(path), weights_only=True)
        problems = problems or [f"{path} has no checkpoint"]
        for path in found:
            problems = _damage(path, process)
            if not problems:
                break
    else:
        return None
    if problems:
        raise TrainctlError(f"model.initial_weights: {'; '.join(problems)}")
    return Checkpoint(path)


def _newest_first(run: RunPaths, *, weights_only: bool = False) -> tuple[list[Path], list[str]]:
    """Return the complete checkpoints, newest first, and the problems of the others.

    Only names and sizes of the files are checked.

    Args:
        weights_only: Whether to include weights-only checkpoints.
    """
    looks = checkpoints.examine(run)
    if weights_only:  # a step's full checkpoint comes first: its weights are more precise
        looks = [*checkpoints.examine(run, weights_only=True), *looks]
    looks = sorted(looks, key=lambda look: look.step)[::-1]
    whole = [look.path for look in looks if look.info is not None]
    return whole, [look.problem for look in looks if look.info is None]


def _damage(path: Path, process: Process) -> Sequence[str]:
    """Return the problems of a checkpoint; all ranks together, each for its share of files."""
    try:
        manifest = read_manifest(path)
        mine = manifest["files"][process.rank :: process.world_size]
        problems = verify_files(path, manifest, mine)
    except ValueError as error:
        problems = [str(error)]
    found: list[str] = []
    for share in process.gather(problems):
        found += [problem for problem in share if problem not in found]
    return found
