"""`trainctl sweep`: one run for each combination of values, and a table of the results."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from trainctl.cli.arguments import ConfigDir, Force, Json, register_config_dir, split_target
from trainctl.cli.console import print_json, print_table, put, say, tolerate_broken_pipe
from trainctl.config.compose import Composed, recompose
from trainctl.config.overrides import SweepPoint, expand_sweep
from trainctl.config.registry import function_of
from trainctl.config.secrets import REDACTED
from trainctl.errors import ExitCode, TrainctlError
from trainctl.launch.launchers import check
from trainctl.launch.planning import compose
from trainctl.launch.planning import plan as make_plan
from trainctl.launch.queue import QueueStopped, run_queue
from trainctl.launch.rank_command import user_code_folder
from trainctl.launch.resume import require_nothing_saved
from trainctl.options.launcher import spec_of
from trainctl.plan.types import RunPlan
from trainctl.runs.attempts import config_of
from trainctl.runs.checkpoints import newest_checkpoint
from trainctl.runs.directory import create_run, last_attempt, new_attempt
from trainctl.runs.layout import AttemptPaths, RunPaths
from trainctl.runs.lock import hold
from trainctl.runs.sweeps import (
    RemainingRun,
    Sweep,
    SweepAction,
    new_sweep,
    read_sweep,
    remaining_runs,
    results,
)

Started = list[tuple["RunPaths", "AttemptPaths"]]

SweepArguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[FOLDER] OVERRIDES",
        help="A sweep to show, or a configuration: KEY=VALUE,VALUE sweeps.",
        show_default=False,
    ),
]


def sweep(
    context: typer.Context,
    arguments: SweepArguments = None,
    sweep_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The sweep's folder; else one is made under sweeps/."),
    ] = None,
    parallel: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Runs at a time: here 1, in Slurm all, unless set."),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on with FOLDER: start what is new, resume what was cut."),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Plan every run and list them; start nothing.")
    ] = False,
    force: Force = False,
    config_dir: ConfigDir = None,
    as_json: Json = False,
) -> None:
    """Train every combination of several values: here one after another, in Slurm as an array.

    Every combination is planned and checked before the first one starts.

    Examples: trainctl sweep recipe=125m optimizer.lr=1e-4,3e-4 schedule=cosine,wsd;
    trainctl sweep sweeps/NAME --resume
    """
    target, overrides = split_target(arguments)
    if resume:
        if target is None or overrides or sweep_dir is not None or config_dir is not None:
            raise TrainctlError(
                "--resume goes on with a sweep as it was made",
                hint="trainctl sweep FOLDER --resume, without overrides and folders",
            )
        folder = Path(target).resolve()
        record = read_sweep(folder)
        register_config_dir(context, Path(record.config_dir) if record.config_dir else None)
        _resume_sweep(folder, record, parallel, dry_run=dry_run, force=force, as_json=as_json)
        return
    if target is not None and not overrides:
        _show(Path(target), as_json=as_json)
        return
    points = expand_sweep(arguments or [])
    plans = [_plan(point, config_dir, force=force) for point in points]
    _check_queue(plans)
    if dry_run:
        for index, point in enumerate(points):
            put(f"{index}: {' '.join(point.overrides)}")
        return
    tolerate_broken_pipe()
    folder, started = _make(sweep_dir, arguments or [], points, plans, config_dir)
    put(f"sweep: {folder}")
    _begin(folder, plans[0], started, parallel, as_json=as_json)


def _begin(
    folder: Path,
    plan: RunPlan,
    started: Started,
    parallel: int | None,
    *,
    as_json: bool,
) -> None:
    """Run the attempts that were made, here or by a scheduler."""
    if spec_of(plan.config.launcher).submit_sweep:
        _submit(folder, plan, started, parallel)
        return
    with hold(RunPaths(folder)):  # so that nobody resumes a sweep that is still running
        _run_queue(folder, started, parallel or 1, as_json=as_json)
    say(f"`trainctl sweep {folder}` shows this again")


def _resume_sweep(
    folder: Path,
    record: Sweep,
    parallel: int | None,
    *,
    dry_run: bool,
    force: bool,
    as_json: bool,
) -> None:
    """Start the runs of a sweep that were never started, resume interrupted ones, leave the rest.

    Raises:
        TrainctlError: The sweep is still running, or a run's plan is refused now.
    """
    with hold(RunPaths(folder)):
        left = remaining_runs(folder)
        for item in left:
            put(f"{item.index}: {item.next} ({item.why})")
        waiting = [item for item in left if item.next is not SweepAction.leave]
        plans = [_plan_again(item, record, force=force) for item in waiting]
        if dry_run:
            return
        if not waiting:
            say("nothing to do: trainctl resume FOLDER/INDEX goes on with a run that is left alone")
            return
        tolerate_broken_pipe()
        _check_queue(plans)
        started = [_attempt_again(item, plan) for item, plan in zip(waiting, plans, strict=True)]
        _begin(folder, plans[0], started, parallel, as_json=as_json)


def _plan_again(item: RemainingRun, record: Sweep, *, force: bool) -> RunPlan:
    """Plan the rest of a run, from its own directory if it exists."""
    values = record.points[item.index]
    if item.next is SweepAction.make:
        overrides = _recorded(item, record)
        own = None if record.config_dir is None else Path(record.config_dir)
        return _checked(lambda: compose(overrides, own), values, force=force)
    config = config_of(item.run)
    if config.trains_itself and newest_checkpoint(item.run)[0] is None:
        require_nothing_saved(item.run)
    folder = user_code_folder(config, item.run)
    return _checked(lambda: recompose(config, ()), values, force=force, folder=folder)


def _recorded(item: RemainingRun, record: Sweep) -> tuple[str, ...]:
    """Return the recorded overrides of a run whose directory does not exist.

    Raises:
        TrainctlError: The overrides were not recorded, or have a redacted secret (exit code 5).
    """
    overrides = record.runs[item.index] if item.index < len(record.runs) else ()
    if overrides and not any(REDACTED in text for text in overrides):
        return overrides
    raise TrainctlError(
        f"run {item.index} is not there, and what it was to be is not recorded in full",
        hint=f"trainctl launch ... --run-dir {item.run.root} makes it",
        exit_code=ExitCode.run_state,
    )


def _attempt_again(item: RemainingRun, plan: RunPlan) -> tuple[RunPaths, AttemptPaths]:
    run = item.run
    if item.next is SweepAction.make:
        run = create_run(plan.config, run_dir=run.root, argv=sys.argv)
    elif item.next is SweepAction.start:
        return run, run.attempt(last_attempt(run))
    with hold(run):
        return run, new_attempt(run, plan)


def _plan(point: SweepPoint, config_dir: Path | None, *, force: bool) -> RunPlan:
    return _checked(lambda: compose(point.overrides, config_dir), point.values, force=force)


def _checked(
    composing: Callable[[], Composed],
    values: Mapping[str, str],
    *,
    force: bool,
    folder: Path | None = None,
) -> RunPlan:
    """Return the plan of a run; errors name the run's values.

    Raises:
        TrainctlError: The plan is refused.
    """
    try:
        planned = make_plan(composing(), with_files=True, folder=folder, tokenize=True)
        made = planned.assessment.plan
        errors = planned.unforceable_errors if force else planned.errors
        if made is None or errors:
            raise TrainctlError.from_findings(planned.findings)
        if made.not_yet:
            raise TrainctlError(made.not_yet[0])
        found = check(made, Path.cwd(), None)
        if any(finding.is_error for finding in found):
            raise TrainctlError.from_findings(found)
    except TrainctlError as error:
        where = " ".join(f"{key}={value}" for key, value in values.items())
        raise TrainctlError(
            f"{error.message}; the run is {where or 'the only one'}",
            hint=error.hint,
            exit_code=error.exit_code,
            findings=error.findings,
        ) from None
    return made


def _check_queue(plans: Sequence[RunPlan]) -> None:
    """Refuse runs that cannot be queued together.

    Raises:
        TrainctlError: The runs differ in their launcher or, in an array, in their resources; or the
            launcher submits single runs only.
    """
    first = plans[0]
    spec = spec_of(first.config.launcher)
    if spec.queue and not spec.submit_sweep:
        raise TrainctlError(
            f"a sweep has no queue on {spec.name}",
            hint=spec.sweep_hint or "launch the runs one by one",
        )
    for plan in plans:
        if plan.config.launcher.kind != spec.name:
            raise TrainctlError("the runs of a sweep need one launcher")
        same = plan.config.launcher == first.config.launcher and plan.hardware == first.hardware
        if spec.submit_sweep and not same:
            raise TrainctlError(
                f"the tasks of a {spec.queue} array ask for the same nodes, and this sweep varies "
                "them",
                hint="make a sweep for each value of launcher and hardware keys",
            )


def _make(
    sweep_dir: Path | None,
    overrides: Sequence[str],
    points: Sequence[SweepPoint],
    plans: Sequence[RunPlan],
    config_dir: Path | None,
) -> tuple[Path, Started]:
    """Make the sweep's folder, its runs and the first attempt of each."""
    folder = new_sweep(sweep_dir, overrides, points, config_dir)
    started = []
    for index, plan in enumerate(plans):
        run = create_run(plan.config, run_dir=folder / str(index), argv=sys.argv)
        started.append((run, new_attempt(run, plan)))
    return folder, started


