"""The process that sends a run's metrics to a logger: its command line, and a run to its end."""

from __future__ import annotations

import subprocess
import sys

from trainctl.config.schema import RunConfig
from trainctl.errors import ExitCode, TrainctlError
from trainctl.monitor.loggers import elsewhere
from trainctl.options.logger import python_of
from trainctl.runs.files import ensure_folder
from trainctl.runs.layout import RunPaths

ALERTS = "alerts"
"""Name of the process that sends alerts, in place of a logger's."""


def command(run: RunPaths, name: str, *options: str, config: RunConfig) -> list[str]:
    """Return the command line of the process.

    Args:
        config: The configuration, which may name another Python for this logger.
    """
    python = sys.executable if name == ALERTS else python_of(name, config)
    ours = ["-P", "-m", "trainctl.monitor.loggers"]
    start = ours if python == sys.executable else ["-P", elsewhere.__file__]
    return [python, *start, str(run.root), name, *options]


def send(run: RunPaths, name: str, *, config: RunConfig, again: bool = False) -> int:
    """Send everything that is not sent yet, in a process of its own, and return its exit code.

    Args:
        again: Whether to send everything from the beginning.

    Raises:
        TrainctlError: The run directory cannot be written (exit code 4).
    """
    paths, options = run.logger(name), ("--again",) if again else ()
    try:
        ensure_folder(paths.folder)
        with paths.log.open("ab") as log:
            argv = command(run, name, *options, config=config)
            return subprocess.run(argv, stdout=log, stderr=log).returncode
    except OSError as error:
        raise TrainctlError(
            f"{run.root} cannot be written: {error.strerror}",
            hint="how far a logger has come is kept there; copy the run to send it from elsewhere",
            exit_code=ExitCode.environment,
        ) from None
