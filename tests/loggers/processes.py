"""Processes that send a run's metrics, as a launcher and `runs sync` start them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from trainctl.runs.layout import RunPaths

SECONDS = 60.0


def start(run: RunPaths, name: str, *options: str, **variables: str) -> subprocess.Popen[bytes]:
    """A process that sends."""
    return subprocess.Popen(
        [sys.executable, "-m", "trainctl.loggers", run.root, name, *options],
        env={**os.environ, **variables},
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


@contextmanager
def following(run: RunPaths, name: str, **variables: str) -> Iterator[subprocess.Popen[bytes]]:
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
    return process.returncode, said.decode()


def end(process: subprocess.Popen[bytes]) -> int:
    """As a launcher does."""
    process.communicate(timeout=SECONDS)
    return process.returncode


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def cursor(run: RunPaths, name: str) -> dict[str, Any]:
    try:
        return json.loads(run.logger(name).cursor.read_text())
    except FileNotFoundError:
        return {"points": 0, "problem": ""}
