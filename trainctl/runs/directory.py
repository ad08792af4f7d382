"""Making, finding, reading and removing run directories and their attempts."""

from __future__ import annotations

import os
import re
import secrets
import stat
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainctl.config.codec import from_plain, to_plain
from trainctl.config.reading import read_json
from trainctl.config.schema import RunConfig
from trainctl.config.store import dump_config, with_former_values
from trainctl.errors import RunStateError, TrainctlError
from trainctl.plans.types import RunPlan
from trainctl.runs import provenance
from trainctl.runs.files import (
    ensure_folder,
    folder_mode,
    make_folder,
    remove_path,
    remove_stale_temporary,
    sync_directory,
    temporary_path,
    write_json,
    write_text,
)
from trainctl.runs.layout import AttemptPaths, RunPaths
from trainctl.runs.lock import hold_lock
from trainctl.untrusted import is_time

_WRITING_SECONDS = 60.0
"""Longest time that a small file is written for."""

RUN_SCHEMA = 1
"""Version of `run.json`."""

DEFAULT_ROOT = Path("runs")
"""Default folder of runs, relative to the current folder."""


def create_run(
    config: RunConfig,
    *,
    run_dir: Path | None = None,
    argv: Sequence[str] = (),
    root: Path = DEFAULT_ROOT,
    folder: Path | None = None,
) -> RunPaths:
    """Make a run directory and write what never changes: `config.yaml`, provenance, `run.json`.

    `run.json` is written last: with it the directory is a run.

    Args:
        run_dir: The directory; None makes one with a new name under `root`.
        argv: The user's command line.
        folder: Folder whose git revision and changes are recorded; None is the current one.

    Raises:
        TrainctlError: `run_dir` holds a run or anything else, or cannot be made (exit code 5).
    """
    try:
        run = RunPaths(_new_directory(config, root) if run_dir is None else _claim(run_dir))
    except OSError as error:
        raise RunStateError(f"cannot make the run directory: {error}") from None
    folder = Path.cwd() if folder is None else folder
    git, patch = provenance.git_state(folder)
    write_text(run.config, dump_config(config))
    if patch:
        write_text(run.patch, patch)
    ensure_folder(run.checkpoints)
    ensure_folder(run.attempts)
    record = {
        "schema": RUN_SCHEMA,
        "id": uuid.uuid4().hex,
        "name": run.root.name,
        "created": time.time(),
        "argv": provenance.redact_argv(argv),
        "folder": str(folder.resolve()),
        "git": git,
        "trainctl": provenance.own_checkout(),
        "machine": provenance.machine_facts(),
        "environment": provenance.environment_record(
            os.environ, config.launcher.forward_environment
        ),
        "packages": provenance.package_versions(),
    }
    write_json(run.record, record)
    return run


def is_run(path: Path) -> bool:
    """Return True if the directory holds a run, as far as this user may see."""
    try:
        return (path / "config.yaml").is_file() and (path / "run.json").is_file()
    except OSError:  # no permission, a name that is too long, a stale handle
        return False


def open_run(path: Path) -> RunPaths:
    """Return the run in a directory.

    Raises:
        TrainctlError: It is missing or is not a run (exit code 5); names the runs beside it.
    """
    if is_run(path):
        return RunPaths(path.resolve())
    try:
        what = "is not a run directory" if path.is_dir() else "does not exist"
        missing = [name for name in ("config.yaml", "run.json") if not (path / name).is_file()]
        detail = f" (no {' and no '.join(missing)} in it)" if path.is_dir() else ""
        nearby = [run.root.name for run in runs_in(path if path.is_dir() else path.parent)]
    except OSError as error:
        raise RunStateError(f"{path} cannot be read: {error.strerror}") from None
    hint = f"runs there: {', '.join(nearby[-5:])}" if nearby else "`trainctl launch` makes one"
    raise RunStateError(f"{path} {what}{detail}", hint=hint)


def newest_run(root: Path = DEFAULT_ROOT) -> RunPaths:
    """Return the run that was made last.

    Raises:
        TrainctlError: There is no run (exit code 5).
    """
    runs = runs_in(root)
    if not runs:
        raise RunStateError(
            f"there is no run in {root}",
            hint="name the run directory, or start one with `trainctl launch`",
        )
    return runs[-1]


def open_or_newest(path: Path | None) -> RunPaths:
    """Return the run in a directory, or the newest run for None.

    Raises:
        TrainctlError: The directory is not a run, or there is no run (exit code 5).
    """
    return newest_run() if path is None else open_run(path)


def runs_in(root: Path) -> list[RunPaths]:
    """Return the runs directly in a folder, by creation time; damaged runs are left out."""
    return find_runs(root)[0]


def find_runs(root: Path) -> tuple[list[RunPaths], list[str]]:
    """Return the runs directly in a folder, by creation time, and an error for each damaged run."""
    runs: list[tuple[float, str, RunPaths]] = []
    damaged: list[str] = []
    for path in sorted(root.iterdir()) if root.is_dir() else ():
        if is_run(path):
            run = RunPaths(path.resolve())
            try:
                runs.append((read_record(run)["created"], path.name, run))
            except TrainctlError as error:
                damaged.append(error.message)
    return [run for _, _, run in sorted(runs, key=lambda item: item[:2])], damaged


