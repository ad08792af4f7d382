"""`trainctl sweep`: one run for each combination of values, and a table of the results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainctl.cli.arguments import ConfigDir, Force, Json, register_config_dir
from trainctl.cli.console import (
    print_data,
    print_json,
    print_message,
    print_table,
    tolerate_broken_pipe,
)
from trainctl.config.overrides import expand_sweep, split_target
from trainctl.errors import ExitCode, TrainctlError
from trainctl.launchers.sweep import (
    QueueStopped,
    Started,
    make_attempts,
    make_sweep,
    plan_rest,
    plan_sweep,
    run_queue,
    submit_sweep,
)
from trainctl.plans.types import RunPlan
from trainctl.runs.layout import RunPaths
from trainctl.runs.lock import hold_lock
from trainctl.runs.sweeps import (
    Sweep,
    SweepAction,
    read_sweep,
    remaining_runs,
    sweep_results,
)

SweepArguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[FOLDER] OVERRIDES",
        help="Folder of a sweep to show, or a configuration with lists: KEY=VALUE,VALUE.",
        show_default=False,
    ),
]


Parallel = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        help="Number of concurrent runs; default: 1 on this machine, all with Slurm.",
    ),
]


def sweep(
    context: typer.Context,
    arguments: SweepArguments = None,
    sweep_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder of the sweep; default: a new one under sweeps/."),
    ] = None,
    parallel: Parallel = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Continue the sweep in FOLDER: start missing runs, resume interrupted ones.",
        ),
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
    plans = plan_sweep(points, config_dir, force=force)
    if dry_run:
        for index, point in enumerate(points):
            print_data(f"{index}: {' '.join(point.overrides)}")
        return
    tolerate_broken_pipe()
    folder, started = make_sweep(sweep_dir, arguments or [], points, plans, config_dir)
    print_data(f"sweep: {folder}")
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
    job = submit_sweep(folder, plan, started, parallel)
    if job is not None:
        print_message(
            f"array {job} of {len(started)} runs is submitted; `trainctl sweep {folder}` shows them"
        )
        return
    with hold_lock(RunPaths(folder)):  # so that nobody resumes a sweep that is still running
        _run_queue(folder, started, parallel or 1, as_json=as_json)
    print_message(f"`trainctl sweep {folder}` shows this again")


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
    with hold_lock(RunPaths(folder)):
        left = remaining_runs(folder)
        for item in left:
            print_data(f"{item.index}: {item.next} ({item.why})")
        waiting = [item for item in left if item.next is not SweepAction.leave]
        plans = plan_rest(waiting, record, force=force)
        if dry_run:
            return
        if not waiting:
            print_message(
                "nothing to do: trainctl resume FOLDER/INDEX goes on with a run that is left alone"
            )
            return
        tolerate_broken_pipe()
        started = make_attempts(waiting, plans)
        _begin(folder, plans[0], started, parallel, as_json=as_json)


def _run_queue(folder: Path, started: Started, parallel: int, *, as_json: bool) -> None:
    """Run all attempts, then show the table.

    Raises:
        typer.Exit: A run failed (its exit code), or a signal ended the queue.
    """
    codes: list[int] = []

    def on_end(run: RunPaths, code: int) -> None:
        codes.append(code)
        print_message(
            f"run {run.root.name} of {len(started)}: " + ("ended" if not code else f"exit {code}")
        )

    try:
        run_queue(started, parallel=parallel, on_end=on_end)
    except QueueStopped as stopped:
        print_message(f"trainctl sweep {folder} --resume goes on with it")
        raise typer.Exit(128 + stopped.number) from None
    finally:
        _show(folder, as_json=as_json)
    failed = [code for code in codes if code]
    if failed:
        raise typer.Exit(failed[0] if failed[0] > 0 else ExitCode.training_failed)


def _show(folder: Path, *, as_json: bool) -> None:
    """Print the results: values, state and losses of each run; the best is marked."""
    found = sweep_results(folder)
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
