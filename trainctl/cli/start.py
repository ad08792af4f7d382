"""What `launch` and `resume` share: show, refuse or start, watch, and say how it ended."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from trainctl.cli.console import go_on_without_reader, print_json, put, say
from trainctl.cli.extend import compare_with_checkpoint
from trainctl.cli.findings import findings_to_json, show_error, show_findings
from trainctl.cli.planning import Planned, plan, show_suggestions
from trainctl.cli.readiness import checkpoint_bytes, machine_findings
from trainctl.errors import ExitCode, TrainctlError

if TYPE_CHECKING:
    from trainctl.config.compose import Composed
    from trainctl.config.diff import Change
    from trainctl.config.schema import RunConfig
    from trainctl.launch.outcome import Outcome
    from trainctl.plan.types import RunPlan
    from trainctl.runs.checkpoints import CheckpointInfo
    from trainctl.runs.layout import AttemptPaths, RunPaths


def start_run(
    composed: Composed,
    *,
    run_dir: Path | None,
    dry_run: bool,
    force: bool,
    as_json: bool,
    verbose: bool = False,
    detach: bool = False,
) -> None:
    """Start a new run in a new directory; with `detach` only start it.

    Raises:
        TrainctlError: The plan is refused, or the directory cannot be used.
        typer.Exit: The run did not end well; carries its exit code.
    """
    from trainctl.runs.directory import DEFAULT_ROOT, create_run

    if not dry_run:
        go_on_without_reader()
    planned = plan(composed, with_files=True, tokenize=True)
    made = _accept(planned, force=force, as_json=as_json, verbose=verbose or dry_run)
    if dry_run:
        from trainctl.launch.choose import has_scheduler
        from trainctl.runs.layout import RunPaths

        if has_scheduler(made.config):  # which is handed files, and looks at no machine
            _check_machine(planned, made, run_dir or DEFAULT_ROOT)
        _show_start(planned, made, RunPaths(run_dir or Path("runs/NEW")), as_json=as_json)
        return
    _check_machine(planned, made, run_dir or DEFAULT_ROOT)
    run = create_run(made.config, run_dir=run_dir, argv=sys.argv)
    size = checkpoint_bytes(planned)
    _run_attempt(run, made, checkpoint_bytes=size, as_json=as_json, detach=detach)


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

    A run that has never saved anything is started again, as it was.

    Args:
        root: The run's directory.
        configure: Gives the attempt's configuration from that of the run.
        dry_run: Only show.
        force: Start although the budget does not fit.
        as_json: Records on stdout as JSON lines, nothing else.
        verbose: Show the whole plan and budget.
        step: Of the checkpoint to go on from; those after it are left behind.
        attempt: Whose configuration it is; None is the one that stands for the run.
        from_start: Begin anew, leaving all checkpoints behind.
        detach: Only start it.

    Raises:
        TrainctlError: Not a run, in use, no checkpoint, or the plan is refused.
        typer.Exit: The run did not end well; carries its exit code.
    """
    from trainctl.cli.intact import check_goes_on
    from trainctl.cli.standing import passed_over_findings
    from trainctl.config.diff import diff
    from trainctl.launch import program
    from trainctl.runs.attempts import config_of, standing_attempt
    from trainctl.runs.directory import open_run
    from trainctl.runs.lock import hold

    run = open_run(root)
    if not dry_run:
        go_on_without_reader()
    with hold(run):
        standing = standing_attempt(run)
        show_findings(passed_over_findings(run, standing if attempt is None else None))
        before = config_of(run, attempt)
        checkpoint = None if from_start or not before.trains_itself else _checkpoint(run, step)
        composed = configure(before if checkpoint is None else next_launch(before))
        # What a script or function of the user's saves, and goes on from, is its own affair.
        if not composed.config.trains_itself:
            checkpoint = None
        elif checkpoint is None and not from_start:
            require_nothing_saved(run)
        folder = program.folder(composed.config, run)
        planned = plan(composed, with_files=True, tokenize=True, folder=folder)
        _show_changes(diff(before, planned.composed.config), run, attempt or standing.number)
        if checkpoint is not None and planned.assessment.plan is not None:
            check_goes_on(planned.composed.config, checkpoint.path)
            if _is_done(run, checkpoint, planned):
                return
            compare_with_checkpoint(run, checkpoint, planned.assessment.plan)
        made = _accept(planned, force=force, as_json=as_json, verbose=verbose or dry_run)
        say(_resuming(run, made, checkpoint, from_start=from_start))
        if dry_run:
            _show_start(planned, made, run, as_json=as_json)
            return
        _check_machine(planned, made, run.root)
        if from_start or (checkpoint is not None and step is not None):
            _leave_behind(run, step or 0)
        size = checkpoint_bytes(planned)
        _run_attempt(run, made, checkpoint_bytes=size, as_json=as_json, detach=detach)


