"""Reading of a mirror: its checkpoints, their verification, and a run directory made from it."""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

from trainctl.config.quantities import disk_text
from trainctl.config.store import load_config
from trainctl.config.user_code import code_settings
from trainctl.errors import ExitCode, Finding, MachineError, RunStateError, TrainctlError
from trainctl.mirror.index import (
    PARTS_AT_ONCE,
    Index,
    ListedCheckpoint,
    Store,
    StoredFile,
    newest_index,
    read_files,
    read_part,
)
from trainctl.readers.remote import Notify, print_notice
from trainctl.runs.attempts import config_of
from trainctl.runs.checkpoint_selection import steps_text
from trainctl.runs.directory import DEFAULT_ROOT, is_run, read_plan, run_id
from trainctl.runs.files import (
    ensure_folder,
    ensure_folders,
    folder_mode,
    make_folder,
    open_as_its_folder,
    remove_path,
    sync_directory,
    temporary_folder,
)
from trainctl.runs.layout import RunPaths
from trainctl.runs.manifest import MANIFEST, read_manifest
from trainctl.runs.mirror_state import MirrorState, write_mirror_state
from trainctl.runs.records import Progress, ignore_progress
from trainctl.untrusted import safe_name, safe_path

FETCHING = ".fetching"
"""Ending of a run directory's name until it is whole; a repeated fetch continues in it."""


