"""`trainctl launch` and `trainctl resume`: plan, check, start, watch."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from trainctl.cli.arguments import (
    AttemptOption,
    ConfigDir,
    Detach,
    DryRun,
    Force,
    Json,
    Overrides,
    TargetAndOverrides,
    Verbose,
)
from trainctl.cli.commands import script_arguments
from trainctl.cli.console import (
    findings_to_json,
    print_data,
    print_json,
    print_message,
    print_warning,
    show_error,
    show_explain_hint,
    show_findings,
    tolerate_broken_pipe,
)
from trainctl.cli.plan_view import (
    show_brief_budget,
    show_budget,
    show_commands,
    show_plan,
    show_suggestions,
)
from trainctl.cli.progress import LiveFollower, Progress
from trainctl.config.codec import to_plain
from trainctl.config.compose import ComposedConfig, recompose
from trainctl.config.overrides import split_target
from trainctl.config.schema import RunConfig
from trainctl.config.user_code import ignored_trainer_settings, with_script_arguments
from trainctl.errors import ExitCode, TrainctlError
from trainctl.launchers.interface import (
    AttemptRequest,
    LaunchRequest,
    Outcome,
    available_cores,
    has_scheduler,
    launch_function,
    render,
)
from trainctl.launchers.local import require_space
from trainctl.launchers.planning import (
    PlannedConfig,
    checkpoint_bytes,
    compose_config,
    machine_findings,
    plan_config,
)
from trainctl.launchers.processes import start_in_background
from trainctl.launchers.resume import (
    PlannedResume,
    check_same_model,
    compare_with_checkpoint,
    plan_resume,
    why_done,
)
from trainctl.plans.types import RunPlan
from trainctl.runs.attempts import changes_text, effective_attempt, ignored_config_findings
from trainctl.runs.checkpoints import CheckpointInfo, archive_later_checkpoints
from trainctl.runs.command import command_record
from trainctl.runs.directory import (
    DEFAULT_ROOT,
    create_run,
    is_run,
    last_attempt,
    new_attempt,
    newest_run,
    open_run,
)
from trainctl.runs.event_descriptions import (
    describe_divergence,
    describe_straggler,
    still_diverged,
    still_slow,
)
from trainctl.runs.layout import AttemptPaths, RunPaths
from trainctl.runs.listing import ResumePoint
from trainctl.runs.lock import hold_lock
from trainctl.runs.records import read_events
from trainctl.runs.status import State


class ResumeMode(StrEnum):
    """Behaviour of `launch` on a run directory that has a checkpoint."""

    auto = "auto"
    never = "never"


def launch(
    context: typer.Context,
    overrides: Overrides = None,
    dry_run: DryRun = False,
    force: Force = False,
    run_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The run's directory; else one is made under runs/."),
    ] = None,
    resume: Annotated[
        ResumeMode,
        typer.Option(help="auto: resume if the run directory has a checkpoint, else start."),
    ] = ResumeMode.never,
    config_dir: ConfigDir = None,
    detach: Detach = False,
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Check a configuration against the hardware, then train.

    Examples: trainctl launch recipe=tiny training.steps=200 optimizer.lr=1e-3;
    trainctl launch script=train.py recipe=7b-zero3 -- --its --own arguments
    """
    words = script_arguments(context)
    if resume is ResumeMode.auto:
        if run_dir is None:
            raise TrainctlError("--resume auto needs --run-dir, the directory to look in")
        if is_run(run_dir):
            # A scheduler repeats the whole command, so it composes as the first launch did.
            resume_run(
                run_dir,
                lambda _: with_script_arguments(compose_config(overrides, config_dir), words),
                dry_run=dry_run,
                force=force,
                as_json=as_json,
                verbose=verbose,
                detach=detach,
            )
            return
    composed = with_script_arguments(compose_config(overrides, config_dir), words)
    if not dry_run:
        tolerate_broken_pipe()
    planned = plan_config(composed, with_files=True, tokenize=True)
    made = show_accepted_plan(planned, force=force, as_json=as_json, verbose=verbose or dry_run)
    if dry_run:
        if has_scheduler(made.config):  # its check does not look at this machine
            check_machine(planned, made, run_dir or DEFAULT_ROOT)
        show_start(planned, made, RunPaths(run_dir or Path("runs/NEW")), as_json=as_json)
        return
    check_machine(planned, made, run_dir or DEFAULT_ROOT)
    run = create_run(made.config, run_dir=run_dir, argv=sys.argv)
    size = checkpoint_bytes(planned)
    run_attempt(run, made, checkpoint_bytes=size, as_json=as_json, detach=detach)