def _submit(folder: Path, plan: RunPlan, started: Started, parallel: int | None) -> None:
    submit = function_of("launcher", plan.config.launcher.kind, "submit_sweep")
    job = submit(folder, plan, started, parallel)
    say(f"array {job} of {len(started)} runs is submitted; `trainctl sweep {folder}` shows them")


def _run_queue(folder: Path, started: Started, parallel: int, *, as_json: bool) -> None:
    """Run all attempts, then show the table.

    Raises:
        typer.Exit: A run failed (its exit code), or a signal ended the queue.
    """
    codes: list[int] = []

    def on_end(run: RunPaths, code: int) -> None:
        codes.append(code)
        say(f"run {run.root.name} of {len(started)}: " + ("ended" if not code else f"exit {code}"))

    try:
        run_queue(started, parallel=parallel, on_end=on_end)
    except QueueStopped as stopped:
        say(f"trainctl sweep {folder} --resume goes on with it")
        raise typer.Exit(128 + stopped.number) from None
    finally:
        _show(folder, as_json=as_json)
    failed = [code for code in codes if code]
    if failed:
        raise typer.Exit(failed[0] if failed[0] > 0 else ExitCode.training_failed)


def _show(folder: Path, *, as_json: bool) -> None:
    """Print the results: values, state and losses of each run; the best is marked."""
    found = results(folder)
    scores = {r.index: r.held_out_loss for r in found if r.held_out_loss is not None}
    best = min(scores, key=lambda index: scores[index]) if scores else None
    if as_json:
        rows = [
            {
                "index": result.index,
                "values": result.values,
                "held_out_loss": result.held_out_loss,
                "best": result.index == best,
                "run": result.summary.to_json() if result.summary else None,
            }
            for result in found
        ]
        print_json({"schema": 1, "sweep": str(folder), "runs": rows})
        return
    keys = list(found[0].values) if found else []
    lines = []
    for result in found:
        summary = result.summary
        loss = summary.loss if summary else None
        cells = (
            str(result.index),
            *(result.values.get(key, "") for key in keys),
            summary.state if summary else "not made",
            f"{summary.step}/{summary.stop_step}" if summary else "-",
            f"{loss:.4f}" if loss is not None else "-",
            f"{result.held_out_loss:.4f}" if result.held_out_loss is not None else "-",
            "best" if result.index == best else "",
        )
        lines.append(cells)
    print_table(("run", *keys, "state", "step", "loss", "held-out", ""), lines, wraps=False)
