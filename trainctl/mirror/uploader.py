"""Sending of a run's checkpoints and records to its mirror, one checkpoint at a time.

Every part is read back and compared by its SHA-256 before an index refers to it; checksums that a
store computes are not relied on. A checkpoint is listed by the index that is written last.
"""

from __future__ import annotations

import hashlib
import secrets
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainctl.config.schema import CheckpointConfig
from trainctl.errors import MachineError, RunStateError, TrainctlError
from trainctl.mirror.index import (
    PART_BYTES,
    PARTS_AT_ONCE,
    FileSet,
    Index,
    ListedCheckpoint,
    Store,
    StoredFile,
    index_key,
    index_keys,
    newest_index,
    part_key,
    part_keys,
    parts_of,
    read_files,
)
from trainctl.runs.attempts import config_of
from trainctl.runs.checkpoints import (
    CheckpointInfo,
    checkpoint_folders,
    kept_checkpoints,
    list_checkpoints,
)
from trainctl.runs.directory import run_id
from trainctl.runs.layout import RunPaths
from trainctl.runs.manifest import MANIFEST, read_manifest
from trainctl.runs.mirror_state import (
    MirrorState,
    manifest_sha256,
    read_mirror_state,
    write_mirror_state,
)
from trainctl.runs.records import record_files
from trainctl.untrusted import safe_path

RECORDS = (
    "config.yaml",
    "run.json",
    "source.patch",
    "status.json",
    "corpus.json",
    "base.json",
    "reference.npz",
    "teacher.json",
    "corpus/**/*",
    "callbacks/**/*",
    "attempts/*/*.json",
)
"""Files that a resume needs besides checkpoints and records, as globs below the run directory."""
_LINES = (".jsonl", ".csv")
"""Endings of files to which whole lines are appended while they are read."""

Signature = tuple[tuple[str, int, int], ...]


