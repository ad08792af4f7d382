"""`trainctl report`: curves and summaries of runs as a page, as JSON, or as a table."""

from __future__ import annotations

import csv
import io
import json
import math
import sys
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainctl.cli.arguments import Json
from trainctl.cli.console import print_json, say
from trainctl.errors import ExitCode, TrainctlError
from trainctl.runs.atomic import write_bytes
from trainctl.runs.directory import open_or_newest, open_run
from trainctl.runs.sweeps import is_sweep, made_runs

if TYPE_CHECKING:
    from trainctl.monitor.report.history import History

DEFAULT_FILE = Path("report.html")
MOST_RUNS = 50
"""More curves cannot be told apart by colour; `trainctl runs ls FOLDER` lists any number."""


class _Form(StrEnum):
    html = "html"
    json = "json"
    csv = "csv"


def report(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="RUN...",
            help="Run directories, or folders of sweeps; else the newest run.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Where the page goes; else report.html. JSON and CSV: else stdout.",
            show_default=False,
        ),
    ] = None,
    as_json: Json = False,
    as_csv: Annotated[
        bool, typer.Option("--csv", help="Print the curves as a table, a row a bucket of steps.")
    ] = False,
    price: Annotated[
        float | None,
        typer.Option(
            metavar="P", min=0, help="Of a device for an hour: adds the cost.", show_default=False
        ),
    ] = None,
    buckets: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=0,
            help="Points of each run, at most: their mean, least and most; 0: every step. Else as "
            "many as a page of 2 MB bears.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Write one HTML file that shows one or several runs: curves, faults, memory, time, layout.

    It needs no network and no server. --json and --csv give the same numbers.

    A sweep's folder stands for its runs.

    Examples: trainctl report runs/A runs/B -o report.html; trainctl report sweeps/125m
    """
    from trainctl.monitor.report.document import report_document, rows
    from trainctl.monitor.report.page import page

    form = _form(as_json=as_json, as_csv=as_csv, output=output)
    if buckets is not None and 0 < buckets < 64:
        raise TrainctlError(
            f"--buckets {buckets} is too few for a curve",
            hint="at least 64, or 0 for every step",
            exit_code=ExitCode.bad_input,
        )
    if price is not None and not math.isfinite(price):
        raise TrainctlError(f"--price {price} is no price")
    histories = _read(runs or [])
    made = report_document(histories, price=price, most=buckets, is_packed=form is _Form.html)
    if form is _Form.html:
        target = output or DEFAULT_FILE
        _write(target, page(made, title=_title(histories)))
        say(f"wrote {target} ({target.stat().st_size / 1e6:.2f} MB)", style="good")
    elif form is _Form.json and output is None:
        print_json(made)
    elif form is _Form.json:
        assert output is not None
        _write(output, _json_text(made))
    elif output is None:
        csv.writer(sys.stdout, lineterminator="\n").writerows(map(_cells, rows(made)))
    else:
        stream = io.StringIO()
        csv.writer(stream, lineterminator="\n").writerows(map(_cells, rows(made)))
        _write(output, stream.getvalue())


def _form(*, as_json: bool, as_csv: bool, output: Path | None) -> _Form:
    """Return the requested form of output, before any work.

    Raises:
        TrainctlError: Two forms are requested, or the output's folder does not exist (exit code 2).
    """
    if as_json and as_csv:
        raise TrainctlError("--json and --csv are two forms: ask for one")
    if output is not None and (output.is_dir() or not output.absolute().parent.is_dir()):
        what = "is a folder" if output.is_dir() else f"there is no folder {output.parent}"
        raise TrainctlError(f"{output}: {what}", hint="-o names the file to write")
    return _Form.json if as_json else _Form.csv if as_csv else _Form.html


def _title(histories: list[History]) -> str:
    """Return the names of the runs. Runs of a sweep (0, 1, 2) go by the sweep's name."""
    roots = [history.run.root for history in histories]
    sweeps = {root.parent: None for root in roots if is_sweep(root.parent)}
    others = [root for root in roots if root.parent not in sweeps]
    return ", ".join(path.name for path in (*sweeps, *others))


def _read(runs: list[Path]) -> list[History]:
    """Read the runs, each once.

    Raises:
        TrainctlError: A path is not a run (exit code 5), or there are too many runs (exit code 2).
    """
    from trainctl.monitor.report.history import History

    opened = [
        run for path in runs for run in (made_runs(path) if is_sweep(path) else [open_run(path)])
    ] or [open_or_newest(None)]
    opened = list({run.root: run for run in opened}.values())
    if len(opened) > MOST_RUNS:
        raise TrainctlError(
            f"{len(opened)} runs are too many for one page",
            hint=f"at most {MOST_RUNS}; `trainctl runs ls FOLDER` lists them all",
        )
    histories = [History(run) for run in opened]
    for history in histories:
        history.read()
    return histories


def _write(path: Path, text: str) -> None:
    try:
        # Bytes of a path that are not UTF-8 become escapes, which JSON decodes to the same.
        write_bytes(path.absolute(), text.encode(errors="backslashreplace"))
    except OSError as error:
        raise TrainctlError(
            f"{path} cannot be written: {error.strerror}", exit_code=ExitCode.environment
        ) from None


def _json_text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False) + "\n"


def _cells(row: list[Any]) -> list[Any]:
    return ["" if value is None else value for value in row]
