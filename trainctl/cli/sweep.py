"""`trainctl sweep`: one run for each combination of values, and a table of the results."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from trainctl import api
from trainctl.cli.arguments import ConfigDir, Force, Json, register_config_dir
from trainctl.cli.console import (
    print_data,
    print_json,
    print_message,
    print_table,
    show_findings,
    tolerate_broken_pipe,
)
from trainctl.config.overrides import SweepPoint, split_target
from trainctl.errors import ExitCode, Finding, TrainctlError
from trainctl.launchers.sweep import QueueStopped, SweepObserver
from trainctl.runs.layout import RunPaths
from trainctl.runs.sweeps import RemainingRun, read_sweep, sweep_results

SweepArguments = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[FOLDER] OVERRIDES",
        help="Folder of a sweep to show, or a configuration with lists: KEY=VALUE,VALUE.",
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
    view = SweepView(dry_run=dry_run)
    if target is not None and not overrides and not resume:
        _show(Path(target), as_json=as_json)
        return
    if resume:
        if target is None or overrides or sweep_dir is not None or config_dir is not None:
            raise TrainctlError(
                "--resume goes on with a sweep as it was made",
                hint="trainctl sweep FOLDER --resume, without overrides and folders",
            )
        view.folder = Path(target).resolve()
        own = read_sweep(view.folder).config_dir
        register_config_dir(context, Path(own) if own else None)
        sweep_dir, arguments = view.folder, []
    with view.showing(as_json=as_json):
        api.sweep(
            *(arguments or ()),
            sweep_dir=sweep_dir,
            resume=resume,
            parallel=parallel,
            force=force,
            config_dir=config_dir,
            observer=view,
            argv=sys.argv,
        )


class SweepView(SweepObserver):
    """Prints the phases of a sweep as they are reached."""

    def __init__(self, *, dry_run: bool) -> None:
        self.folder = Path()
        self.codes: list[int] | None = None
        self._dry_run = dry_run

    @contextmanager
    def showing(self, *, as_json: bool) -> Iterator[None]:
        """Show the table when the queue has ended, and exit as the first run that failed."""
        try:
            yield
        except QueueStopped as stopped:
            print_message(f"trainctl sweep {self.folder} --resume goes on with it")
            raise typer.Exit(128 + stopped.number) from None
        finally:
            if self.codes is not None:
                _show(self.folder, as_json=as_json)
        failed = [code for code in self.codes or () if code]
        if failed:
            raise typer.Exit(failed[0] if failed[0] > 0 else ExitCode.training_failed)
        if self.codes is not None:
            print_message(f"`trainctl sweep {self.folder}` shows this again")

    def remaining(self, runs: Sequence[RemainingRun]) -> None:
        for item in runs:
            print_data(f"{item.index}: {item.next} ({item.why})")

    def found(self, findings: Sequence[Finding]) -> None:
        show_findings(findings)

    def planned(self, points: Sequence[SweepPoint]) -> None:
        if self._dry_run:
            for index, point in enumerate(points):
                print_data(f"{index}: {' '.join(point.overrides)}")
            raise typer.Exit
        tolerate_broken_pipe()

    def nothing_to_do(self) -> None:
        print_message(
            "nothing to do: trainctl resume FOLDER/INDEX goes on with a run that is left alone"
        )

    def made(self, folder: Path) -> None:
        self.folder = folder
        print_data(f"sweep: {folder}")

    def submitted(self, folder: Path, job: str, count: int) -> None:
        print_message(
            f"array {job} of {count} runs is submitted; `trainctl sweep {folder}` shows them"
        )

    def queued(self) -> None:
        self.codes = []

    def ended(self, run: RunPaths, code: int, count: int) -> None:
        assert self.codes is not None
        self.codes.append(code)
        print_message(
            f"run {run.root.name} of {count}: " + ("ended" if not code else f"exit {code}")
        )


def _show(folder: Path, *, as_json: bool) -> None:
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
