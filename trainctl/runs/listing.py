"""Summary of a run from its directory, wherever it runs, and the step that it resumes from."""

from __future__ import annotations

import math
import time
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from trainctl.config.reading import read_json
from trainctl.errors import TrainctlError
from trainctl.runs.attempts import config_of
from trainctl.runs.checkpoints import checkpoint_folders, newest_checkpoint
from trainctl.runs.directory import last_attempt, read_record
from trainctl.runs.event_descriptions import last_recompilation, still_diverged, still_slow
from trainctl.runs.failures import first_failure
from trainctl.runs.layout import RunPaths
from trainctl.runs.lock import Holder, find_holder
from trainctl.runs.mirror_state import describe_mirror
from trainctl.runs.records import Event, events_from_end, read_events
from trainctl.runs.status import SchedulerJob, State, Status, read_job, read_status

T = TypeVar("T")

_TAIL_BYTES = 262_144

NEW, LOST = "new", "lost"
"""States besides those of `State`. `new`: nothing was started yet. `lost`: the status says that it
runs, but nobody holds the run, so launcher and agent were killed at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """One line of `trainctl runs ls`."""

    path: Path
    state: str
    """A `State`, or `new` or `lost`."""
    created: float
    """Creation time, in Unix seconds."""
    updated: float
    """Time of the last step or change of state, in Unix seconds."""
    attempt: int
    """Number of the newest attempt; 0 before the first."""
    launcher: str
    """`launcher.kind` of the newest attempt."""
    nodes: int
    """Number of nodes in the plan."""
    ranks: int
    """World size in the plan."""
    step: int
    """Optimizer steps done, after resumes."""
    stop_step: int | None
    """Step at which the newest attempt ends."""
    total_steps: int | None
    """Steps of the whole run."""
    loss: float | None
    """Loss of the last step; None before the first."""
    host: str
    """Machine of the launcher."""
    exit_code: int | None
    """Exit code of the newest attempt's launch, once it ended."""
    message: str
    """Sentence about its end."""
    job: SchedulerJob | None
    """Scheduler's job of the newest attempt."""
    holder: Holder | None
    """Process that holds the run's lock now."""
    missing_records: str
    """Reason why `step` and `loss` are older than the run; empty if they are not."""

    @property
    def is_live(self) -> bool:
        """Whether a launch of it runs, or waits in a queue."""
        return self.holder is not None or self.state == State.queued

    @property
    def is_cut_short(self) -> bool:
        """Whether `training.stop_after_steps` ended the newest attempt, and steps are left."""
        stop, total = self.stop_step or 0, self.total_steps or 0
        return self.state == State.finished and stop < total and self.step >= stop

    @property
    def shown_state(self) -> str:
        """State to show to people: a run that was cut short has stopped rather than finished."""
        return State.stopped.value if self.is_cut_short else self.state

    def __str__(self) -> str:
        loss = "" if self.loss is None else f", loss {self.loss:.4f}"
        why = f": {self.message}" if self.message else ""
        return f"{self.shown_state}, step {self.steps_text}{loss}{why}"

    @property
    def steps_text(self) -> str:
        """Steps done, and how many there are in all if that is known."""
        return f"{self.step:,}" + (f" of {self.total_steps:,}" if self.total_steps else "")

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain JSON, for `--json`."""
        plain = {each.name: getattr(self, each.name) for each in fields(RunSummary)}
        del plain["holder"]
        return plain | {"path": str(self.path), "job": self.job.id if self.job else None}


def summarise_run(run: RunPaths) -> RunSummary:
    """Return the summary of a run. Reads only the end of its records.

    Raises:
        TrainctlError: `run.json` is damaged (exit code 5).
    """
    created = float(read_record(run)["created"])
    now_holds = find_holder(run)
    status = read_status(run)
    number = last_attempt(run)
    attempt = run.attempt(number)
    plan = _read(attempt.plan)
    step = _newest_event(run, "step")
    state: str = NEW
    if status is not None:
        state = status.state.value
        # The holder was read first: a launch that ends writes its last state, then unlocks.
        if now_holds is None and status.state in (State.starting, State.running):
            state = LOST
    names = ("data", "tensor", "pipeline", "sequence", "context")
    axes = [_at(plan, int, "mesh", name) for name in names]
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
    """Return which records `events.jsonl` of an ended run lacks; empty if it is complete.

    The last recorded step must not be before the newest checkpoint. If the launch finished, the
    last step must not be before its stop step either, unless the trainer recorded an earlier end.
    """
    newest = max((number for number, _ in checkpoint_folders(run)), default=0)
    if newest > step:  # read manifests only if names suggest a gap
        checkpoint, _ = newest_checkpoint(run)
        # An imported checkpoint is of no attempt.
        if checkpoint is not None and checkpoint.step > step and checkpoint.attempt:
            return f"they end at step {step:,}, before the checkpoint of step {checkpoint.step:,}"
    stop_step = _at(plan, int, "stop_step") or 0
    config = _at(plan, dict, "config") or {}
    is_own = any(config.get(key) is not None for key in ("script", "trainer"))
    if is_own or status is None or status.state is not State.finished or step >= stop_step:
        return ""
    if _newest_event(run, "end").get("attempt") == status.attempt:
        return ""
    return f"they end at step {step:,}, and the run finished"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus(RunSummary):
    """Summary of a run, with what went wrong in its newest attempt."""

    failure: Event | None
    """Record of the first failure."""
    checkpoint: int | None
    """Step of the newest complete checkpoint."""
    stragglers: tuple[Event, ...]
    """Last record of each rank that is still slower than its peers."""
    divergence: Event | None
    """Record of a loss that has risen and not come down."""
    recompilation: Event | None
    """Newest record of blocks compiled anew in the attempt."""
    mirror: dict[str, Any] | None
    """State of `checkpoint.mirror` (`describe_mirror`); None without a mirror."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields as plain JSON, for `--json`."""
        return {
            **RunSummary.to_json(self),
            "failure": self.failure,
            "checkpoint": self.checkpoint,
            "stragglers": list(self.stragglers),
            "divergence": self.divergence,
            "recompilation": self.recompilation,
            "mirror": self.mirror,
        }


