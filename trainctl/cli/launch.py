"""`trainctl launch` and `trainctl resume`: plan, check, start, watch."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from trainctl.cli.arguments import (
    ConfigDir,
    Detach,
    DryRun,
    Force,
    Json,
    Overrides,
    TargetAndOverrides,
    split_target,
)
from trainctl.errors import TrainctlError


class ResumeMode(StrEnum):
    """What `launch` does with a run directory that has a checkpoint."""

    auto = "auto"
    never = "never"


def launch(
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
    as_json: Json = False,
) -> None:
    """Check a configuration against the hardware, then train.

    Example: trainctl launch recipe=tiny training.steps=200 optimizer.lr=1e-3
    """
    from trainctl.cli import start
    from trainctl.cli.planning import compose, plan
    from trainctl.runs.directory import is_run

    if resume is ResumeMode.auto:
        if run_dir is None:
            raise TrainctlError("--resume auto needs --run-dir, the directory to look in")
        if is_run(run_dir):
            # A scheduler repeats the whole command, so it composes as the first launch did.
            start.resume_run(
                run_dir,
                lambda _: compose(overrides, config_dir),
                dry_run=dry_run,
                force=force,
                as_json=as_json,
                may_restart=True,
                detach=detach,
            )
            return
    planned = plan(compose(overrides, config_dir), with_files=True)
    start.start_run(
        planned, run_dir=run_dir, dry_run=dry_run, force=force, as_json=as_json, detach=detach
    )


def resume(
    run: TargetAndOverrides = None,
    dry_run: DryRun = False,
    force: Force = False,
    config_dir: ConfigDir = None,
    detach: Detach = False,
    as_json: Json = False,
) -> None:
    """Continue a run (the newest, if none is named) from its newest complete checkpoint.

    Examples: trainctl resume; trainctl resume runs/NAME training.steps=400
    """
    from trainctl.cli import start
    from trainctl.config.compose import recompose
    from trainctl.runs.directory import newest_run

    target, overrides = split_target(run)
    root = Path(target) if target is not None else newest_run().root
    start.resume_run(
        root,
        lambda before: recompose(start.next_launch(before), overrides, config_dir=config_dir),
        dry_run=dry_run,
        force=force,
        as_json=as_json,
        may_restart=False,
        detach=detach,
    )
