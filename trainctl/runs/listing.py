"""What a run directory tells about its run, whoever started it and wherever it runs."""

from __future__ import annotations

import math
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from trainctl.config.reading import read_json
from trainctl.errors import TrainctlError
from trainctl.runs.checkpoints import checkpoint_folders, newest_checkpoint
from trainctl.runs.directory import last_attempt, read_record
from trainctl.runs.job import SchedulerJob, read_job
from trainctl.runs.layout import RunPaths
from trainctl.runs.lock import Holder, holder
from trainctl.runs.records import events_from_end
from trainctl.runs.status import State, Status, read_status

T = TypeVar("T")

_TAIL_BYTES = 262_144

NEW, LOST = "new", "lost"
"""States beside those of `State`: nothing was started yet; it runs by its status, but nobody
holds the run, so launcher and agent were ended at one blow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """One line of `trainctl runs ls`."""

    path: Path
    state: str
    """A `State`, or `new` or `lost`."""
    created: float
    """Unix seconds."""
    updated: float
    """Unix seconds of the last sign: a step, or a change of state."""
    attempt: int
    """Number of the newest attempt; 0 before the first."""
    launcher: str
    """Kind of its launcher."""
    nodes: int
    """Machines that it is planned for."""
    ranks: int
    """Processes that it is planned for."""
    step: int
    """Optimizer steps done, of the run as it stands."""
    stop_step: int | None
    """Step at which the newest attempt ends."""
    total_steps: int | None
    """Steps of the whole run."""
    loss: float | None
    """Loss of the last step; None before the first."""
    host: str
    """Machine of the launcher."""
    exit_code: int | None
    """What ended the newest attempt, once it ended."""
    message: str
    """Why it ended, in a sentence."""
    job: SchedulerJob | None
    """What a scheduler knows the newest attempt as."""
    holder: Holder | None
    """Who holds the run now."""
    missing_records: str
    """Why `step` and `loss` are older than the run; empty if they are not."""

    @property
    def is_live(self) -> bool:
        """Whether something of it runs, or waits in a queue."""
        return self.holder is not None or self.state == State.queued

    @property
    def is_cut_short(self) -> bool:
        """Whether `training.stop_after_steps` ended the newest attempt, and steps are left."""
        stop, total = self.stop_step or 0, self.total_steps or 0
        return self.state == State.finished and stop < total and self.step >= stop

    def to_json(self) -> dict[str, Any]:
        """For `--json`."""
        return {
            "path": str(self.path),
            "state": self.state,
            "created": self.created,
            "updated": self.updated,
            "attempt": self.attempt,
            "launcher": self.launcher,
            "nodes": self.nodes,
            "ranks": self.ranks,
            "step": self.step,
            "stop_step": self.stop_step,
            "total_steps": self.total_steps,
            "loss": self.loss,
            "host": self.host,
            "exit_code": self.exit_code,
            "message": self.message,
            "job": self.job.id if self.job else None,
            "missing_records": self.missing_records,
        }


def summarise(run: RunPaths) -> RunSummary:
    """Look at a run; reads the end of its records only.

    Raises:
        TrainctlError: `run.json` is damaged (exit code 5).
    """
    created = float(read_record(run)["created"])
    now_holds = holder(run)
    status = read_status(run)
    number = last_attempt(run)
    attempt = run.attempt(number)
    plan = _read(attempt.plan)
    step = _newest_event(run, "step")
    state: str = NEW
    if status is not None:
        state = status.state.value
        # Asked first: a launch that ends writes its last state before it lets go.
        if now_holds is None and status.state in (State.starting, State.running):
            state = LOST
    axes = [_at(plan, int, "mesh", axis) for axis in ("data", "tensor", "pipeline", "sequence")]
    return RunSummary(
        path=run.root,
        state=state,
        created=created,
        updated=max(_at(step, float, "time") or 0.0, status.updated if status else created),
        attempt=number,
        launcher=_at(plan, str, "config", "launcher", "kind") or "",
        nodes=_at(plan, int, "hardware", "nodes") or 1,
        ranks=math.prod(axis or 1 for axis in axes),
        step=_at(step, int, "step") or 0,
        stop_step=_at(plan, int, "stop_step"),
        total_steps=_at(plan, int, "total_steps"),
        loss=_at(step, float, "loss"),
        host=status.host if status else "",
        exit_code=status.exit_code if status else None,
        message=status.message if status else "",
        job=read_job(attempt) if number else None,
        holder=now_holds,
        missing_records=_missing_records(run, plan, status, _at(step, int, "step") or 0)
        if now_holds is None
        else "",
    )


def _missing_records(run: RunPaths, plan: dict[str, Any], status: Status | None, step: int) -> str:
    """Return how `events.jsonl` falls short of a run that nothing runs of; empty if it does not.

    The last step that is recorded must not be before the newest checkpoint; nor, in a launch that
    finished, before the step at which it was to stop, unless the trainer recorded an earlier end.
    """
    newest = max((number for number, _ in checkpoint_folders(run)), default=0)
    if newest > step:  # only now are manifests read
        checkpoint, _ = newest_checkpoint(run)
        if checkpoint is not None and checkpoint.step > step:
            return f"they end at step {step:,}, before the checkpoint of step {checkpoint.step:,}"
    stop_step = _at(plan, int, "stop_step") or 0
    config = _at(plan, dict, "config") or {}
    is_own = any(config.get(key) is not None for key in ("script", "trainer"))
    if is_own or status is None or status.state is not State.finished or step >= stop_step:
        return ""
    if _newest_event(run, "end").get("attempt") == status.attempt:
        return ""
    return f"they end at step {step:,}, and the run finished"


def summaries(runs: list[RunPaths]) -> list[RunSummary]:
    """Of several runs; one that is removed meanwhile is left out."""
    found = []
    for run in runs:
        with suppress(TrainctlError):
            found.append(summarise(run))
    return found


def age_text(since: float) -> str:
    """How long ago a moment was, in its largest unit, such as ``3 h``."""
    seconds = max(0.0, time.time() - since)
    for unit, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds:.0f} s"


def last_step(run: RunPaths) -> int:
    """Return the step of the last `step` record: how far the run has come; 0 before the first."""
    return _at(_newest_event(run, "step"), int, "step") or 0


def _newest_event(run: RunPaths, kind: str) -> dict[str, Any]:
    """Return the newest record of a kind near the end of the records; empty if there is none."""
    try:
        return next(events_from_end(run.events, kind, most_bytes=_TAIL_BYTES), {})
    except TrainctlError:
        return {}


def _read(path: Path) -> dict[str, Any]:
    try:
        value = read_json(path)
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def _at(value: Any, kind: type[T], *names: str) -> T | None:
    """What a file holds under these names; None if it is not there, or of another kind.

    A run of another version, or what a person has changed, must not keep the others from view.
    """
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    try:
        return None if value is None else kind(value)  # type: ignore[call-arg]
    except (TypeError, ValueError, OverflowError):
        return None
