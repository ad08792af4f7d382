"""`trainctl launch` and `trainctl resume`: plan, check, start, watch."""

from __future__ import annotations

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
    split_target,
)
from trainctl.cli.commands import script_arguments
from trainctl.cli.start import resume_run, start_run
from trainctl.config.compose import recompose
from trainctl.config.user_code import with_script_arguments
from trainctl.errors import TrainctlError
from trainctl.launch.planning import compose
from trainctl.runs.directory import is_run, newest_run


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
                lambda _: with_script_arguments(compose(overrides, config_dir), words),
                dry_run=dry_run,
                force=force,
                as_json=as_json,
                verbose=verbose,
                detach=detach,
            )
            return
    composed = with_script_arguments(compose(overrides, config_dir), words)
    start_run(
        composed,
        run_dir=run_dir,
        dry_run=dry_run,
        force=force,
        as_json=as_json,
        verbose=verbose,
        detach=detach,
    )


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
