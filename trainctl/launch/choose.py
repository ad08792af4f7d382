"""Which launcher starts a run."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

from trainctl.config.schema import LauncherKind, RunConfig
from trainctl.errors import Finding
from trainctl.launch.order import Launch, Start
from trainctl.launch.outcome import Outcome
from trainctl.launch.rendered import Rendered
from trainctl.plan.types import RunPlan


class Launcher(Protocol):
    """What each launcher's module offers; `trainctl.launch.local` says more of each."""

    def check(self, plan: RunPlan, folder: Path, checkpoint_bytes: int | None) -> list[Finding]:
        """What is wrong with the machines, before a run is made in or below the folder."""

    def render(self, start: Start) -> Rendered:
        """What would be started. Pure."""

    def run_launch(self, launch: Launch) -> Outcome:
        """Start it and see it to its end."""


def launcher(config: RunConfig) -> Launcher:
    """The launcher that a configuration asks for: the module of its name. Only that is loaded."""
    return cast(Launcher, import_module(f"trainctl.launch.{config.launcher.kind.value}"))


def has_scheduler(config: RunConfig) -> bool:
    """Whether a start only hands the run to a scheduler, and returns."""
    kind = config.launcher.kind
    in_job = kind is LauncherKind.slurm and "SLURM_JOB_ID" in os.environ
    return kind in (LauncherKind.slurm, LauncherKind.kubernetes) and not in_job
