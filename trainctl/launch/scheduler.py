"""Commands of a scheduler: run to their end, and jobs submitted with the states of their runs."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Callable, Sequence

from trainctl.errors import ExitCode, TrainctlError
from trainctl.runs.layout import AttemptPaths, RunPaths
from trainctl.runs.status import SchedulerJob, State, Status, change_status, write_job, write_status

_SECONDS = 60


def submit(
    command: Sequence[str],
    attempts: Sequence[tuple[RunPaths, AttemptPaths]],
    *,
    kind: str,
    job_id: Callable[[RunPaths, str], str],
) -> str:
    """Run the command that submits the attempts, and record their jobs; return its output.

    Args:
        attempts: Runs and their attempts, all in one job or in one array.
        kind: Launcher of the job.
        job_id: Returns a run's job id from the command's output.

    Raises:
        TrainctlError: The scheduler refuses it (exit code 4); the runs have then failed.
    """
    now = time.time()
    for run, attempt in attempts:  # before the job exists: its own launcher writes the next state
        write_status(run, Status.begin(State.queued, attempt.number))
    try:
        output = run_tool(command)
    except TrainctlError as error:
        for run, _ in attempts:
            change_status(run, State.failed, int(error.exit_code), error.message)
        raise
    for run, attempt in attempts:
        host = socket.gethostname()
        job = SchedulerJob(kind=kind, id=job_id(run, output), submitted=now, host=host)
        write_job(attempt, job)
    return output


def run_tool(command: Sequence[str]) -> str:
    """Run a scheduler's command to its end, and return its output.

    Raises:
        TrainctlError: It is not installed, fails, or does not answer within a minute (exit code 4).
    """
    try:
        done = subprocess.run(command, input="", capture_output=True, text=True, timeout=_SECONDS)
    except FileNotFoundError:
        raise TrainctlError(
            f"{command[0]} is not installed on this machine",
            hint=f"repeat this where {command[0]} is",
            exit_code=ExitCode.environment,
        ) from None
    except subprocess.TimeoutExpired:
        raise TrainctlError(
            f"{command[0]} does not answer", exit_code=ExitCode.environment
        ) from None
    if done.returncode:
        output = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise TrainctlError(
            f"{command[0]} failed: {output[-1] if output else f'exit code {done.returncode}'}",
            exit_code=ExitCode.environment,
        )
    return done.stdout