class Mirror:
    """A run's mirror as it is listed now.

    Args:
        notify: Called before each wait for another attempt.

    Raises:
        TrainctlError: There is no mirror (exit code 5), or the store cannot be read (exit code 4).
    """

    def __init__(self, url: str, notify: Notify = print_notice) -> None:
        self.url = url.rstrip("/")
        self._store = Store(self.url, notify=notify)
        index, _ = newest_index(self._store)
        if index is None:
            raise RunStateError(
                f"there is no mirror of a run at {self.url}",
                hint="the URL is that of checkpoint.mirror",
            )
        self.index: Index = index

    def name(self) -> str:
        """Return the name that the run directory had.

        Raises:
            TrainctlError: It is no name of a folder (exit code 5).
        """
        try:
            return safe_name(self.index.name)
        except ValueError as error:
            raise RunStateError(
                f"{self.url}: {error}, and the run's directory would have it",
                hint="--run-dir names the directory to make",
            ) from None

    def checkpoint(
        self, step: int | None = None, *, metric: str | None = None, for_resume: bool = True
    ) -> ListedCheckpoint | None:
        """Return the checkpoint of a step, the best by a metric, or the newest; None if none is
        listed.

        Args:
            for_resume: Whether weights-only checkpoints are left out.

        Raises:
            TrainctlError: A step is named and not listed, or no checkpoint has the metric (exit
                code 5).
        """
        listed = [each for each in self.index.checkpoints if not (for_resume and each.weights_only)]
        listed.sort(key=lambda each: (each.step, not each.weights_only))
        if step is None and metric is None:
            return listed[-1] if listed else None
        if metric is not None:
            found = [each for each in listed if metric in each.metrics]
            found.sort(key=lambda each: each.metrics[metric])
        else:
            found = [each for each in listed if each.step == step][-1:]
        if not found:
            what = f"of step {step}" if metric is None else f"with the metric {metric}"
            raise RunStateError(
                f"{self.url} lists no checkpoint {what}",
                hint="steps with a checkpoint: " + steps_text([each.step for each in listed]),
            )
        return found[0]

    def describe(self) -> list[dict[str, Any]]:
        """Return the facts of each checkpoint, oldest first, as of a run's own."""
        full = [each for each in self.index.checkpoints if not each.weights_only]
        return [
            {
                "step": each.step,
                "path": self._path(each),
                "saved": each.stored,
                "bytes": each.bytes,
                "metrics": each.metrics,
                "weights_only": each.weights_only,
                "newest": bool(full) and each == full[-1],
                "best": False,
                "kept_for": each.kept_for,
                "problem": "",
            }
            for each in self.index.checkpoints
        ]

    def verify(self, checkpoint: ListedCheckpoint, progress: Progress) -> list[str]:
        """Read every byte of a checkpoint, and return what is wrong; empty if it is whole."""
        done = 0
        try:
            with _temporary_run() as run:
                self._write_checkpoint(checkpoint, run, weights=False)
            for file in read_files(self._store, checkpoint.files):
                for block in self._blocks(file):
                    progress(f"verifying {checkpoint.name}", done, checkpoint.bytes)
                    done += len(block)
        except TrainctlError as error:
            return [f"{checkpoint.name}: {error.message.removeprefix(checkpoint.name + ': ')}"]
        finally:
            progress(f"verifying {checkpoint.name}", checkpoint.bytes, checkpoint.bytes)
        return []

    def verify_all(self, step: int | None, progress: Progress) -> list[dict[str, Any]]:
        """Verify all checkpoints, or those of a step, and the records that a resume needs.

        Returns:
            Step, path and problems of each checkpoint. What is wrong with the records is a problem
            of every checkpoint.

        Raises:
            TrainctlError: None is listed (exit code 5).
        """
        chosen = [each for each in self.index.checkpoints if step in (None, each.step)]
        if not chosen:
            self.checkpoint(step)  # says which there are
            raise RunStateError(f"{self.url} lists no checkpoint")
        shared: list[str] = []
        try:
            with _temporary_run() as run:
                self._write_records(run)
        except TrainctlError as error:
            shared = [error.message]
        return [
            {
                "step": each.step,
                "path": self._path(each),
                "problems": [*self.verify(each, progress), *shared],
            }
            for each in chosen
        ]

    def _path(self, checkpoint: ListedCheckpoint) -> str:
        """Return a checkpoint's name below the URL, as it is shown: no object has this key."""
        return f"{self.url}/{checkpoint.name}"

    def fetch(
        self,
        root: Path,
        checkpoints: Sequence[ListedCheckpoint],
        progress: Progress,
        *,
        trusts_code: bool,
        weights: bool = True,
    ) -> RunPaths:
        """Make a run directory with the records and some checkpoints, whole or not at all.

        Args:
            trusts_code: Whether the user trusts the functions and programs that the run names.
            weights: Whether to fetch tensors. Without them their files are holes of the right size:
                enough to plan a resume.

        Raises:
            TrainctlError: The directory is taken, a part is damaged (exit code 5), the run names
                code that is not trusted (exit code 2), or the store cannot be read or the disk has
                no room (exit code 4).
        """
        if root.exists():
            same = is_run(root)
            raise RunStateError(
                f"{root} exists" + (" and is a run" if same else ""),
                hint=(f"trainctl resume {root} continues it; " if same else "")
                + "--run-dir names another directory",
            )
        made = RunPaths(root.with_name(root.name + FETCHING))
        made.root.parent.mkdir(parents=True, exist_ok=True)
        if not made.root.is_dir():
            make_folder(made.root, folder_mode())
        try:
            self._prepare(made, checkpoints, progress, needs_space=weights)
            if not trusts_code:
                _refuse_code(made, self.url)
        except TrainctlError as error:
            if error.exit_code != ExitCode.environment:  # else a repeated fetch continues
                shutil.rmtree(made.root)
            raise
        for each in checkpoints:
            self._write_checkpoint(each, made, progress, weights=weights)
        for folder in (made.checkpoints, made.attempts):
            ensure_folder(folder)
        state = MirrorState(
            url=self.url,
            number=self.index.number,
            fetched_from=self.index.writer,
            fetched_step=max((each.step for each in checkpoints), default=0),
        )
        write_mirror_state(made, state)
        made.root.rename(root)
        sync_directory(root.parent)
        progress("fetching", 1, 1)
        return RunPaths(root.resolve())

    def _prepare(
        self,
        run: RunPaths,
        checkpoints: Sequence[ListedCheckpoint],
        progress: Progress,
        *,
        needs_space: bool,
    ) -> None:
        """Remove what an interrupted fetch of something else left, and write the records.

        Raises:
            TrainctlError: As `fetch`.
        """
        wanted = {run.root: read_files(self._store, self.index.records)}
        for each in checkpoints:
            wanted[run.checkpoints / each.name] = read_files(self._store, each.files)
        paths = {safe_path(folder, file.name) for folder in wanted for file in wanted[folder]}
        _remove_all_but(run.root, paths)
        if needs_space:
            total = sum(file.bytes for files in wanted.values() for file in files)
            _check_space(run.root, total)
        self._write_records(run, progress)

    def _write_records(self, run: RunPaths, progress: Progress = ignore_progress) -> None:
        """Write configuration, plans and records, and check that a resume can read them.

        Raises:
            TrainctlError: They are not those of the listed run, or damaged (exit code 5).
        """
        self._write_files(read_files(self._store, self.index.records), run.root, progress)
        if not is_run(run.root):
            raise RunStateError(f"{self.url} is no run: config.yaml or run.json is not listed")
        if run_id(run) != self.index.run:
            raise RunStateError(f"{self.url} lists run.json of another run")
        load_config(run.config), config_of(run)
        for number in sorted({each.attempt for each in self.index.checkpoints} - {0}):
            read_plan(run.attempt(number).plan)

    def _write_checkpoint(
        self,
        checkpoint: ListedCheckpoint,
        run: RunPaths,
        progress: Progress = ignore_progress,
        *,
        weights: bool,
    ) -> None:
        """Write a checkpoint, or its manifest and holes in place of the tensors; check its list.

        Raises:
            TrainctlError: Its files are not those of its manifest (exit code 5).
        """
        folder = safe_path(run.checkpoints, checkpoint.name)
        files = read_files(self._store, checkpoint.files)
        real = [file for file in files if weights or file.name == MANIFEST]
        self._write_files(real, folder, progress)
        for file in files:
            if file not in real:
                _write_hole(safe_path(folder, file.name), file.bytes)
        try:
            listed = {each["name"]: each["sha256"] for each in _manifest(folder, self.index.run)}
        except ValueError as error:
            raise RunStateError(str(error)) from None
        for file in files:
            if file.name != MANIFEST and listed.get(file.name) != file.sha256:
                raise RunStateError(f"{checkpoint.name}: its manifest has no such {file.name}")

    def _write_files(
        self, files: Sequence[StoredFile], folder: Path, progress: Progress = ignore_progress
    ) -> None:
        done, total = 0, sum(file.bytes for file in files)
        ensure_folders(folder)
        for file in files:
            progress("fetching", done, total)
            self._write(file, folder)
            done += file.bytes
        sync_directory(folder)

    def _write(self, file: StoredFile, folder: Path) -> None:
        """Write a file unless an earlier fetch did.

        Raises:
            TrainctlError: Its parts do not make it up (exit code 5).
        """
        path = safe_path(folder, file.name)
        if path.is_file() and path.stat().st_size == file.bytes and _sha256(path) == file.sha256:
            return
        ensure_folders(path.parent)
        with open(path, "wb", opener=open_as_its_folder) as stream:
            for block in self._blocks(file):
                stream.write(block)
            stream.flush()
            os.fsync(stream.fileno())

    def _blocks(self, file: StoredFile) -> Iterator[bytes]:
        """Yield the parts of a file in order, each verified; the next ones are read meanwhile.

        Raises:
            TrainctlError: They do not make it up (exit code 5).
        """
        whole, left = hashlib.sha256(), file.bytes
        for block in self._parts(file):
            whole.update(block)
            left -= len(block)
            if left < 0:
                break
            yield block
        if left or whole.hexdigest() != file.sha256:
            raise RunStateError(f"{self.url}: {file.name} is damaged")

    def _parts(self, file: StoredFile) -> Iterator[bytes]:
        waiting: list[Future[bytes]] = []
        with ThreadPoolExecutor(PARTS_AT_ONCE) as threads:
            for key in file.part_keys:
                waiting.append(threads.submit(read_part, self._store, key))
                if len(waiting) == PARTS_AT_ONCE:
                    yield waiting.pop(0).result()
            for part in waiting:
                yield part.result()


