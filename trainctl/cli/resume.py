"""`trainctl resume`: a new attempt from a checkpoint, or from the beginning."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from trainctl.cli.console import say, show_findings, tolerate_broken_pipe, warn
from trainctl.cli.start import accept, check_machine, program_name, run_attempt, show_start
from trainctl.config.compose import Composed
from trainctl.config.schema import RunConfig
from trainctl.launch.readiness import checkpoint_bytes
from trainctl.launch.resume import (
    PlannedResume,
    check_same_model,
    compare_with_checkpoint,
    plan_resume,
    why_done,
)
from trainctl.plan.types import RunPlan
from trainctl.runs.attempts import standing_attempt
from trainctl.runs.checkpoints import CheckpointInfo, leave_behind
from trainctl.runs.directory import last_attempt, open_run
from trainctl.runs.ignored_config import changes_text, ignored_config_findings
from trainctl.runs.layout import RunPaths
from trainctl.runs.lock import hold


def resume_run(
    root: Path,
    configure: Callable[[RunConfig], Composed],
    *,
    dry_run: bool,
    force: bool,
    as_json: bool,
    verbose: bool = False,
    step: int | None = None,
    attempt: int | None = None,
    from_start: bool = False,
    detach: bool = False,
) -> None:
    """Continue a run as a new attempt, from its newest complete checkpoint or an earlier one.

    Later checkpoints than that of `step`, or with `from_start` all of them, are left behind.

    Raises:
        TrainctlError: The folder is no run, is in use or has no checkpoint; or the plan is refused.
        typer.Exit: The run did not end well; carries its exit code.
    """
    run = open_run(root)
    if not dry_run:
        tolerate_broken_pipe()
    with hold(run):
        standing = standing_attempt(run) if attempt is None else None
        show_findings(ignored_config_findings(run, standing))
        resume = plan_resume(
            run, configure, step=step, attempt=attempt, from_start=from_start, warn=warn
        )
        _show_changes(resume, run)
        checkpoint, planned = resume.checkpoint, resume.planned
        if checkpoint is not None and planned.assessment.plan is not None:
            check_same_model(planned.composed.config, checkpoint.path, warn)
            done = why_done(run, checkpoint, planned.assessment.plan)
            if done is not None:
                say(f"nothing to do: {done[0]}")
                say(f"hint: {done[1]}")
                return
            compare_with_checkpoint(run, checkpoint, planned.assessment.plan, warn)
        made = accept(planned, force=force, as_json=as_json, verbose=verbose or dry_run)
        say(_resuming(run, made, checkpoint, from_start=from_start))
        if dry_run:
            show_start(planned, made, run, as_json=as_json)
            return
        check_machine(planned, made, run.root)
        if from_start or (checkpoint is not None and step is not None):
            for path in leave_behind(run, step or 0, attempt=last_attempt(run) + 1):
                say(f"left behind: {path}")
        size = checkpoint_bytes(planned)
        run_attempt(run, made, checkpoint_bytes=size, as_json=as_json, detach=detach)


def _resuming(
    run: RunPaths, made: RunPlan, checkpoint: CheckpointInfo | None, *, from_start: bool
) -> str:
    if not made.config.trains_itself:
        return f"starting {program_name(made.config)} of {run.root} again"
    where = "the beginning" if from_start else "the beginning: there is no checkpoint yet"
    return f"resuming {run.root} from {checkpoint.path.name if checkpoint else where}"


def _show_changes(resume: PlannedResume, run: RunPaths) -> None:
    """Print the configuration changes since the attempt that the next one continues."""
    is_last = resume.continues == last_attempt(run)
    since = "the last attempt" if is_last else f"attempt {resume.continues}"
    if not resume.changes:
        say(f"configuration: unchanged since {since}")
    for change in resume.changes:
        say(f"changed since {since}: {changes_text([change])}")
