"""Questions to a scheduler about a job, from any machine that has the scheduler's commands."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence

from trainctl.config.registry import function_of
from trainctl.config.schema import RunConfig
from trainctl.errors import ExitCode, Finding, TrainctlError
from trainctl.options.launcher import spec_of
from trainctl.runs.job import SchedulerJob

_SECONDS = 60


def cancel(job: SchedulerJob) -> None:
    """Remove a job from its queue, or end it; a job that the scheduler does not know has ended.

    Raises:
        TrainctlError: The scheduler's command is missing or fails (exit code 4).
    """
    function_of("launcher", job.kind, "cancel")(job)


def missing_tool(config: RunConfig) -> Iterator[Finding]:
    """Yield a finding if the program that hands the run over is not installed on this machine."""
    spec = spec_of(config.launcher)
    tool = spec.tool_in_job if spec.is_in_job(os.environ) else spec.tool
    if tool and shutil.which(tool) is None:
        yield Finding(
            rule="TC197",
            key="launcher.kind",
            message=f"{tool} is not installed on this machine",
            hint=f"repeat this where {tool} is",
            exit_code=ExitCode.environment,
        )


def run_tool(command: Sequence[str], *, text: str | None = None) -> str:
    """Run a scheduler's command to its end, and return its output.

    Args:
        text: Its standard input.

    Raises:
        TrainctlError: It is not installed, fails, or does not answer within a minute (exit code 4).
    """
    try:
        done = subprocess.run(
            command, input=text or "", capture_output=True, text=True, timeout=_SECONDS
        )
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
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        raise TrainctlError(
            f"{command[0]} failed: {said[-1] if said else f'exit code {done.returncode}'}",
            exit_code=ExitCode.environment,
        )
    return done.stdout
