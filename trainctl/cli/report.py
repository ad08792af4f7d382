"""`trainctl report` and `trainctl watch`: curves and summaries of runs.

`report` writes a page, JSON or a table; `watch` serves a live page of the runs' files.
"""

from __future__ import annotations

import json
import math
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from trainctl import api
from trainctl.cli.arguments import Json
from trainctl.cli.console import print_data, print_json, print_message, tolerate_broken_pipe
from trainctl.errors import MachineError, RunStateError, TrainctlError
from trainctl.runs.directory import DEFAULT_ROOT, is_run, open_run
from trainctl.runs.layout import RunPaths
from trainctl.runs.sweeps import RECORD

if TYPE_CHECKING:
    from trainctl.monitor.report.watching import PageServer


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


MOST_RUNS = 50
"""Runs named for one page; a folder may have any number."""


def watch(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="[RUN...|FOLDER]",
            help="Runs to show on one page, or a folder of runs or of a sweep; default: runs/.",
        ),
    ] = None,
    host: Annotated[
        str,
        typer.Option(
            metavar="HOST",
            help="Address to listen on; by default reachable only from this machine.",
        ),
    ] = "127.0.0.1",
    port: Annotated[
        int,
        typer.Option(
            metavar="PORT", min=0, max=65535, help="Port to listen on; 0 picks a free one."
        ),
    ] = 0,
    allow_name: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Host name that browsers may use, such as a proxy's; may be repeated.",
        ),
    ] = None,
    price: Annotated[
        float | None, typer.Option(metavar="P", min=0, help="Price of one device per hour.")
    ] = None,
) -> None:
    """Serve the page of runs, live, from their files alone; the address is printed.

    Ctrl-C ends it; the runs go on. Example: trainctl watch sweeps/NAME
    """
    from trainctl.monitor.report.watching import PageServer, WatchApp

    if price is not None and not math.isfinite(price):
        raise TrainctlError(f"--price {price} is no price")
    opened, folder = _runs_or_folder(runs or [])
    watching = WatchApp(opened, folder, price)
    try:
        server = PageServer(host, port, watching.respond, names=tuple(allow_name or ()))
    except (OSError, UnicodeError) as error:  # UnicodeError: not a valid host name
        why = error.strerror if isinstance(error, OSError) else "it is no name"
        raise MachineError(
            f"nothing can listen on {host}, port {port}: {why or error}",
            hint="--port 0 takes a free one",
        ) from None
    tolerate_broken_pipe()
    with server, _stopped_by_signals(server):
        print_data(server.url)
        _show_who_reaches_it(server)
        server.serve_forever(poll_interval=0.2)


def _show_who_reaches_it(server: PageServer) -> None:
    address, port = server.server_address[:2]
    if ip_address(str(address)).is_loopback:
        print_message(
            f"only this machine reaches it; from another one: ssh -N -L {port}:localhost:{port} "
            "HOST, then the same address. Ctrl-C ends it"
        )
    else:
        print_message(
            "warning: it is not encrypted, so whoever sees the network sees the address, and with "
            "it the runs; a tunnel (ssh -L, with --host 127.0.0.1) does not show it",
            style="warning",
        )


def _runs_or_folder(given: list[Path]) -> tuple[list[RunPaths], Path | None]:
    """Return the runs of one page, or a folder.

    Raises:
        TrainctlError: A path is no run and no folder (exit code 5), or there are too many runs.
    """
    if len(given) <= 1:
        folder = given[0] if given else DEFAULT_ROOT
        if not is_run(folder):
            if not folder.is_dir():
                raise RunStateError(
                    f"there is no folder {folder}", hint="name a run, or a folder of runs"
                )
            if not (folder / RECORD).is_file() and not any(map(is_run, folder.iterdir())):
                print_message(f"{folder} has no run yet; those that come are shown")
            return [], folder
    opened = list({run.root: run for run in map(open_run, given)}.values())
    if len(opened) > MOST_RUNS:
        raise TrainctlError(
            f"{len(opened)} runs are too many for one page",
            hint=f"at most {MOST_RUNS}; a folder of runs may have any number",
        )
    return opened, None


@contextmanager
def _stopped_by_signals(server: PageServer) -> Iterator[None]:
    """Let SIGINT and SIGTERM end the server normally, with exit code 0."""

    def end(*_: Any) -> None:
        # `shutdown` waits for the loop that this handler has interrupted.
        threading.Thread(target=server.shutdown, daemon=True).start()

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