def require_nothing_saved(run: RunPaths) -> None:
    """Refuse to begin anew where checkpoints were saved, and none of them can be gone on from.

    Raises:
        TrainctlError: Exit code 5.
    """
    from trainctl.runs.checkpoints import examine
    from trainctl.runs.records import read_events

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


def _leave_behind(run: RunPaths, step: int) -> None:
    """Let the checkpoint of a step be the newest one; none for step 0."""
    from trainctl.runs.checkpoints import leave_behind
    from trainctl.runs.directory import last_attempt

    for path in leave_behind(run, step, attempt=last_attempt(run) + 1):
        say(f"left behind: {path}")


def _resuming(
    run: RunPaths, made: RunPlan, checkpoint: CheckpointInfo | None, *, from_start: bool
) -> str:
    if not made.config.trains_itself:
        return f"starting {_program_name(made.config)} of {run.root} again"
    where = "the beginning" if from_start else "the beginning: there is no checkpoint yet"
    return f"resuming {run.root} from {checkpoint.path.name if checkpoint else where}"


def _program_name(config: RunConfig) -> str:
    return Path(config.script).name if config.script is not None else str(config.trainer)


def next_launch(config: RunConfig) -> RunConfig:
    """The last attempt's configuration without what belonged to that launch only."""
    return replace(config, training=replace(config.training, stop_after_steps=None))


def _is_done(run: RunPaths, checkpoint: CheckpointInfo, planned: Planned) -> bool:
    """Whether nothing is left to train; says why, and what would train on."""
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


def _accept(planned: Planned, *, force: bool, as_json: bool, verbose: bool) -> RunPlan:
    """Show plan, budget and findings; give the plan, or refuse it.

    In brief, that what follows stays on the screen; whole where that is asked for, or it does not
    fit.
    """
    from trainctl.cli.budget_view import show_brief_budget, show_budget
    from trainctl.cli.plan_view import show_plan
    from trainctl.config.user_code import not_applied

    made, budget = planned.assessment.plan, planned.assessment.budget
    if made is None or budget is None or planned.errors_but_fit:
        raise TrainctlError.from_findings(planned.findings)
    is_brief = not verbose and not planned.errors
    if not as_json:
        show_plan(made, brief=is_brief)
    if not as_json and is_brief:
        show_brief_budget(budget.to_json())
        put("--verbose shows the reasons and the whole budget")
    elif not as_json:
        show_budget(budget.to_json(), host_capacity_bytes=planned.hardware.host_memory_bytes)
    show_findings([*planned.findings, *not_applied(planned.composed)])
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
            say(f"error: {technique}", style="error")
        raise TrainctlError("this plan can be checked and budgeted, but not trained with yet")
    return made


def _check_machine(planned: Planned, made: RunPlan, folder: Path) -> None:
    """Refuse to start where the machines are not what the plan needs, or no run could be kept."""
    findings = machine_findings(planned, made, folder)
    if any(finding.is_error for finding in findings):
        raise TrainctlError.from_findings(findings)
    show_findings(findings)


