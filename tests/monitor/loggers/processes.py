"""Processes that send a run's metrics, as a launcher and `runs sync` start them, but that they are
forks of one that has imported what they do."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from preloaded_server import Forked, PreloadedServer

from trainctl.runs.layout import RunPaths

SECONDS = 60.0
IMPORTED = (
    "trainctl.monitor.loggers.alerts",
    "trainctl.monitor.loggers.follower",
    "trainctl.monitor.loggers.delivery",
)
servers: list[PreloadedServer] = []
"""Server that forks logger processes; empty while no tests run."""


def start(run: RunPaths, name: str, *options: str, **variables: str) -> Forked:
    """Start a logger process."""
    return Forked(
        servers[-1],
        "trainctl.monitor.loggers",
        [str(run.root), name, *options],
        environment={**os.environ, **variables},
    )


@contextmanager
def following(run: RunPaths, name: str, **variables: str) -> Iterator[Forked]:
    process = start(run, name, "--follow", **variables)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def send(run: RunPaths, name: str, *options: str, **variables: str) -> tuple[int, str]:
    """Send all that there is: the exit code, and what was said."""
    process = start(run, name, *options, **variables)
    said = process.communicate(timeout=SECONDS)[1]
    assert process.returncode is not None
    return process.returncode, said


def end(process: Forked) -> int:
    """Wait for the process as a launcher does, and return its exit code."""
    process.communicate(timeout=SECONDS)
    assert process.returncode is not None
    return process.returncode


def wait_for(condition: Any, seconds: float = SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def cursor(run: RunPaths, name: str) -> dict[str, Any]:
    try:
        return json.loads(run.companion(name).cursor.read_text())
    except FileNotFoundError:
        return {"points": 0, "problem": ""}
