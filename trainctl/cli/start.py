"""What `launch` and `resume` share: show, refuse or start, watch, and say how it ended."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from trainctl.cli.console import print_json, put, say
from trainctl.cli.findings import findings_to_json, show_error, show_findings
from trainctl.cli.planning import Planned, name_sources, plan, show_suggestions
from trainctl.errors import ExitCode, TrainctlError

if TYPE_CHECKING:
    from trainctl.config.compose import Composed
    from trainctl.config.diff import Change
    from trainctl.config.schema import RunConfig
    from trainctl.launch.outcome import Outcome
    from trainctl.plan.types import RunPlan
    from trainctl.runs.checkpoints import CheckpointInfo
    from trainctl.runs.layout import RunPaths


def start_run(
    planned: Planned, *, run_dir: Path | None, dry_run: bool, force: bool, as_json: bool
) -> None:
    """Start a new run in a new directory.

    Raises:
        TrainctlError: The plan is refused, or the directory cannot be used.
        typer.Exit: The run did not end well; carries its exit code.
    """
    from trainctl.runs.directory import create_run

    made = _accept(planned, force=force, as_json=as_json)
    if dry_run:
        from trainctl.runs.layout import RunPaths

        _show_start(planned, made, RunPaths(run_dir or Path("runs/NEW")), as_json=as_json)
        return
    _check_machine(planned)
    run = create_run(made.config, run_dir=run_dir, argv=sys.argv)
    _run_attempt(run, made, checkpoint_bytes=_checkpoint_bytes(planned), as_json=as_json)


def resume_run(
    root: Path,
    configure: Callable[[RunConfig], Composed],
    *,
    dry_run: bool,
    force: bool,
    as_json: bool,
    may_restart: bool,
) -> None:
    """Continue a run as a new attempt, from its newest complete checkpoint.

    Args:
        root: The run's directory.
        configure: Gives the attempt's configuration from the last attempt's.
        dry_run: Only show.
        force: Start although the budget does not fit.
        as_json: Records on stdout as JSON lines, nothing else.
        may_restart: Start from the beginning if there is no checkpoint yet.

    Raises:
        TrainctlError: Not a run, in use, no checkpoint, or the plan is refused.
        typer.Exit: The run did not end well; carries its exit code.
    """
    from trainctl.config.diff import diff
    from trainctl.runs.directory import last_config, open_run
    from trainctl.runs.lock import hold

    run = open_run(root)
    with hold(run):
        checkpoint = _newest_checkpoint(run)
        if checkpoint is None and not may_restart:
            raise TrainctlError(
                f"{run.root} has no complete checkpoint to resume from",
                hint=f"trainctl launch --resume auto --run-dir {root} starts it from the beginning",
                exit_code=ExitCode.run_state,
            )
        before = last_config(run)
        planned = plan(configure(before), with_files=True)
        _show_changes(diff(before, planned.composed.config))
        if checkpoint is not None and _is_done(checkpoint, planned):
            say(f"nothing to do: {run.root} is at step {checkpoint.step:,}, where this launch ends")
            say("hint: a larger training.steps or training.stop_after_steps trains on")
            return
        made = _accept(planned, force=force, as_json=as_json)
        where = checkpoint.path.name if checkpoint else "the beginning: there is no checkpoint yet"
        say(f"resuming {run.root} from {where}")
        if dry_run:
            _show_start(planned, made, run, as_json=as_json)
            return
        _check_machine(planned)
        _run_attempt(run, made, checkpoint_bytes=_checkpoint_bytes(planned), as_json=as_json)


def next_launch(config: RunConfig) -> RunConfig:
    """The last attempt's configuration without what belonged to that launch only."""
    return replace(config, training=replace(config.training, stop_after_steps=None))


def _is_done(checkpoint: CheckpointInfo, planned: Planned) -> bool:
    made = planned.assessment.plan
    return made is not None and checkpoint.step >= made.stop_step