class Uploader:
    """Sends what the mirror of a run lacks. It is made again after a process died.

    Args:
        store: The mirror's objects; None opens `checkpoint.mirror`.

    Raises:
        TrainctlError: The run is damaged or has no mirror.
    """

    def __init__(self, run: RunPaths, store: Store | None = None) -> None:
        self._run, self._store = run, store
        config: CheckpointConfig = config_of(run).checkpoint
        if config.mirror is None:
            raise TrainctlError(f"{run.root} has no checkpoint.mirror")
        self._config, self._url = config, config.mirror
        self._limit = _Bandwidth(config.mirror_bandwidth)
        self._id = run_id(run)
        state = read_mirror_state(run)
        if state.url != self._url:  # the first, or another than before
            state = replace(MirrorState(), writer=state.writer, fetched_from=state.fetched_from)
        self._state = replace(
            state, url=self._url, writer=state.writer or secrets.token_hex(8), sending=""
        )
        self._index: Index | None = None
        self._highest = 0
        self._listed: dict[str, set[str]] = {}
        self._records: tuple[StoredFile, ...] = ()
        self._sent: set[str] = set()
        self._there: list[str] = []
        self._damaged = ""
        self._seen: Signature | None = None
        self._recorded: Signature | None = None

    def send(self) -> bool:
        """Send the newest checkpoint that the mirror lacks, and unlist what is rotated away.

        Returns:
            Whether there was anything to do.

        Raises:
            Exception: Any error of the store or of a local file. What was sent stays.
        """
        if self._index is None:
            self._claim()
            return True
        seen = self._local_signature()
        if seen == self._seen:
            return False
        local = [
            info
            for alone in (False, True)
            for info in list_checkpoints(self._run, weights_only=alone)
        ]
        listed = self._still_valid(local)
        wanted = self._wanted(local, listed)
        missing = [info for info in wanted if info.path.name not in listed]
        missing.sort(key=lambda info: (info.weights_only, -info.step))
        self._damaged = ""
        sent = next((each for each in map(self._send_checkpoint, missing) if each), None)
        names = {info.path.name for info in wanted}
        listed = {name: each for name, each in listed.items() if name in names}
        if sent is not None:
            listed[sent.name] = sent
        if sorted(listed) != sorted(each.name for each in self._index.checkpoints) or sent:
            self._commit(listed.values(), collects=True)
            self._keep(problem=self._damaged)
            return True
        self._seen = seen
        self._keep(sending="", problem=self._damaged)
        return False

    def end(self) -> None:
        """Send the records as they are now.

        Raises:
            Exception: Any error of the store or of a local file.
        """
        index = self._index
        assert index is not None
        self._require_newest(self._opened())
        if self._record_signature() != self._recorded:
            self._commit(index.checkpoints, collects=True)
        else:
            self._collect(self._opened())
        if self._damaged:
            raise RunStateError(self._damaged)

    def give_up(self, problem: str) -> None:
        """Record why the rest cannot be sent now.

        Raises:
            OSError: The disk is full.
        """
        self._index, self._seen = None, None  # the store may have changed
        if problem != self._state.problem:
            self._keep(problem=problem)

    def close(self) -> None:
        """Do nothing: file systems close their connections."""

    def _keep(self, **changes: Any) -> None:
        state = replace(self._state, **changes)
        if state != self._state or not self._run.companion("mirror").cursor.exists():
            write_mirror_state(self._run, state)
        self._state = state

    def _opened(self) -> Store:
        if self._store is None:
            # One attempt: `serve` repeats with pauses, and shows the problem meanwhile.
            self._store = Store(self._url, attempts=1)
        return self._store

    def _claim(self) -> None:
        """Become the mirror's writer, by an index that lists what it lists already.

        Raises:
            TrainctlError: The mirror is another run's, or another copy of this run sends to it.
        """
        store = self._opened()
        newest, self._highest = newest_index(store)
        self._there = part_keys(store)
        self._sent &= set(self._there)  # the store may have lost some
        checkpoints = self._inherited(newest) if newest is not None else []
        self._listed = {}
        self._records = ()
        if newest is not None and checkpoints is not None:
            self._records = read_files(store, newest.records)
            for each in checkpoints:
                self._listed[each.files] = parts_of(read_files(store, each.files))
        index = self._commit(checkpoints or [], collects=False)
        if store.create(index_key(index.number), index.encode()) or not self._is_newest(store):
            self._index = None
            raise MachineError(
                f"{self._url} replaces an object although it must not: two runs could overwrite "
                "each other there",
                hint="a store with conditional writes (If-None-Match), as S3, GCS and MinIO have",
            )

    def _inherited(self, newest: Index) -> list[ListedCheckpoint] | None:
        """Return what this run takes over of an index; None if the store went back in time.

        Raises:
            TrainctlError: The mirror is another run's, or another copy of this run sends to it.
        """
        state, encoded = self._state, hashlib.sha256(newest.encode()).hexdigest()
        if newest.run != self._id:
            raise RunStateError(
                f"{self._url} is the mirror of another run, {newest.name} ({newest.host})",
                hint="checkpoint.mirror=URL/NAME: a folder of its own for each run",
            )
        if newest.writer == state.writer and encoded == state.intended:
            return list(newest.checkpoints)
        if newest.writer == state.writer and newest.number == state.number:
            return list(newest.checkpoints)
        if newest.writer == state.writer and newest.number < state.number:
            return None  # it lost an index, so perhaps parts: all of them are verified again
        if newest.writer == state.fetched_from:
            # Later checkpoints are of the run that this one replaces.
            limit = state.fetched_step
            return [each for each in newest.checkpoints if each.step <= limit]
        raise RunStateError(
            f"{self._url} has another copy of this run as its writer ({newest.name} on "
            f"{newest.host}), which may be running",
            hint=f"continue that one, or this one under another checkpoint.mirror; `trainctl "
            f"resume {self._url}` makes a copy that may write there",
        )

    def _local_signature(self) -> Signature:
        """Return what changes when a checkpoint is saved, removed or set aside."""
        names = [path.name for path in self._run.checkpoints.glob("*.before-attempt-*")]
        folders = [
            path
            for alone in (False, True)
            for _, path in checkpoint_folders(self._run, weights_only=alone)
        ]
        found = _signature(self._run.root, [path / MANIFEST for path in folders])
        return (*found, *((name, 0, 0) for name in sorted(names)))

    def _still_valid(self, local: Sequence[CheckpointInfo]) -> dict[str, ListedCheckpoint]:
        """Return what is listed, without what a resume from an earlier step has left behind."""
        assert self._index is not None
        valid, whole = {}, {info.path for info in local}
        for each in self._index.checkpoints:
            left = any(
                info.attempt > each.attempt and info.step < each.step for info in local
            ) or any(
                _sha256_or_none(path) == each.manifest
                for path in self._run.checkpoints.glob(f"{each.name}.before-attempt-*")
            )
            here = self._run.checkpoints / each.name
            is_other = here in whole and _sha256_or_none(here) != each.manifest
            if not left and not is_other:
                valid[each.name] = each
        return valid

    def _wanted(
        self, local: Sequence[CheckpointInfo], listed: dict[str, ListedCheckpoint]
    ) -> list[CheckpointInfo]:
        """Return the checkpoints that the mirror is to have, by the rules of local rotation."""
        folder, here = self._run.checkpoints, {info.path.name for info in local}
        known = [
            CheckpointInfo(
                step=each.step,
                path=folder / name,
                size_bytes=each.bytes,
                metrics=each.metrics,
                kept_for=each.kept_for,
                attempt=each.attempt,
                weights_only=each.weights_only,
            )
            for name, each in listed.items()
            if name not in here
        ]
        wanted = []
        for alone in (False, True):
            found = [info for info in [*local, *known] if info.weights_only == alone]
            found.sort(key=lambda info: info.step)
            kept = kept_checkpoints(found, self._config, weights_only=alone)
            wanted += [info for info in found if info.path in kept]
        return wanted

    def _send_checkpoint(self, info: CheckpointInfo) -> ListedCheckpoint | None:
        """Send a checkpoint; None if it was rotated away meanwhile, or is damaged on this disk.

        Raises:
            TrainctlError: The store does not hold what was sent.
        """
        self._keep(sending=info.path.name)
        try:
            names = {
                entry["name"]: entry["sha256"]
                for entry in read_manifest(info.path, self._id)["files"]
            }
            files = [self._send_file(info.path, info.path / name) for name in [*names, MANIFEST]]
            # Its evaluation may have ended meanwhile; a manifest changed since then is sent next.
            metrics = read_manifest(info.path, self._id)["metrics"]
        except (ValueError, FileNotFoundError):
            if info.path.is_dir():
                raise
            return None
        for file in files:
            if names.get(file.name, file.sha256) != file.sha256:
                why = "on this disk (its checksum does not match)"
                self._damaged = f"{info.path}: {file.name} is damaged {why}"
                return None
        key = self._send_part(FileSet(tuple(files)).encode())
        self._listed[key] = parts_of(files)
        return ListedCheckpoint(
            name=info.path.name,
            step=info.step,
            bytes=sum(file.bytes for file in files),
            files=key,
            manifest=files[-1].sha256,
            metrics=metrics,
            kept_for=info.kept_for,
            attempt=info.attempt,
            weights_only=info.weights_only,
            stored=time.time(),
        )

    def _send_file(self, folder: Path, path: Path) -> StoredFile:
        """Send a file in parts, a few at a time.

        Raises:
            FileNotFoundError: It is gone.
        """
        whole, size = hashlib.sha256(), 0
        keys: list[str] = []
        waiting: list[Future[str]] = []
        with ThreadPoolExecutor(PARTS_AT_ONCE) as threads:
            for block in _blocks(path):
                whole.update(block)
                size += len(block)
                waiting.append(threads.submit(self._send_part, block))
                if len(waiting) == PARTS_AT_ONCE:
                    keys.append(waiting.pop(0).result())
            keys += [each.result() for each in waiting]
        name = path.relative_to(folder).as_posix()
        return StoredFile(name, size, whole.hexdigest(), tuple(keys))

    def _send_part(self, data: bytes) -> str:
        """Send a part unless the mirror has it, verify it, and return its key.

        Raises:
            TrainctlError: The store does not hold what was sent.
        """
        store, sha256 = self._opened(), hashlib.sha256(data).hexdigest()
        key = part_key(self._state.writer, sha256)
        if key in self._sent:
            return key
        if key not in self._there or not self._is_stored(store, key, sha256):
            self._limit.wait(len(data))
            store.write(key, data)
            if not self._is_stored(store, key, sha256):
                raise MachineError(
                    f"{self._url} does not hold what it confirmed: {key} is missing or differs"
                )
        self._sent.add(key)
        return key

    def _is_stored(self, store: Store, key: str, sha256: str) -> bool:
        content = store.read(key, is_own=True)
        self._limit.wait(len(content or b""))
        return content is not None and hashlib.sha256(content).hexdigest() == sha256

    def _record_paths(self) -> list[Path]:
        root = self._run.root
        found = [path for glob in RECORDS for path in sorted(root.glob(glob)) if path.is_file()]
        found += [path for path in record_files(self._run.events) if path.exists()]
        found = [path for path in found if not any(part.endswith(".tmp") for part in path.parts)]
        return [path for path in found if self._has_safe_name(path)]

    def _has_safe_name(self, path: Path) -> bool:
        """Return True for a name that a fetch accepts; another one is a problem of the mirror."""
        try:
            safe_path(Path(), path.relative_to(self._run.root).as_posix())
        except ValueError as error:
            self._damaged = f"a record is not sent: {error}"
            return False
        return True

    def _record_signature(self) -> Signature:
        return _signature(self._run.root, self._record_paths())

    def _commit(self, checkpoints: Iterable[ListedCheckpoint], *, collects: bool) -> Index:
        """Write and return the next index, with these checkpoints and the records as they are now.

        Args:
            collects: Whether to remove the parts that are not listed then. A claim does not: a
                checkpoint may have been sent in part.

        Raises:
            TrainctlError: Another process has written an index, or the store does not hold this.
        """
        store = self._opened()
        if self._index is not None:
            self._require_newest(store)
        recorded = self._record_signature()
        records = tuple(self._send_file(self._run.root, path) for path in self._record_paths())
        self._there = part_keys(store)
        index = Index(
            number=self._highest + 1,
            run=self._id,
            name=self._run.root.name,
            writer=self._state.writer,
            host=socket.gethostname(),
            records=self._send_part(FileSet(records).encode()),
            checkpoints=tuple(sorted(checkpoints, key=lambda each: (each.step, each.name))),
        )
        data = index.encode()
        self._keep(intended=hashlib.sha256(data).hexdigest())
        store.create(index_key(index.number), data)
        if store.read(index_key(index.number)) != data:
            raise MachineError(
                f"{self._url} did not list {index_key(index.number)}: another copy of this run "
                "sends to it, or the store lost it"
            )
        self._index, self._highest, self._recorded = index, index.number, recorded
        self._records = records
        self._keep(
            number=index.number,
            stored={each.name: each.manifest for each in index.checkpoints},
            sending="",
        )
        if collects and self._is_newest(store):
            self._collect(store)
        return index

    def _require_newest(self, store: Store) -> None:
        """Raise if the store lost what was listed, or another process listed something since."""
        if not self._is_newest(store):
            raise MachineError(
                f"{self._url} does not have what was listed last: another copy of this run sends "
                "to it, or the store lost it"
            )

    def _is_newest(self, store: Store) -> bool:
        """Return True if the last index of this writer is what the mirror lists now."""
        newest, _ = newest_index(store)
        return newest == self._index

    def _collect(self, store: Store) -> None:
        """Remove parts that were there before the last index, which does not refer to them."""
        assert self._index is not None
        used = parts_of(self._records) | {self._index.records}
        for each in self._index.checkpoints:
            used |= {each.files} | self._listed[each.files]
        garbage = [key for key in self._there if key not in used]
        store.remove([key for key in index_keys(store) if key < index_key(self._index.number)])
        store.remove(garbage)
        self._sent -= set(garbage)
        self._there = [key for key in self._there if key in used]