def _manifest(folder: Path, run: str) -> list[dict[str, Any]]:
    """Return the files in a checkpoint's manifest, checked; raises ValueError."""
    files: list[dict[str, Any]] = read_manifest(folder, run)["files"]
    return files


def _write_hole(path: Path, size: int) -> None:
    """Make a file of zeros, which takes no room.

    Raises:
        TrainctlError: No file can have that size (exit code 5).
    """
    try:
        with open(path, "wb", opener=open_as_its_folder) as stream:
            stream.truncate(size)
    except OSError as error:
        raise RunStateError(f"{path.name} of {size:,} bytes: {error.strerror}") from None


def _check_space(folder: Path, total: int) -> None:
    """Refuse to fetch more than the disk has room for; an interrupted fetch may be there.

    Raises:
        TrainctlError: It has no room (exit code 4).
    """
    usage = shutil.disk_usage(folder)
    there = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    if usage.total and total - there > usage.free:
        raise MachineError(
            f"{folder} has room for {disk_text(usage.free)}, and {disk_text(total - there)} are to "
            "be fetched",
            hint="--run-dir names a directory on another disk",
        )


def _refuse_code(run: RunPaths, url: str) -> None:
    """Refuse a run whose configurations name functions or programs.

    Raises:
        TrainctlError: One does (exit code 2).
    """
    plans = [read_plan(path).config for path in sorted(run.attempts.glob("*/plan.json"))]
    found = dict(
        each for config in (load_config(run.config), *plans) for each in code_settings(config)
    )
    findings = [
        Finding(
            rule="TC580",
            key=key,
            message=f"the run at {url} makes trainctl run what is not in the mirror: {value}",
            hint="`trainctl --trust-code` or TRAINCTL_TRUST_CODE=1 runs it, if the run is yours or "
            "you have looked",
        )
        for key, value in found.items()
    ]
    if findings:
        raise TrainctlError.from_findings(findings)


