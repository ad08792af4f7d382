"""Dispatch to the functions of the configured launcher, imported when they are called."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from trainctl.config.registry import function_of
from trainctl.config.schema import RunConfig
from trainctl.errors import ExitCode, Finding
from trainctl.launch.interface import AttemptRequest, LaunchRequest, Outcome, Rendered
from trainctl.options.launcher import spec_of
from trainctl.plan.types import RunPlan
from trainctl.runs.layout import RunPaths
from trainctl.runs.status import SchedulerJob


def launch_function(plan: RunPlan) -> Callable[[LaunchRequest], Outcome]:
    """Return the function that runs a launch of the plan to its end, or gives it to a scheduler.

    See `trainctl.launch.local.run_launch`.
    """
    function: Callable[[LaunchRequest], Outcome] = _entry(plan, "build")
    return function


def check(plan: RunPlan, folder: Path, checkpoint_bytes: int | None) -> list[Finding]:
    """Return what is wrong with the machines, before a run is made in or below the folder."""
    if not spec_of(plan.config.launcher).check:
        return []
    found: list[Finding] = _entry(plan, "check")(plan, folder, checkpoint_bytes)
    return found


def render(start: AttemptRequest) -> Rendered:
    """Render what would be started for an attempt. Pure."""
    rendered: Rendered = _entry(start.plan, "render")(start)
    return rendered


def after_job(run: RunPaths, plan: RunPlan, exit_code: int) -> None:
    """Run the launcher's step after a launch inside a job of its scheduler, if it has one."""
    spec = spec_of(plan.config.launcher)
    if spec.after_job and spec.is_in_job(os.environ):
        _entry(plan, "after_job")(run, plan, exit_code)


def has_scheduler(config: RunConfig) -> bool:
    """Return True if a start only hands the run to a scheduler."""
    return spec_of(config.launcher).hands_over(os.environ)


def _entry(plan: RunPlan, name: str) -> Any:
    return function_of("launcher", plan.config.launcher.kind, name)


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