def _sha256_or_none(checkpoint: Path) -> str | None:
    try:
        return manifest_sha256(checkpoint)
    except OSError:
        return None


def _signature(root: Path, paths: Sequence[Path]) -> Signature:
    """Return name, size and time of files; one that is gone counts as empty."""
    found = []
    for path in paths:
        try:
            status = path.stat()
        except OSError:
            continue
        found.append((path.relative_to(root).as_posix(), status.st_size, status.st_mtime_ns))
    return tuple(found)


def _blocks(path: Path) -> Iterator[bytes]:
    """Yield a file in blocks of a part's size, without an unfinished last line of a record."""
    with path.open("rb") as stream:
        left = path.stat().st_size  # what is appended from now on is left for the next time
        while left > 0 and (block := stream.read(min(PART_BYTES, left))):
            left -= len(block)
            if not left and path.suffix in _LINES:
                block = block[: block.rfind(b"\n") + 1]
            if block:
                yield block


class _Bandwidth:
    """Limit of bytes per second, shared by threads; None is unlimited."""

    def __init__(self, bytes_per_second: int | None) -> None:
        self._rate = bytes_per_second
        self._lock = threading.Lock()
        self._free_at = 0.0

    def wait(self, size: int) -> None:
        """Wait until so many bytes more are within the limit."""
        if self._rate is None:
            return
        with self._lock:
            start = max(self._free_at, time.monotonic())
            self._free_at = start + size / self._rate
        time.sleep(max(0.0, start - time.monotonic()))