def status_of(run: RunPaths) -> RunStatus:
    """Return how a run stands.

    Raises:
        TrainctlError: `run.json` is damaged, or the records cannot be read (exit code 5).
    """
    summary = summarise_run(run)
    told = read_events(run.events, "failure", "straggler", "divergence", "recompilation")
    checkpoint, _ = newest_checkpoint(run)
    return RunStatus(
        **{each.name: getattr(summary, each.name) for each in fields(RunSummary)},
        failure=first_failure(told, summary.attempt),
        checkpoint=checkpoint.step if checkpoint else None,
        stragglers=tuple(still_slow(told, summary.attempt)),
        divergence=still_diverged(told, summary.attempt),
        recompilation=last_recompilation(told, summary.attempt),
        mirror=_mirror(run),
    )


def _mirror(run: RunPaths) -> dict[str, Any] | None:
    """Return how the mirror stands; None without one, or if the configuration cannot be read."""
    try:
        return describe_mirror(run, config_of(run).checkpoint)
    except TrainctlError:
        return None


def summarise_runs(runs: list[RunPaths]) -> list[RunSummary]:
    """Return the summaries of several runs; a run that is removed meanwhile is left out."""
    found = []
    for run in runs:
        with suppress(TrainctlError):
            found.append(summarise_run(run))
    return found


def age_text(since: float) -> str:
    """Return the time since a moment (Unix seconds) in its largest unit, such as ``3 h``."""
    seconds = max(0.0, time.time() - since)
    for unit, name in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds:.0f} s"


def last_step(run: RunPaths) -> int:
    """Return the step of the last `step` record; 0 before the first."""
    return _at(_newest_event(run, "step"), int, "step") or 0


def _newest_event(run: RunPaths, kind: str) -> dict[str, Any]:
    """Return the newest record of a kind, if it is near the end of the file; else an empty one."""
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
    """Return the value under nested names; None if it is missing or has another type.

    A run of another version, or a file that a person has edited, must not hide the other runs.
    """
    for name in names:
        value = value.get(name) if isinstance(value, dict) else None
    try:
        return None if value is None else kind(value)  # type: ignore[call-arg]
    except (TypeError, ValueError, OverflowError):
        return None


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Starting point of the next attempt."""

    step: int
    """Optimizer step of the newest complete checkpoint; 0 is the beginning."""
    lost: int
    """Steps that the newest attempt made after it, which have to be repeated."""

    @classmethod
    def of(cls, run: RunPaths) -> ResumePoint:
        """Find it from the run's checkpoints and the end of its records."""
        checkpoint, _ = newest_checkpoint(run)
        step, made = checkpoint.step if checkpoint is not None else 0, _newest_event(run, "step")
        is_own = made.get("attempt") == last_attempt(run)
        return cls(step, max(0, (_at(made, int, "step") or 0) - step) if is_own else 0)

    def sentence(self, run: RunPaths) -> str:
        """Return a sentence: ``trainctl resume a continues from step 40: 3 steps are lost``."""
        how = f"continues from step {self.step:,}" if self.step else "starts from the beginning"
        lost = f"{self.lost:,} steps are" if self.lost > 1 else f"{('no', '1')[self.lost]} step is"
        return f"trainctl resume {run.root} {how}: {lost} lost"
