"""`trainctl checkpoint`: list, verify, import, remove, and save now."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from trainctl import api
from trainctl.cli.arguments import (
    ConfigDir,
    Json,
    NamedRun,
    RecipeAndOverrides,
    Run,
    RunOrUrl,
    open_run_or_newest,
)
from trainctl.cli.console import (
    Meter,
    print_data,
    print_json,
    print_message,
    print_table,
    size_text,
)
from trainctl.config.quantities import count_text
from trainctl.errors import ExitCode
from trainctl.readers.remote import is_url

app = typer.Typer(help="List, verify, import, remove and save checkpoints.", add_completion=False)


@app.command("ls")
def list_(run: RunOrUrl = None, as_json: Json = False) -> None:
    """List the checkpoints of a run or of its mirror, oldest first.

    Sizes are compared with the manifest; `verify` also reads every byte.
    """
    place = _named_or_newest(run)
    rows = api.list_checkpoints(place)
    if as_json:
        print_json({"schema": 1, "run": place, "checkpoints": rows})
    elif rows:
        _print_table(rows)
    else:
        print_message(f"{place} has no checkpoint yet")


@app.command()
def verify(
    run: RunOrUrl = None,
    step: Annotated[
        int | None,
        typer.Option(metavar="N", help="Step of the checkpoint; default: all checkpoints."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Read every byte of the checkpoints and compare it with their checksums.

    Exits with 5 if one is damaged.
    """
    place = _named_or_newest(run)
    with Meter() as meter:
        rows = api.verify_checkpoints(place, step=step, progress=meter)
    if as_json:
        print_json({"schema": 1, "run": place, "checkpoints": rows})
    else:
        for row in rows:
            if not row["problems"]:
                print_data(f"{Path(row['path']).name}: intact")
            for problem in row["problems"]:
                print_data(problem, style="error")
    if any(row["problems"] for row in rows):
        raise typer.Exit(ExitCode.run_state)


@app.command()
def rm(
    run: NamedRun,
    steps: Annotated[
        list[int], typer.Argument(metavar="STEP...", help="Steps of the checkpoints to remove.")
    ],
    force: Annotated[
        bool, typer.Option("--force", help="Remove even if no intact checkpoint is left.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Remove checkpoints of a run that is not training, those of the weights alone as well.

    Example: trainctl checkpoint rm runs/NAME 1000 2000
    """
    opened = api.Run(run)
    with Meter() as meter:
        removed = opened.remove_checkpoints(*steps, force=force, progress=meter)
    if as_json:
        print_json(
            {"schema": 1, "run": str(opened.path), "removed": [str(path) for path in removed]}
        )
    else:
        for path in removed:
            print_data(f"removed {path}")


@app.command("import")
def import_(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Directory of another trainer's checkpoint.")
    ],
    to: Annotated[Path, typer.Option("--to", metavar="RUN_DIR", help="Directory of the new run.")],
    overrides: RecipeAndOverrides = None,
    format: Annotated[
        str | None,
        typer.Option(
            "--from", metavar="FORMAT", help="Format of the checkpoint; default: detected."
        ),
    ] = None,
    config_dir: ConfigDir = None,
    as_json: Json = False,
) -> None:
    """Make a run from a checkpoint of another trainer, with its optimizer states.

    `trainctl resume` continues it, on any layout. What is unknown or differs is said.

    Example: trainctl checkpoint import out/global_step500 --to runs/NAME recipe=tiny
    """
    with Meter() as meter:
        made = api.import_checkpoint(
            directory,
            to,
            *(overrides or ()),
            format=format,
            progress=meter,
            config_dir=config_dir,
            argv=sys.argv,
        )
    if as_json:
        print_json({"schema": 1, **made})
        return
    for note in made["notes"]:
        print_message(f"note: {note}")
    print_data(
        f"imported {made['format']} checkpoint of step {made['step']:,} into {made['run']}: "
        f"{count_text(made['num_parameters'])} parameters, {size_text(made['size_bytes'])}"
    )
    print_message(f"continue it with: trainctl resume {to}")
    unchecked = "".join(f"; not {each}" for each in made["unchecked"])
    print_message(
        "checked: that each tensor has its shape, a floating-point type, every element once, and "
        f"finite values{unchecked}"
    )


@app.command()
def now(run: Run = None, as_json: Json = False) -> None:
    """Have a run that is training save at its next step, and wait until that is committed."""
    opened = open_run_or_newest(run)
    saved = opened.save(print_message)
    if as_json:
        where = {"run": str(opened.path), "step": saved.step, "path": str(saved.path)}
        print_json({"schema": 1, **where})
    else:
        print_data(f"saved {saved.path}")


def _named_or_newest(run: str | None) -> str:
    """Return a URL as it is, or the whole path of a run."""
    if run is not None and is_url(run):
        return run
    return str(open_run_or_newest(None if run is None else Path(run)).path)


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
            print_message(f"warning: {row['problem']}", style="warning")
