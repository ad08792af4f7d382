"""A launcher that outlives the terminal it was started from."""

from __future__ import annotations

import os
import subprocess
import sys

from trainctl.launch.processes import Process
from trainctl.runs.layout import AttemptPaths, RunPaths
from trainctl.runs.lock import name_holder
from trainctl.runs.processes import PARENT_VARIABLE


def start_in_background(
    run: RunPaths, attempt: AttemptPaths, lock: int, *, is_tied: bool = False
) -> Process:
    """Start the attempt's launcher in a session of its own; its output goes to `launcher.log`.

    It inherits the run's lock, so no other process can take the run when this process ends.

    Args:
        attempt: The attempt, made already.
        lock: Descriptor of the run's lock.
        is_tied: Whether the launcher gets SIGTERM when this process ends.
    """
    environment = {k: v for k, v in os.environ.items() if k != PARENT_VARIABLE}
    if is_tied:
        environment[PARENT_VARIABLE] = str(os.getpid())
    command = [sys.executable, "-P", "-m", "trainctl.launch", str(run.root)]
    command += ["--attempt", str(attempt.number), "--lock", str(lock)]
    with attempt.launcher_log.open("ab") as log:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            pass_fds=(lock,),
        )
    name_holder(lock, process.pid)
    return process