def resume(
    context: typer.Context,
    run: TargetAndOverrides = None,
    step: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="From the checkpoint after N steps, leaving later ones behind; else the newest.",
            show_default=False,
        ),
    ] = None,
    from_start: Annotated[
        bool, typer.Option("--from-start", help="From the beginning, leaving checkpoints behind.")
    ] = False,
    attempt: AttemptOption = None,
    dry_run: DryRun = False,
    force: Force = False,
    config_dir: ConfigDir = None,
    detach: Detach = False,
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Continue a run (the newest, if none is named) from its newest complete checkpoint.

    One that was stopped before its first checkpoint begins again, as it was configured. A script is
    started again as it was; words after -- replace its arguments.

    Examples: trainctl resume; trainctl resume runs/NAME training.steps=400
    """
    words = script_arguments(context)
    if from_start and step is not None:
        raise TrainctlError("--step and --from-start name two places", hint="leave one of them out")
    target, overrides = split_target(run)
    root = Path(target) if target is not None else newest_run().root
    resume_run(
        root,
        lambda before: with_script_arguments(
            recompose(before, overrides, config_dir=config_dir), words
        ),
        dry_run=dry_run,
        force=force,
        as_json=as_json,
        verbose=verbose,
        step=step,
        attempt=attempt,
        from_start=from_start,
        detach=detach,
    )


def program_name(config: RunConfig) -> str:
    return Path(config.script).name if config.script is not None else str(config.trainer)


def show_accepted_plan(
    planned: PlannedConfig, *, force: bool, as_json: bool, verbose: bool
) -> RunPlan:
    """Show plan, budget and findings; return the plan.

    The brief form keeps the following output on the screen; the whole is shown with `verbose`, or
    if the budget does not fit.

    Raises:
        TrainctlError: The plan has errors, does not fit (unless `force`), or cannot be trained yet.
    """
    made, budget = planned.assessment.plan, planned.assessment.budget
    if made is None or budget is None or planned.unforceable_errors:
        raise TrainctlError.from_findings(planned.findings)
    is_brief = not verbose and not planned.errors
    if not as_json:
        show_plan(made, planned.data, brief=is_brief)
    if not as_json and is_brief:
        show_brief_budget(budget.to_json())
        print_data("--verbose shows the reasons and the whole budget")
    elif not as_json:
        show_budget(budget.to_json(), host_capacity_bytes=planned.hardware.host_memory_bytes)
    show_findings([*planned.findings, *ignored_trainer_settings(planned.composed)])
    if planned.errors:
        show_suggestions(planned.composed.config, planned.hardware)
        if not force:
            raise TrainctlError(
                "the memory budget does not fit",
                hint="--force starts anyway",
                exit_code=ExitCode.does_not_fit,
            )
    if made.not_yet:
        for technique in made.not_yet:
            print_message(f"error: {technique}", style="error")
        raise TrainctlError("this plan can be checked and budgeted, but not trained with yet")
    return made


def check_machine(planned: PlannedConfig, made: RunPlan, folder: Path) -> None:
    """Refuse to start if the machines are not what the plan needs, or the run cannot be stored."""
    findings = machine_findings(planned, made, folder)
    if any(finding.is_error for finding in findings):
        raise TrainctlError.from_findings(findings)
    show_findings(findings)


def run_attempt(
    run: RunPaths, made: RunPlan, *, checkpoint_bytes: int | None, as_json: bool, detach: bool
) -> None:
    """Start the next attempt; unless detached, show its records and how it ended."""
    every = made.config.logging.every_steps
    with hold_lock(run) as lock:
        attempt = new_attempt(run, made)
        if not as_json:
            print_data(f"run directory: {run.root}")
        if detach and not has_scheduler(made.config):
            _start_in_background(run, attempt, lock, checkpoint_bytes, as_json=as_json)
            return
        shown: Progress | LiveFollower
        if made.config.trains_itself or as_json:
            shown = Progress(
                stop_step=made.stop_step,
                every_steps=every,
                as_json=as_json,
                run=run,
                attempt=attempt.number,
            )
        else:
            shown = LiveFollower(run)
        with shown as on_event:
            outcome = launch_function(made)(
                LaunchRequest(
                    run=run,
                    attempt=attempt,
                    plan=made,
                    on_event=on_event,
                    checkpoint_bytes=checkpoint_bytes,
                )
            )
    _show_warnings(run)
    if outcome.state is State.failed:
        _show_failure(outcome)
    elif outcome.message:
        print_message(outcome.message)
    if not as_json and not outcome.exit_code:
        print_data(f"run directory: {run.root}")
    # A run whose own files were refused cannot be resumed: the hint says what to do.
    if outcome.state in (State.failed, State.stopped) and outcome.exit_code != ExitCode.run_state:
        _show_resume_hint(run, made)
    if outcome.exit_code:
        raise typer.Exit(outcome.exit_code)


def _show_warnings(run: RunPaths) -> None:
    """Repeat warnings that still hold at the end: they were first shown maybe days ago."""
    told, attempt = read_events(run.events, "straggler", "divergence"), last_attempt(run)
    diverged = still_diverged(told, attempt)
    if diverged is not None:
        print_message(f"warning: {describe_divergence(diverged)}", style="warning")
    for event in still_slow(told, attempt):
        print_message(f"slow: {describe_straggler(event)}", style="warning")


def _start_in_background(
    run: RunPaths,
    attempt: AttemptPaths,
    lock: int,
    checkpoint_bytes: int | None,
    *,
    as_json: bool,
) -> None:
    """Leave the attempt to a background launcher without a terminal."""
    if checkpoint_bytes is not None:
        require_space(run.root, checkpoint_bytes)
    process = start_in_background(run, attempt, lock)
    if as_json:
        print_json({"schema": 1, "run": str(run.root), "pid": process.pid})
    print_message(
        f"detached: `trainctl runs attach {run.root}` shows it, `trainctl runs stop` ends it"
    )


def _show_failure(outcome: Outcome) -> None:
    """Print how the attempt ended, after the end of the log that explains it."""
    if outcome.log_tail:
        print_message(f"the end of {outcome.log}:")
        for line in outcome.log_tail:
            print_message(f"  {line}")
    show_error(outcome.message, outcome.hint)
    show_explain_hint([outcome.cause or str(outcome.exit_code)])


def _show_resume_hint(run: RunPaths, made: RunPlan) -> None:
    """Print, as the last line, how to continue a launch that ended early."""
    if made.config.trains_itself:
        print_message(ResumePoint.of(run).sentence(run))
    else:
        print_message(f"trainctl resume {run.root} starts {program_name(made.config)} again")


def show_start(planned: PlannedConfig, made: RunPlan, run: RunPaths, *, as_json: bool) -> None:
    """Print the commands of a dry run; with `as_json` also plan and budget, as one document."""
    attempt = run.attempt(last_attempt(run) + 1)
    start = AttemptRequest(
        plan=made, run=run, attempt=attempt, environment=os.environ, cores=available_cores()
    )
    rendered = render(start)
    if not as_json:
        show_commands(rendered.commands)
        for name, text in rendered.files.items():
            print_data(f"{name}:\n{text}")
        return
    assert planned.assessment.budget is not None
    print_json(
        {
            "schema": 1,
            "plan": to_plain(made),
            "budget": planned.assessment.budget.to_json(),
            "findings": findings_to_json(planned.findings),
            "command": command_record(rendered.command),
            "commands": [list(argv) for argv in rendered.commands],
            "files": dict(rendered.files),
        }
    )


def resume_run(
    root: Path,
    configure: Callable[[RunConfig], ComposedConfig],
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
    with hold_lock(run):
        standing = effective_attempt(run) if attempt is None else None
        show_findings(ignored_config_findings(run, standing))
        resume = plan_resume(
            run, configure, step=step, attempt=attempt, from_start=from_start, warn=print_warning
        )
        _show_changes(resume, run)
        checkpoint, planned = resume.checkpoint, resume.planned
        if checkpoint is not None and planned.assessment.plan is not None:
            check_same_model(planned.composed.config, checkpoint.path, print_warning)
            done = why_done(run, checkpoint, planned.assessment.plan)
            if done is not None:
                print_message(f"nothing to do: {done[0]}")
                print_message(f"hint: {done[1]}")
                return
            compare_with_checkpoint(run, checkpoint, planned.assessment.plan, print_warning)
        made = show_accepted_plan(planned, force=force, as_json=as_json, verbose=verbose or dry_run)
        print_message(_resume_message(run, made, checkpoint, from_start=from_start))
        if dry_run:
            show_start(planned, made, run, as_json=as_json)
            return
        check_machine(planned, made, run.root)
        if from_start or (checkpoint is not None and step is not None):
            for path in archive_later_checkpoints(run, step or 0, attempt=last_attempt(run) + 1):
                print_message(f"left behind: {path}")
        size = checkpoint_bytes(planned)
        run_attempt(run, made, checkpoint_bytes=size, as_json=as_json, detach=detach)


def _resume_message(
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
        print_message(f"configuration: unchanged since {since}")
    for change in resume.changes:
        print_message(f"changed since {since}: {changes_text([change])}")
