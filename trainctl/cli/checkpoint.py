"""`trainctl checkpoint`: list, verify, remove, and save now."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from trainctl.cli.arguments import Json, NamedRun, Run
from trainctl.cli.console import Meter, print_json, print_table, put, say, size_text
from trainctl.errors import ExitCode, TrainctlError
from trainctl.runs.attempts import config_of
from trainctl.runs.checkpoint_selection import select
from trainctl.runs.checkpoint_selection import verify as problems_of
from trainctl.runs.checkpoints import checkpoint_folders, clean_temporary, delete, examine
from trainctl.runs.directory import open_or_newest, open_run
from trainctl.runs.layout import RunPaths
from trainctl.runs.lock import hold, holder
from trainctl.runs.records import Event, EventFollower, events_from_end
from trainctl.runs.requests import Request, file_request, withdraw_request

_POLL_SECONDS = 0.2

app = typer.Typer(help="List, verify, remove and save checkpoints.", add_completion=False)


@app.command("ls")
def list_(run: Run = None, as_json: Json = False) -> None:
    """List the checkpoints of a run, oldest first.

    Sizes are compared with the manifest; `verify` also reads every byte.
    """
    paths = open_or_newest(run)
    rows = _rows(paths)
    if as_json:
        print_json({"schema": 1, "run": str(paths.root), "checkpoints": rows})
    elif rows:
        _print_table(rows)
    else:
        say(f"{paths.root} has no checkpoint yet")


@app.command()
def verify(
    run: Run = None,
    step: Annotated[
        int | None,
        typer.Option(metavar="N", help="Of this step; else all of them.", show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """Read every byte of the checkpoints and compare it with their checksums.

    Exits with 5 if one is damaged.
    """
    paths = open_or_newest(run)
    with Meter() as meter:
        rows: list[dict[str, Any]] = [
            {"step": number, "path": str(path), "problems": problems_of(paths, path, meter)}
            for number, path in select(paths, None if step is None else [step])
        ]
    if as_json:
        print_json({"schema": 1, "run": str(paths.root), "checkpoints": rows})
    else:
        for row in rows:
            if not row["problems"]:
                put(f"{Path(row['path']).name}: intact")
            for problem in row["problems"]:
                put(problem, style="error")
    if any(row["problems"] for row in rows):
        raise typer.Exit(ExitCode.run_state)


@app.command()
def rm(
    run: NamedRun,
    steps: Annotated[list[int], typer.Argument(metavar="STEP...", help="Which ones.")],
    force: Annotated[
        bool, typer.Option("--force", help="Also if no intact checkpoint is left then.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Remove checkpoints of a run that is not training, those of the weights alone as well.

    Example: trainctl checkpoint rm runs/NAME 1000 2000
    """
    paths = open_run(run)
    with hold(paths):  # keeps a trainer's rotation out
        doomed = select(paths, steps)
        if not force:
            _require_another(paths, [path for _, path in doomed])
        for _, path in doomed:
            delete(paths, path)
        clean_temporary(paths)
    if as_json:
        print_json(
            {"schema": 1, "run": str(paths.root), "removed": [str(path) for _, path in doomed]}
        )
    else:
        for _, path in doomed:
            put(f"removed {path}")


@app.command()
def now(run: Run = None, as_json: Json = False) -> None:
    """Have a run that is training save at its next step, and wait until that is committed."""
    paths = open_or_newest(run)
    if holder(paths) is None:
        raise TrainctlError(
            f"{paths.root} is not training",
            hint="`trainctl checkpoint ls` shows what it saved",
            exit_code=ExitCode.run_state,
        )
    follower = EventFollower(paths.events)
    last = next(events_from_end(paths.events, "step"), None)
    since = _place(last) if last else (0, 0)
    file_request(paths, Request.checkpoint, "trainctl checkpoint now")
    say("asked; the run saves at its next step")
    saved = _wait_for_save(paths, follower, since)
    if saved is None:
        withdraw_request(paths, Request.checkpoint)
        raise TrainctlError(f"{paths.root} ended before it saved", exit_code=ExitCode.run_state)
    path = paths.root / saved["path"]
    if as_json:
        where = {"run": str(paths.root), "step": saved["step"], "path": str(path)}
        print_json({"schema": 1, **where})
    else:
        put(f"saved {path}")


def _place(event: Event) -> tuple[int, int]:
    """Return the attempt and step of a record. A later attempt may repeat steps."""
    return int(event["attempt"]), int(event["step"])


def _wait_for_save(run: RunPaths, follower: EventFollower, since: tuple[int, int]) -> Event | None:
    """Return the record of the first save at or after `since`; None if the launch ended first.

    A save that was already under way at the request has an earlier step, and does not count.
    """
    while True:
        training = holder(run) is not None  # before the poll: the last records precede the end
        for event in follower.poll():
            if event["event"] == "checkpoint" and _place(event) >= since:
                return event
        if not training:
            return None
        time.sleep(_POLL_SECONDS)


def _rows(run: RunPaths) -> list[dict[str, Any]]:
    """Return the rows of `ls`, one for each folder; a damaged checkpoint comes with its problem."""
    full = examine(run)
    infos = [look.info for look in full if look.info is not None]
    metric = config_of(run).checkpoint.best_of or "loss"
    scored = [info for info in infos if metric in info.metrics]
    best = min(scored, key=lambda info: info.metrics[metric]) if scored else None
    newest = infos[-1] if infos else None
    rows = []
    for look in sorted([*examine(run, weights_only=True), *full], key=lambda look: look.step):
        info = look.info
        rows.append(
            {
                "step": look.step,
                "path": str(look.path),
                "saved": look.path.stat().st_mtime,
                "bytes": info.size_bytes if info else None,
                "metrics": info.metrics if info else {},
                "weights_only": look.path.name.startswith("weights"),
                "newest": info is not None and info is newest,
                "best": info is not None and info is best,
                "kept_for": info.kept_for if info else "",
                "problem": look.problem,
            }
        )
    return rows


def _print_table(rows: list[dict[str, Any]]) -> None:
    lines = []
    for row in rows:
        marks = [mark for mark in ("newest", "best") if row[mark]]
        if row["weights_only"]:
            marks.append("weights only")
        if row["kept_for"]:
            marks.append(f"kept: {row['kept_for'].replace('_', ' ')}")
        cells = (
            f"{row['step']}",
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["saved"])),
            size_text(row["bytes"]) if row["bytes"] is not None else "-",
            " ".join(f"{name} {value:.4f}" for name, value in row["metrics"].items()),
            "damaged" if row["problem"] else ", ".join(marks),
        )
        lines.append(cells)
    print_table(("step", "saved", "size", "metrics", ""), lines, right=(0, 2))
    for row in rows:
        if row["problem"]:
            say(f"warning: {row['problem']}", style="warning")


def _require_another(run: RunPaths, doomed: list[Path]) -> None:
    """Refuse to remove the last intact checkpoint."""
    full = [path for _, path in reversed(checkpoint_folders(run))]
    with Meter() as meter:
        if any(not problems_of(run, path, meter) for path in full if path not in doomed):
            return
        going = (path for path in full if path in doomed and not problems_of(run, path, meter))
        last = next(going, None)
    if last is not None:
        raise TrainctlError(
            f"{last.name} is the last intact checkpoint of {run.root}",
            hint="--force removes it all the same",
            exit_code=ExitCode.run_state,
        )