def _accept(planned: Planned, *, force: bool, as_json: bool) -> RunPlan:
    """Show plan, findings and budget; give the plan, or refuse it."""
    from trainctl.cli.budget_view import show_budget
    from trainctl.cli.plan_view import show_plan

    made, budget = planned.assessment.plan, planned.assessment.budget
    if made is None or budget is None or planned.errors_but_fit:
        raise TrainctlError.from_findings(planned.findings)
    if not as_json:
        show_plan(made)
        show_budget(budget.to_json(), host_capacity_bytes=planned.hardware.host_memory_bytes)
    show_findings(planned.findings)
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


def _check_machine(planned: Planned) -> None:
    """Refuse to start where the plan's devices are not."""
    from trainctl.hardware import missing_packages, preflight

    lacking = missing_packages(planned.composed.config, planned.hardware)
    findings = name_sources(planned.composed, [*preflight(planned.hardware), *lacking])
    if any(finding.is_error for finding in findings):
        raise TrainctlError.from_findings(findings)
    show_findings(findings)


def _run_attempt(run: RunPaths, made: RunPlan, *, checkpoint_bytes: int, as_json: bool) -> None:
    """Start the next attempt, show its records, and say how it ended."""
    from trainctl.cli.progress import Progress
    from trainctl.launch.local import run_launch
    from trainctl.runs.directory import new_attempt
    from trainctl.runs.lock import hold

    every = made.config.logging.every_steps
    with hold(run):
        attempt = new_attempt(run, made)
        if not as_json:
            put(f"run directory: {run.root}")
        with Progress(stop_step=made.stop_step, every_steps=every, as_json=as_json) as progress:
            outcome = run_launch(run, attempt, made, progress, checkpoint_bytes=checkpoint_bytes)
    if outcome.exit_code:
        _show_failure(run, outcome)
        raise typer.Exit(outcome.exit_code)
    if outcome.message:
        say(outcome.message)
    if not as_json:
        put(f"run directory: {run.root}")


def _show_failure(run: RunPaths, outcome: Outcome) -> None:
    """How the attempt ended, the end of the log that tells more, and how to go on."""
    from trainctl.runs.checkpoints import newest_checkpoint

    if outcome.log_tail:
        say(f"the end of {outcome.log}:")
        for line in outcome.log_tail:
            say(f"  {line}")
    show_error(outcome.message, outcome.hint)
    checkpoint, _ = newest_checkpoint(run)
    if checkpoint is not None:
        say(f"trainctl resume {run.root} continues from step {checkpoint.step:,}")


def _show_start(planned: Planned, made: RunPlan, run: RunPaths, *, as_json: bool) -> None:
    """The commands of a dry run; with `as_json` the plan and budget too, as one document."""
    from trainctl.cli.plan_view import show_commands
    from trainctl.config.codec import to_plain
    from trainctl.launch.local import render
    from trainctl.runs.directory import last_attempt

    attempt = run.attempt(last_attempt(run) + 1)
    cores = len(os.sched_getaffinity(0))
    command = render(made, run, attempt, environment=os.environ, cores=cores)
    if not as_json:
        show_commands([node.argv for node in command.nodes])
        return
    assert planned.assessment.budget is not None
    print_json(
        {
            "schema": 1,
            "plan": to_plain(made),
            "budget": planned.assessment.budget.to_json(),
            "findings": findings_to_json(planned.findings),
            "command": to_plain(command),
        }
    )


def _checkpoint_bytes(planned: Planned) -> int:
    budget = planned.assessment.budget
    return budget.checkpoint_bytes if budget is not None else 0


def _newest_checkpoint(run: RunPaths) -> CheckpointInfo | None:
    """The newest complete checkpoint; says which newer ones are damaged."""
    from trainctl.runs.checkpoints import newest_checkpoint

    checkpoint, passed_over = newest_checkpoint(run)
    for problem in passed_over:
        say(f"warning: checkpoint passed over: {problem}", style="warning")
    return checkpoint


def _show_changes(changes: Sequence[Change]) -> None:
    from trainctl.config.codec import to_plain

    if not changes:
        say("configuration: unchanged since the last attempt")
    for change in changes:
        left, right = to_plain(change.left), to_plain(change.right)
        say(f"changed since the last attempt: {change.key}: {left} -> {right}")