def _run_attempt(
    run: RunPaths, made: RunPlan, *, checkpoint_bytes: int | None, as_json: bool, detach: bool
) -> None:
    """Start the next attempt, show its records, and say how it ended, unless it is detached."""
    from trainctl.cli.follow import Follower
    from trainctl.cli.progress import Progress
    from trainctl.launch.choose import has_scheduler, run_launch
    from trainctl.launch.order import Launch
    from trainctl.runs.directory import new_attempt
    from trainctl.runs.lock import hold
    from trainctl.runs.status import State

    every = made.config.logging.every_steps
    with hold(run) as lock:
        attempt = new_attempt(run, made)
        if not as_json:
            put(f"run directory: {run.root}")
        if detach and not has_scheduler(made.config):
            _detach(run, attempt, lock, checkpoint_bytes, as_json=as_json)
            return
        shown: Progress | Follower
        if made.config.trains_itself or as_json:
            shown = Progress(
                stop_step=made.stop_step,
                every_steps=every,
                as_json=as_json,
                run=run,
                attempt=attempt.number,
            )
        else:
            shown = Follower(run)
        with shown as on_event:
            outcome = run_launch(
                Launch(
                    run=run,
                    attempt=attempt,
                    plan=made,
                    on_event=on_event,
                    checkpoint_bytes=checkpoint_bytes,
                )
            )
    _show_stragglers(run)
    if outcome.state is State.failed:
        _show_failure(outcome)
    elif outcome.message:
        say(outcome.message)
    if not as_json and not outcome.exit_code:
        put(f"run directory: {run.root}")
    # One that the run's own files refused does not go on from them: its hint says what does.
    if outcome.state in (State.failed, State.stopped) and outcome.exit_code != ExitCode.run_state:
        _say_where_it_goes_on(run, made)
    if outcome.exit_code:
        raise typer.Exit(outcome.exit_code)


def _show_stragglers(run: RunPaths) -> None:
    """Who held up the others to the end: said when it began, maybe days ago."""
    from trainctl.runs.directory import last_attempt
    from trainctl.runs.records import read_events
    from trainctl.runs.stragglers import account, still_slow

    for event in still_slow(read_events(run.events, "straggler"), last_attempt(run)):
        say(f"slow: {account(event)}", style="warning")


def _detach(
    run: RunPaths,
    attempt: AttemptPaths,
    lock: int,
    checkpoint_bytes: int | None,
    *,
    as_json: bool,
) -> None:
    """Leave the attempt to a launcher without a terminal."""
    from trainctl.launch.background import start_in_background
    from trainctl.launch.local import require_space

    if checkpoint_bytes is not None:
        require_space(run.root, checkpoint_bytes)
    process = start_in_background(run, attempt, lock)
    if as_json:
        print_json({"schema": 1, "run": str(run.root), "pid": process.pid})
    say(f"detached: `trainctl runs attach {run.root}` shows it, `trainctl runs stop` ends it")


def _show_failure(outcome: Outcome) -> None:
    """How the attempt ended, and the end of the log that tells more."""
    if outcome.log_tail:
        say(f"the end of {outcome.log}:")
        for line in outcome.log_tail:
            say(f"  {line}")
    show_error(outcome.message, outcome.hint)


def _say_where_it_goes_on(run: RunPaths, made: RunPlan) -> None:
    """The last line of a launch that did not come to its end."""
    from trainctl.runs.going_on import GoingOn

    if made.config.trains_itself:
        say(GoingOn.of(run).sentence(run))
    else:
        say(f"trainctl resume {run.root} starts {_program_name(made.config)} again")


def _show_start(planned: Planned, made: RunPlan, run: RunPaths, *, as_json: bool) -> None:
    """The commands of a dry run; with `as_json` the plan and budget too, as one document."""
    from trainctl.cli.plan_view import show_commands
    from trainctl.config.codec import to_plain
    from trainctl.launch.choose import render
    from trainctl.launch.order import Start, cores
    from trainctl.runs.command import command_record
    from trainctl.runs.directory import last_attempt

    attempt = run.attempt(last_attempt(run) + 1)
    start = Start(plan=made, run=run, attempt=attempt, environment=os.environ, cores=cores())
    rendered = render(start)
    if not as_json:
        show_commands(rendered.commands)
        for name, text in rendered.files.items():
            put(f"{name}:\n{text}")
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


def _checkpoint(run: RunPaths, step: int | None) -> CheckpointInfo | None:
    """That of a step, else the newest complete one; says which newer ones are damaged."""
    from trainctl.runs.checkpoints import examine, newest_checkpoint

    if step is not None:
        from trainctl.cli.intact import select

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
    """What the next attempt has otherwise than the one that it goes on from."""
    from trainctl.cli.standing import changes_text
    from trainctl.runs.directory import last_attempt

    since = "the last attempt" if attempt == last_attempt(run) else f"attempt {attempt}"
    if not changes:
        say(f"configuration: unchanged since {since}")
    for change in changes:
        say(f"changed since {since}: {changes_text([change])}")
