"""`trainctl report`: curves and summaries of runs as a page, as JSON, or as a table."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from trainctl import api
from trainctl.cli.arguments import Json
from trainctl.cli.console import print_json, print_message
from trainctl.errors import TrainctlError

DEFAULT_FILE = Path("report.html")
_Form = Literal["html", "json", "csv"]

OutputFile = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE",
        help="Output file; default: report.html, or stdout for JSON and CSV.",
    ),
]
Buckets = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=0,
        help="Maximum number of points per run, each a mean with its extremes; 0 draws every "
        "step. Default: as many as fit a page of 2 MB.",
    ),
]


def report(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="RUN...", help="Run directories, or folders of sweeps; default: the newest run."
        ),
    ] = None,
    output: OutputFile = None,
    as_json: Json = False,
    as_csv: Annotated[
        bool,
        typer.Option(
            "--csv", help="Print the curves as a CSV table with one row for each bucket of steps."
        ),
    ] = False,
    price: Annotated[
        float | None,
        typer.Option(metavar="P", min=0, help="Price of one device per hour; adds the cost."),
    ] = None,
    buckets: Buckets = None,
) -> None:
    """Write one HTML file that shows one or several runs: curves, faults, memory, time, layout.

    It needs no network and no server. --json and --csv give the same numbers.

    A sweep's folder stands for its runs.

    Examples: trainctl report runs/A runs/B -o report.html; trainctl report sweeps/125m
    """
    form = _output_form(as_json=as_json, as_csv=as_csv, output=output)
    text = api.report(*(runs or ()), form=form, price=price, buckets=buckets)
    if form == "json" and output is None:
        print_json(json.loads(text))
        return
    if form == "csv" and output is None:
        sys.stdout.write(text)
        return
    from trainctl.monitor.report.page import write_report

    target = output or DEFAULT_FILE
    write_report(target, text)
    if form == "html":
        print_message(f"wrote {target} ({target.stat().st_size / 1e6:.2f} MB)", style="good")


def _output_form(*, as_json: bool, as_csv: bool, output: Path | None) -> _Form:
    """Return the requested form of output, before any work.

    Raises:
        TrainctlError: Two forms are requested, or the output's folder does not exist (exit code 2).
    """
    if as_json and as_csv:
        raise TrainctlError("--json and --csv are two forms: ask for one")
    if output is not None and (output.is_dir() or not output.absolute().parent.is_dir()):
        what = "is a folder" if output.is_dir() else f"there is no folder {output.parent}"
        raise TrainctlError(f"{output}: {what}", hint="-o names the file to write")
    return "json" if as_json else "csv" if as_csv else "html"
