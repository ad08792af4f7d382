"""Dispatch to the launcher that a configuration chooses; only the functions called are imported."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from trainctl.config.registry import function_of
from trainctl.config.schema import RunConfig
from trainctl.errors import Finding
from trainctl.launch.launch_request import AttemptRequest, LaunchRequest
from trainctl.launch.outcome import Outcome
from trainctl.launch.rendered import Rendered
from trainctl.options.launcher import spec_of
from trainctl.plan.types import RunPlan
from trainctl.runs.layout import RunPaths


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


def run_launch(launch: LaunchRequest) -> Outcome:
    """Run the launch to its end, or hand it to a scheduler; see `launch.local.run_launch`."""
    outcome: Outcome = _entry(launch.plan, "build")(launch)
    return outcome


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
