"""`trainctl runs sync`: send metrics to loggers after the fact."""

from __future__ import annotations

from typing import Annotated

import typer

from trainctl.cli.arguments import NamedRuns
from trainctl.cli.console import put, say
from trainctl.config.registry import load
from trainctl.errors import ExitCode, TrainctlError
from trainctl.monitor.loggers.cursor import read_cursor
from trainctl.monitor.loggers.sending import ALERTS, send
from trainctl.runs.attempts import config_of
from trainctl.runs.directory import open_run
from trainctl.runs.layout import RunPaths


def sync(
    runs: NamedRuns,
    to: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="To this logger, in place of those of logging.to; may be repeated.",
            show_default=False,
        ),
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="From the first step, what was sent already too.")
    ] = False,
) -> None:
    """Send to the loggers what was not sent while a run trained, from its records alone.

    On any machine that sees the run. A step that was sent is not sent again.

    Example: trainctl runs sync runs/NAME --to csv
    """
    for name in to or []:
        if name != ALERTS:
            load("logger", name)
    failed = []
    for paths in [open_run(run) for run in runs]:
        names = to or config_of(paths).logging.to
        if not names:
            say(f"{paths.root}: it has no logger in logging.to; name one with --to")
        failed += [f"{paths.root.name}: {name}" for name in names if not _send(paths, name, again)]
    if failed:
        raise TrainctlError(
            f"not everything was sent: {', '.join(failed)}",
            hint="repeat the command when what is in the way is gone",
            exit_code=ExitCode.environment,
        )


def _send(run: RunPaths, name: str, again: bool) -> bool:
    """Send to one logger and print its position.

    Returns:
        Whether it has all records, or another process is sending them.
    """
    code = send(run, name, config=config_of(run), again=again)
    if code == ExitCode.run_state:
        say(f"{run.root}: another process sends to {name} now", style="warning")
        return True
    cursor = read_cursor(run.logger(name).cursor)
    put(f"{run.root}: {name} is at step {max(0, cursor.step):,}")
    if code:
        why = cursor.problem or f"its process ended with {code}"
        say(f"{run.root}: {name}: {why}; see {run.logger(name).log}", style="error")
    return code == ExitCode.success