@contextmanager
def _temporary_run(name: str = "run") -> Iterator[RunPaths]:
    """Give a run directory that is not made yet, in a temporary folder (TMPDIR)."""
    with temporary_folder() as folder:
        yield RunPaths(safe_path(folder, name))


def _remove_all_but(root: Path, wanted: set[Path]) -> None:
    """Remove what an interrupted fetch of something else left."""
    for path in root.rglob("*"):
        if path.is_file() and path not in wanted:
            path.unlink()
    for folder in (root / "checkpoints").glob("*"):
        if not any(folder in path.parents for path in wanted):
            remove_path(folder)


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def fetch_run(
    url: str,
    *,
    run_dir: Path | None = None,
    step: int | None = None,
    trusts_code: bool = False,
    notify: Notify = print_notice,
    progress: Progress = ignore_progress,
) -> RunPaths:
    """Make a run directory that can be resumed, with the newest checkpoint or the one of a step.

    Args:
        run_dir: The directory; None is one in `runs/` with the name that the run had.
        trusts_code: As of `Mirror.fetch`.

    Raises:
        TrainctlError: There is no such mirror or checkpoint, or the directory is taken (exit code
            5); the run names code that is not trusted (exit code 2); or the store cannot be read
            (exit code 4).
    """
    mirror = Mirror(url, notify)
    checkpoint = mirror.checkpoint(step)
    root = safe_path(DEFAULT_ROOT, mirror.name()) if run_dir is None else run_dir
    chosen = [checkpoint] if checkpoint else []
    return mirror.fetch(root.absolute(), chosen, progress, trusts_code=trusts_code)


@contextmanager
def fetched_plan(
    url: str, *, step: int | None = None, trusts_code: bool = False
) -> Iterator[RunPaths]:
    """Give a run directory in a temporary folder from which a resume can be planned, not made.

    It has the newest checkpoint or the one of a step, without its tensors.

    Raises:
        TrainctlError: As `fetch_run`.
    """
    mirror = Mirror(url)
    checkpoint = mirror.checkpoint(step)
    chosen = [checkpoint] if checkpoint else []
    with _temporary_run(mirror.name()) as run:
        yield mirror.fetch(
            run.root, chosen, ignore_progress, trusts_code=trusts_code, weights=False
        )


@contextmanager
def fetched_checkpoint(
    url: str,
    *,
    step: int | None = None,
    best: bool = False,
    trusts_code: bool = False,
    notify: Notify = print_notice,
    progress: Progress = ignore_progress,
) -> Iterator[RunPaths]:
    """Give a run directory in a temporary folder (TMPDIR) with one checkpoint, of any kind.

    Raises:
        TrainctlError: There is no such mirror or checkpoint (exit code 5); the run names code that
            is not trusted (exit code 2); or the store cannot be read (exit code 4).
    """
    mirror = Mirror(url, notify)
    fetch = partial(mirror.fetch, trusts_code=trusts_code)
    with _temporary_run(mirror.name()) as run:
        metric = None
        if best:
            metric = config_of(fetch(run.root, [], ignore_progress)).checkpoint.best_of or "loss"
            shutil.rmtree(run.root)
        checkpoint = mirror.checkpoint(step, metric=metric, for_resume=False)
        if checkpoint is None:
            raise RunStateError(f"{url} lists no checkpoint")
        yield fetch(run.root, [checkpoint], progress)


_OWNER_SECONDS = 5.0
"""Time for asking a store whose mirror it has; a slow one does not delay a launch by more."""


def owner_finding(url: str, run: str | None) -> Finding | None:
    """Return an error if a URL is known to be the mirror of another run.

    A store that does not answer is no error: the process that sends says so while the run goes on.

    Args:
        run: Id of the run that is to be mirrored; None for a new one.
    """
    protocol, _, path = url.partition("://")
    if protocol == "file" and is_run(Path(path)):
        return Finding(
            rule="TC177",
            key="checkpoint.mirror",
            message=f"{url} is a run directory",
            hint="checkpoint.mirror=file:///FOLDER/NAME: a new folder",
        )
    found: list[Index] = []

    def ask() -> None:
        with suppress(Exception):
            index, _ = newest_index(Store(url, attempts=1))
            found.extend([index] if index is not None else [])

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_OWNER_SECONDS)
    if not found or found[0].run == run:
        return None
    return Finding(
        rule="TC177",
        key="checkpoint.mirror",
        message=f"{url} is the mirror of another run, {found[0].name} ({found[0].host})",
        hint=f"checkpoint.mirror={url.rstrip('/')}/NAME: a folder for each run; or continue that "
        f"one with trainctl resume {url}",
    )
