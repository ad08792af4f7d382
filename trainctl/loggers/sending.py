"""The process that sends a run's metrics to a logger: how it is started, and run to its end."""

from __future__ import annotations

import subprocess
import sys

from trainctl.errors import ExitCode, TrainctlError
from trainctl.runs.access import ensure_folder
from trainctl.runs.layout import RunPaths


def command(run: RunPaths, name: str, *options: str) -> list[str]:
    """The command line of the process."""
    return [sys.executable, "-m", "trainctl.loggers", str(run.root), name, *options]


def send(run: RunPaths, name: str, *, again: bool = False) -> int:
    """Send what is not sent yet, in a process of its own; its exit code.

    Args:
        run: The run.
        name: The logger.
        again: Whether what was sent before is sent too.

    Raises:
        TrainctlError: The run directory cannot be written (exit code 4).
    """
    paths, options = run.logger(name), ("--again",) if again else ()
    try:
        ensure_folder(paths.folder)
        with paths.log.open("ab") as log:
            return subprocess.run(command(run, name, *options), stdout=log, stderr=log).returncode
    except OSError as error:
        raise TrainctlError(
            f"{run.root} cannot be written: {error.strerror}",
            hint="how far a logger has come is kept there; copy the run to send it from elsewhere",
            exit_code=ExitCode.environment,
        ) from None
