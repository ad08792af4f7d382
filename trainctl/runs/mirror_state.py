"""State of a run's mirror, its copies in an object store: what is stored, what waits. No torch.

The process that sends (`trainctl.mirror`) writes it. Rotation reads it, so that no checkpoint is
deleted before its copy is verified, and so do commands that show the run.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trainctl.config.codec import from_plain
from trainctl.config.quantities import disk_text
from trainctl.config.reading import read_json
from trainctl.config.schema import CheckpointConfig
from trainctl.runs.checkpoints import CheckpointInfo, kept_checkpoints, list_checkpoints
from trainctl.runs.files import ensure_folder, write_json
from trainctl.runs.layout import RunPaths
from trainctl.runs.manifest import MANIFEST

MIRROR = "mirror"
"""Name of the process that sends, among the companions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MirrorState:
    """Content of `loggers/mirror.json`."""

    url: str = ""
    """Value of `checkpoint.mirror` that the rest is about."""
    writer: str = ""
    """Random id of this run directory as a writer of the mirror."""
    number: int = 0
    """Number of the last index that this directory wrote, or was fetched from."""
    intended: str = ""
    """SHA-256 of an index that may have been written before the process died."""
    fetched_from: str = ""
    """Writer of the index that this directory was fetched from, which it may replace."""
    fetched_step: int = 0
    """Step of the fetched checkpoint."""
    stored: dict[str, str] = field(default_factory=dict)
    """Checkpoints listed in the mirror: SHA-256 of the manifest's file by folder name."""
    sending: str = ""
    """Folder name of the checkpoint that is being sent."""
    problem: str = ""
    """Reason why the rest cannot be sent; empty if there is none."""


def read_mirror_state(run: RunPaths) -> MirrorState:
    """Read the state; the initial one before the first write, or if the file is damaged."""
    try:
        return from_plain(MirrorState, read_json(run.companion(MIRROR).cursor))
    except (OSError, ValueError, TypeError):
        return MirrorState()


def write_mirror_state(run: RunPaths, state: MirrorState) -> None:
    """Replace the state.

    Raises:
        OSError: The disk is full, or the folder cannot be written.
    """
    ensure_folder(run.companion(MIRROR).folder)
    write_json(run.companion(MIRROR).cursor, asdict(state))


def manifest_sha256(checkpoint: Path) -> str:
    """Return the SHA-256 of the manifest's file, which identifies a checkpoint's whole content."""
    with (checkpoint / MANIFEST).open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def kept_for_mirror(
    run: RunPaths, checkpoints: Sequence[CheckpointInfo], kept: set[Path], keep: int
) -> set[Path]:
    """Return checkpoints that rotation must spare, because the mirror does not have them yet.

    That is the one being sent, then the newest, `keep` at most; fewer if the disk has no room for
    another checkpoint. One that the mirror would rotate away is not spared.

    Args:
        checkpoints: Whole checkpoints of one kind, oldest first.
        kept: Those that rotation keeps anyway.
    """
    state = read_mirror_state(run)
    stored = [each for each in checkpoints if _is_stored(state, each)]
    waiting = [
        each
        for each in checkpoints
        if each.path not in kept
        and each not in stored
        and sum(other.step > each.step for other in stored) < keep
    ]
    waiting.sort(key=lambda each: (each.path.name != state.sending, -each.step))
    spared = waiting[:keep]
    usage = shutil.disk_usage(run.checkpoints)
    free, largest = usage.free, max((each.size_bytes for each in checkpoints), default=0)
    doomed = [each for each in checkpoints if each.path not in kept and each not in spared]
    free += sum(each.size_bytes for each in doomed)
    while spared and usage.total > 0 and free < largest:  # some file systems report nothing
        free += spared.pop().size_bytes
    return {each.path for each in spared}


def waiting_checkpoints(run: RunPaths, config: CheckpointConfig) -> list[CheckpointInfo]:
    """Return the checkpoints that the mirror is to have and does not list yet, oldest first."""
    state = read_mirror_state(run)
    waiting = []
    for weights_only in (False, True):
        found = list_checkpoints(run, weights_only=weights_only)
        kept = kept_checkpoints(found, config, weights_only=weights_only)
        waiting += [each for each in found if each.path in kept and not _is_stored(state, each)]
    return waiting


def _is_stored(state: MirrorState, checkpoint: CheckpointInfo) -> bool:
    known = state.stored.get(checkpoint.path.name)
    try:
        return known is not None and known == manifest_sha256(checkpoint.path)
    except OSError:  # it was rotated away meanwhile
        return False


def describe_mirror(run: RunPaths, config: CheckpointConfig) -> dict[str, Any] | None:
    """Return what is stored and what waits, for `--json` and reports; None without a mirror."""
    if config.mirror is None:
        return None
    state, waiting = read_mirror_state(run), waiting_checkpoints(run, config)
    steps = [int(name.rpartition("-")[2]) for name in state.stored if name.startswith("step-")]
    return {
        "url": config.mirror,
        "step": max(steps, default=None),
        "waiting": [each.path.name for each in waiting],
        "waiting_bytes": sum(each.size_bytes for each in waiting),
        "sending": state.sending,
        "problem": state.problem,
    }


def mirror_text(mirror: dict[str, Any]) -> str:
    """Return what `describe_mirror` found in a sentence without its problem."""
    stored = "nothing yet" if mirror["step"] is None else f"up to step {mirror['step']:,}"
    if not mirror["waiting"]:
        return f"{mirror['url']} has {stored}, and nothing waits"
    count, size = len(mirror["waiting"]), mirror["waiting_bytes"]
    what = "1 checkpoint waits" if count == 1 else f"{count} checkpoints wait"
    return f"{mirror['url']} has {stored}, and {what} ({disk_text(size)})"
