"""`trainctl resume`: a new attempt from a checkpoint, or from the beginning."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from trainctl.cli.checkpoint_selection import check_resumable, select
from trainctl.cli.console import say, tolerate_broken_pipe
from trainctl.cli.extend import compare_with_checkpoint
from trainctl.cli.findings import show_findings
from trainctl.cli.ignored_config import changes_text, ignored_config_findings
from trainctl.cli.planning import Planned, plan
from trainctl.cli.readiness import checkpoint_bytes
from trainctl.cli.start import accept, check_machine, program_name, run_attempt, show_start
from trainctl.config.compose import Composed
from trainctl.config.diff import Change, diff
from trainctl.config.schema import RunConfig
from trainctl.errors import ExitCode, TrainctlError
from trainctl.launch.rank_command import user_code_folder
from trainctl.plan.types import RunPlan
from trainctl.runs.attempts import config_of, standing_attempt
from trainctl.runs.checkpoints import CheckpointInfo, examine, leave_behind, newest_checkpoint
from trainctl.runs.directory import last_attempt, open_run
from trainctl.runs.layout import RunPaths
from trainctl.runs.lock import hold
from trainctl.runs.records import read_events


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

    A run that has never saved anything is started again, unchanged.

    Args:
        configure: Makes the attempt's configuration from the run's.
        force: Start although the budget does not fit.
        as_json: Print records on stdout as JSON lines, and nothing else there.
        verbose: Show the whole plan and budget.
        step: Step of the checkpoint to resume from; later checkpoints are left behind.
        attempt: Attempt whose configuration to take; None takes the one that stands for the run.
        from_start: Begin again, leaving all checkpoints behind.

    Raises:
        TrainctlError: The folder is no run, is in use or has no checkpoint; or the plan is refused.
        typer.Exit: The run did not end well; carries its exit code.
    """
    run = open_run(root)
    if not dry_run:
        tolerate_broken_pipe()
    with hold(run):
        standing = standing_attempt(run)
        show_findings(ignored_config_findings(run, standing if attempt is None else None))
        before = config_of(run, attempt)
        checkpoint = None if from_start or not before.trains_itself else _checkpoint(run, step)
        composed = configure(before if checkpoint is None else next_launch(before))
        # A user's own script or function saves and resumes by itself.
        if not composed.config.trains_itself:
            checkpoint = None
        elif checkpoint is None and not from_start:
            require_nothing_saved(run)
        folder = user_code_folder(composed.config, run)
        planned = plan(composed, with_files=True, tokenize=True, folder=folder)
        _show_changes(diff(before, planned.composed.config), run, attempt or standing.number)
        if checkpoint is not None and planned.assessment.plan is not None:
            check_resumable(planned.composed.config, checkpoint.path)
            if _is_done(run, checkpoint, planned):
                return
            compare_with_checkpoint(run, checkpoint, planned.assessment.plan)
        made = accept(planned, force=force, as_json=as_json, verbose=verbose or dry_run)
        say(_resuming(run, made, checkpoint, from_start=from_start))
        if dry_run:
            show_start(planned, made, run, as_json=as_json)
            return
        check_machine(planned, made, run.root)
        if from_start or (checkpoint is not None and step is not None):
            _set_aside_later_checkpoints(run, step or 0)
        size = checkpoint_bytes(planned)
        run_attempt(run, made, checkpoint_bytes=size, as_json=as_json, detach=detach)


def require_nothing_saved(run: RunPaths) -> None:
    """Refuse to begin again if checkpoints were saved, and none of them can be resumed from.

    Raises:
        TrainctlError: All are damaged or gone (exit code 5).
    """
    problems = [look.problem for look in examine(run) if look.problem]
    saved = [int(event["step"]) for event in read_events(run.events, "checkpoint")]
    if problems:
        what = f"no checkpoint of {run.root} is complete: {'; '.join(problems)}"
    elif saved:
        what = f"{run.root} saved a checkpoint at step {saved[-1]:,}, and none is there any more"
    else:
        return
    raise TrainctlError(
        what,
        hint=f"bring it back, or begin anew: trainctl resume {run.root} --from-start",
        exit_code=ExitCode.run_state,
    )


def _set_aside_later_checkpoints(run: RunPaths, step: int) -> None:
    """Move checkpoints after a step aside, so that the step's own is the newest; all for step 0."""
    for path in leave_behind(run, step, attempt=last_attempt(run) + 1):
        say(f"left behind: {path}")


def _resuming(
    run: RunPaths, made: RunPlan, checkpoint: CheckpointInfo | None, *, from_start: bool
) -> str:
    if not made.config.trains_itself:
        return f"starting {program_name(made.config)} of {run.root} again"
    where = "the beginning" if from_start else "the beginning: there is no checkpoint yet"
    return f"resuming {run.root} from {checkpoint.path.name if checkpoint else where}"


def next_launch(config: RunConfig) -> RunConfig:
    """Return the last attempt's configuration without settings of that launch only."""
    return replace(config, training=replace(config.training, stop_after_steps=None))


def _is_done(run: RunPaths, checkpoint: CheckpointInfo, planned: Planned) -> bool:
    """Return True if nothing is left to train; says why, and which change would train on."""
    made, patience = planned.assessment.plan, checkpoint.patience
    if made is None:
        return False
    if checkpoint.step >= made.stop_step:
        say(f"nothing to do: {run.root} is at step {checkpoint.step:,}, where this launch ends")
        say("hint: a larger training.steps or training.stop_after_steps trains on")
        return True
    limit, since = made.config.training.stop_patience, patience.get("evaluations_since", 0)
    if limit is not None and since >= limit:
        min_delta = made.config.training.stop_min_delta
        by = f"more than {min_delta:g} " if min_delta else ""
        say(
            f"nothing to do: {run.root} ended at step {checkpoint.step:,}, because in {since:.0f} "
            f"evaluations the held-out loss was never {by}below {patience['best']:.4f}, that of "
            f"step {patience['best_step']:,} (training.stop_patience={limit})"
        )
        say("hint: a larger training.stop_patience, or null, trains on")
        return True
    return False


def _checkpoint(run: RunPaths, step: int | None) -> CheckpointInfo | None:
    """Return the checkpoint of a step, or the newest complete one; warn of damaged newer ones."""
    if step is not None:
        ((_, path), *_) = select(run, [step])
        look = next((look for look in examine(run) if look.step == step), None)
        if look is not None and look.info is not None:
            return look.info
        problem = look.problem if look else f"{path.name} has the weights alone: no run goes on"
        raise TrainctlError(problem, exit_code=ExitCode.run_state)
    checkpoint, passed_over = newest_checkpoint(run)
    for problem in passed_over:
        say(f"warning: checkpoint passed over: {problem}", style="warning")
    return checkpoint


def _show_changes(changes: Sequence[Change], run: RunPaths, attempt: int) -> None:
    """Print the configuration changes since the attempt that the next one continues."""
    since = "the last attempt" if attempt == last_attempt(run) else f"attempt {attempt}"
    if not changes:
        say(f"configuration: unchanged since {since}")
    for change in changes:
        say(f"changed since {since}: {changes_text([change])}")
