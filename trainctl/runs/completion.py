"""Runs whose work was done when they died: what says so, and the records that they lack."""

from __future__ import annotations

from contextlib import suppress

from trainctl.errors import TrainctlError
from trainctl.plans.types import RunPlan
from trainctl.runs.checkpoints import CheckpointInfo, checkpoint_folders, newest_checkpoint
from trainctl.runs.directory import last_attempt, read_plan
from trainctl.runs.layout import RunPaths
from trainctl.runs.lock import hold_lock
from trainctl.runs.records import EventWriter, events_from_end
from trainctl.runs.status import State, read_status, write_status

_DIED = (State.starting, State.running, State.failed, State.stopped)
"""States of a run that nobody holds, and that has not finished as far as its status knows."""


def why_done(run: RunPaths, checkpoint: CheckpointInfo, made: RunPlan) -> tuple[str, str] | None:
    """Return why nothing is left to train, and which change would train on; None if there is.

    An evaluation of the checkpoint's step that was not done is left to do.
    """
    if checkpoint.is_unfinished:
        return None
    if checkpoint.step >= made.stop_step:
        return (
            f"{run.root} is at step {checkpoint.step:,}, where this launch ends",
            "a larger training.steps or training.stop_after_steps trains on",
        )
    patience, training = checkpoint.patience, made.config.training
    limit, since = training.stop_patience, patience.get("evaluations_since", 0)
    if limit is None or since < limit:
        return None
    by = f"more than {training.stop_min_delta:g} " if training.stop_min_delta else ""
    return (
        f"{run.root} ended at step {checkpoint.step:,}, because in {since:.0f} evaluations the "
        f"held-out loss was never {by}below {patience['best']:.4f}, that of step "
        f"{patience['best_step']:,} (training.stop_patience={limit})",
        "a larger training.stop_patience, or null, trains on",
    )


def record_completion(run: RunPaths) -> bool:
    """Write down that the newest attempt finished, if it died when its work was done.

    Returns:
        Whether it was written: False also for a run that somebody holds or nobody may write.
    """
    status = read_status(run)
    if status is None or status.state not in _DIED:
        return False
    with suppress(TrainctlError, OSError):
        plan = read_plan(run.attempt(last_attempt(run)).plan)
        checkpoint = _last_checkpoint(run, plan)
        if checkpoint is None or why_done(run, checkpoint, plan) is None:
            return False
        with hold_lock(run, patience_seconds=0.0):
            if read_status(run) != status:
                return False
            _write_end(run, status.attempt, checkpoint.step, plan)
            before = status.message or "its processes were killed"
            message = f"all was saved when the attempt ended: {before}"
            write_status(run, status.changed(State.finished, exit_code=0, message=message))
            return True
    return False


def _last_checkpoint(run: RunPaths, plan: RunPlan) -> CheckpointInfo | None:
    """Return the newest checkpoint if it may be the last one of the plan; most are not read."""
    newest = max((step for step, _ in checkpoint_folders(run)), default=0)
    may_be_last = newest >= plan.stop_step or plan.config.training.stop_patience is not None
    return newest_checkpoint(run)[0] if plan.config.trains_itself and may_be_last else None


def _write_end(run: RunPaths, attempt: int, step: int, plan: RunPlan) -> None:
    """Write the record of the attempt's end that its trainer did not come to write."""
    last = next(events_from_end(run.events, "end"), {})
    if (last.get("attempt"), last.get("step")) == (attempt, step):
        return
    reason = "stop_after_steps" if step >= plan.stop_step else "no_improvement"
    if step >= plan.total_steps:
        reason = "complete"
    with EventWriter(run.events, attempt) as events:
        events.write("end", step=step, reason=reason)
