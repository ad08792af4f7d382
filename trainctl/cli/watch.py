"""`trainctl watch`: a live page of runs, served on this machine from their files."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trainctl.cli.console import print_data, print_message, tolerate_broken_pipe
from trainctl.errors import MachineError, RunStateError, TrainctlError
from trainctl.runs.directory import DEFAULT_ROOT, is_run, open_run
from trainctl.runs.layout import RunPaths
from trainctl.runs.sweeps import RECORD

if TYPE_CHECKING:
    from trainctl.monitor.report.watching import PageServer

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
        _explain(server)
        server.serve_forever(poll_interval=0.2)


def _explain(server: PageServer) -> None:
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
