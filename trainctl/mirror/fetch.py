"""Reading of a mirror: its checkpoints, their verification, and a run directory made from it."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from trainctl.errors import Finding, RunStateError, TrainctlError
from trainctl.mirror.index import (
    PARTS_AT_ONCE,
    Index,
    ListedCheckpoint,
    StoredFile,
    newest_index,
    read_files,
    read_part,
)
from trainctl.mirror.store import Store
from trainctl.readers.remote import Notify, print_notice
from trainctl.runs.attempts import config_of
from trainctl.runs.checkpoint_selection import Progress
from trainctl.runs.directory import DEFAULT_ROOT, is_run
from trainctl.runs.files import ensure_folder, folder_mode, make_folder, sync_directory
from trainctl.runs.layout import RunPaths
from trainctl.runs.manifest import read_manifest
from trainctl.runs.mirror_state import MirrorState, write_mirror_state

FETCHING = ".fetching"
"""Ending of a run directory's name until it is whole; a repeated fetch continues in it."""


class Mirror:
    """A run's mirror as it is listed now.

    Args:
        url: URL of the mirror.
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
                hint="steps with a checkpoint: " + ", ".join(str(each.step) for each in listed),
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
        problems, done = [], 0
        try:
            for file in read_files(self._store, checkpoint.files):
                whole = hashlib.sha256()
                for block in self._blocks(file):
                    progress(f"verifying {checkpoint.name}", done, checkpoint.bytes)
                    whole.update(block)
                    done += len(block)
                if whole.hexdigest() != file.sha256:
                    problems.append(f"{checkpoint.name}: {file.name} is damaged")
        except TrainctlError as error:
            problems.append(f"{checkpoint.name}: {error.message}")
        progress(f"verifying {checkpoint.name}", checkpoint.bytes, checkpoint.bytes)
        return problems

    def verify_all(self, step: int | None, progress: Progress) -> list[dict[str, Any]]:
        """Verify all checkpoints, or those of a step; return step, path and problems of each.

        Raises:
            TrainctlError: None is listed (exit code 5).
        """
        chosen = [each for each in self.index.checkpoints if step in (None, each.step)]
        if not chosen:
            self.checkpoint(step)  # says which there are
            raise RunStateError(f"{self.url} lists no checkpoint")
        return [
            {"step": each.step, "path": self._path(each), "problems": self.verify(each, progress)}
            for each in chosen
        ]

    def _path(self, checkpoint: ListedCheckpoint) -> str:
        """Return a checkpoint's name below the URL, as it is shown: no object has this key."""
        return f"{self.url}/{checkpoint.name}"

    def fetch(
        self, root: Path, checkpoints: Sequence[ListedCheckpoint], progress: Progress
    ) -> RunPaths:
        """Make a run directory with the records and some checkpoints, whole or not at all.

        Raises:
            TrainctlError: The directory is taken, a part is damaged (exit code 5), or the store
                cannot be read (exit code 4).
            OSError: The disk is full.
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
        wanted = {made.root: read_files(self._store, self.index.records)}
        for each in checkpoints:
            wanted[made.checkpoints / each.name] = read_files(self._store, each.files)
        _remove_all_but(
            made.root, {folder / file.name for folder in wanted for file in wanted[folder]}
        )
        total = sum(file.bytes for files in wanted.values() for file in files)
        done = 0
        for folder, files in wanted.items():
            for file in files:
                progress("fetching", done, total)
                self._write(file, folder)
                done += file.bytes
            sync_directory(folder)
        for each in checkpoints:
            try:
                read_manifest(made.checkpoints / each.name, self.index.run)
            except ValueError as error:
                raise RunStateError(str(error)) from None
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
        progress("fetching", total, total)
        return RunPaths(root.resolve())

    def _write(self, file: StoredFile, folder: Path) -> None:
        """Write a file unless an earlier fetch did.

        Raises:
            TrainctlError: Its parts do not make it up (exit code 5).
        """
        path = folder / file.name
        if path.is_file() and path.stat().st_size == file.bytes and _sha256(path) == file.sha256:
            return
        for parent in reversed(path.parents):
            ensure_folder(parent)
        whole = hashlib.sha256()
        with path.open("wb") as stream:
            for block in self._blocks(file):
                whole.update(block)
                stream.write(block)
            stream.flush()
            os.fsync(stream.fileno())
        if whole.hexdigest() != file.sha256:
            raise RunStateError(f"{self.url}: {file.name} is damaged")

    def _blocks(self, file: StoredFile) -> Iterator[bytes]:
        """Yield the parts of a file in order, each verified; the next ones are read meanwhile."""
        waiting: list[Future[bytes]] = []
        with ThreadPoolExecutor(PARTS_AT_ONCE) as threads:
            for key in file.part_keys:
                waiting.append(threads.submit(read_part, self._store, key))
                if len(waiting) == PARTS_AT_ONCE:
                    yield waiting.pop(0).result()
            for part in waiting:
                yield part.result()


def _remove_all_but(root: Path, wanted: set[Path]) -> None:
    """Remove what an interrupted fetch of something else left."""
    for path in root.rglob("*"):
        if path.is_file() and path not in wanted:
            path.unlink()
    for folder in (root / "checkpoints").glob("*"):
        if not any(folder in path.parents for path in wanted):
            shutil.rmtree(folder)


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _ignore(*_: object) -> None:
    pass


def fetch_run(
    url: str,
    *,
    run_dir: Path | None = None,
    step: int | None = None,
    notify: Notify = print_notice,
    progress: Progress = _ignore,
) -> RunPaths:
    """Make a run directory that can be resumed, with the newest checkpoint or the one of a step.

    Args:
        run_dir: The directory; None is one in `runs/` with the name that the run had.

    Raises:
        TrainctlError: There is no such mirror or checkpoint, or the directory is taken (exit code
            5); or the store cannot be read (exit code 4).
    """
    mirror = Mirror(url, notify)
    checkpoint = mirror.checkpoint(step)
    root = DEFAULT_ROOT / mirror.index.name if run_dir is None else run_dir
    return mirror.fetch(root.absolute(), [checkpoint] if checkpoint else [], progress)


@contextmanager
def fetched_checkpoint(
    url: str,
    *,
    step: int | None = None,
    best: bool = False,
    notify: Notify = print_notice,
    progress: Progress = _ignore,
) -> Iterator[RunPaths]:
    """Give a run directory in a temporary folder (TMPDIR) with one checkpoint, of any kind.

    Raises:
        TrainctlError: There is no such mirror or checkpoint (exit code 5); or the store cannot be
            read (exit code 4).
    """
    mirror = Mirror(url, notify)
    with tempfile.TemporaryDirectory(prefix="trainctl-") as folder:
        root = Path(folder) / Path(mirror.index.name).name
        metric = None
        if best:
            metric = config_of(mirror.fetch(root, [], _ignore)).checkpoint.best_of or "loss"
            shutil.rmtree(root)
        checkpoint = mirror.checkpoint(step, metric=metric, for_resume=False)
        if checkpoint is None:
            raise RunStateError(f"{url} lists no checkpoint")
        yield mirror.fetch(root, [checkpoint], progress)


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