def read_record(run: RunPaths) -> dict[str, Any]:
    """Read `run.json`.

    Raises:
        TrainctlError: It cannot be read (exit code 5).
    """
    try:
        record = read_json(run.record)
    except (OSError, ValueError) as error:
        raise _damaged(run.record, error) from None
    if not isinstance(record, dict) or not record.get("id"):
        raise _damaged(run.record, "it has no id")
    if not is_time(record.get("created")):
        raise _damaged(run.record, "it has no time of creation")
    return record


def run_id(run: RunPaths) -> str:
    """Return the run's id, which all of its processes carry in their environment."""
    return str(read_record(run)["id"])


def last_attempt(run: RunPaths) -> int:
    """Return the number of the newest attempt; 0 before the first."""
    if not run.attempts.is_dir():
        return 0
    names = [path.name for path in run.attempts.iterdir()]
    return max((int(name) for name in names if name.isdecimal()), default=0)


def new_attempt(run: RunPaths, plan: RunPlan) -> AttemptPaths:
    """Make the next attempt, and write its plan and DeepSpeed's JSON, if it has one.

    Hold the run's lock. The attempt appears together with its plan or not at all: a later resume
    continues from the last attempt's plan. `command.json` is written later, by its launcher.

    Raises:
        OSError: The disk is full, or the folder cannot be written.
    """
    number = last_attempt(run) + 1
    attempt = run.attempt(number)
    unfinished = AttemptPaths(temporary_path(attempt.root), number)
    for folder in (run.root, run.attempts):  # left by interrupted launches
        remove_stale_temporary(folder)
    beside = (run.companion("").folder, run.callbacks, run.proofs, run.requests)
    for folder in beside:  # another process may be writing there
        remove_stale_temporary(folder, before=time.time() - _WRITING_SECONDS)
    ensure_folder(run.attempts)
    make_folder(unfinished.root)
    make_folder(unfinished.logs)
    if plan.deepspeed:
        write_json(unfinished.deepspeed, plan.deepspeed)
        if not plan.config.trains_itself:  # accelerate refuses an optimizer in both places
            own = {"optimizer", "scheduler"}
            rest = {name: value for name, value in plan.deepspeed.items() if name not in own}
            write_json(unfinished.accelerate, rest)
    write_json(unfinished.plan, to_plain(plan))
    unfinished.root.rename(attempt.root)
    sync_directory(run.attempts)
    return attempt


def read_plan(path: Path) -> RunPlan:
    """Return a plan from an attempt's `plan.json`.

    Raises:
        TrainctlError: It is missing or damaged (exit code 5).
    """
    try:
        plan = read_json(path)
        return from_plain(RunPlan, {**plan, "config": with_former_values(plan.get("config"))})
    except (OSError, ValueError, TypeError) as error:
        raise _damaged(path, error) from None


def _damaged(path: Path, why: object) -> TrainctlError:
    return RunStateError(f"{path} cannot be read: {why}")


def _new_directory(config: RunConfig, root: Path) -> Path:
    what = re.sub(r"[^A-Za-z0-9._-]+", "-", config.recipe or config.model.name).strip("-.") or "run"
    while True:
        name = f"{what}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        path = (root / name).resolve()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            make_folder(path, folder_mode())
        except FileExistsError:
            continue
        return path


def _claim(path: Path) -> Path:
    """Make a directory, or take one that is empty or left by an interrupted `create_run`."""
    if is_run(path):
        raise RunStateError(
            f"{path} already holds a run",
            hint=f"continue it with `trainctl resume {path}`, or name another directory",
        )
    mode = folder_mode()
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        make_folder(path, mode)
    except FileExistsError:
        if not path.is_dir():
            raise
    ours = {"config.yaml", "source.patch", "checkpoints", "attempts", "lock"}
    foreign = sorted(
        item.name
        for item in path.iterdir()
        if item.name not in ours and not item.name.endswith(".tmp")
    )
    if foreign:
        raise RunStateError(
            f"{path} is not empty and not a run: it holds {', '.join(foreign[:3])}",
            hint="name a new or an empty directory",
        )
    if path.stat().st_uid == os.geteuid():
        path.chmod(mode | (path.stat().st_mode & stat.S_ISGID))
    return path.resolve()


def remove_run(run: RunPaths) -> None:
    """Remove the directory of a run that nobody uses.

    `run.json` goes first: what an interruption leaves is no run, and cannot be resumed.

    Raises:
        TrainctlError: The run is in use (exit code 5).
        OSError: Something in it cannot be removed.
    """
    with hold_lock(run, patience_seconds=0):
        run.record.unlink()
        for path in run.root.iterdir():
            if path != run.lock:
                remove_path(path)
    # Only after it is closed: NFS renames an open file instead of removing it, and its folder then
    # cannot be removed.
    run.lock.unlink(missing_ok=True)
    run.root.rmdir()
