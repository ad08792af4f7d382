"""Requests to a launcher: a launch, and the start of each of its attempts."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainctl.launch import program
from trainctl.plan.types import RunPlan
from trainctl.runs.layout import AttemptPaths, RunPaths
from trainctl.runs.records import Event


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRequest:
    """Everything that an attempt is started from, and all that rendering reads."""

    plan: RunPlan
    run: RunPaths
    attempt: AttemptPaths
    environment: Mapping[str, str]
    """The shell's or job's environment, from which `launcher.forward_environment` selects."""
    cores: int
    """CPU cores of this machine, used for hosts whose number of cores is unknown."""
    rank_command: Sequence[str] | None = None
    """Command that replaces the ranks' own; no corpus is prepared for it."""
    folder: Path | None = None
    """Working directory of agents and ranks; None keeps the directory that they are started in."""

    @property
    def ranks_per_node(self) -> int:
        return self.plan.mesh.world_size // self.plan.hardware.nodes

    @property
    def threads(self) -> int:
        """OpenMP threads of a rank: an equal share of the node's cores."""
        return max(1, self.cores // self.ranks_per_node)


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchRequest:
    """An attempt, and those that replace it when it fails."""

    run: RunPaths
    """The run; its lock is taken unless this process holds it."""
    attempt: AttemptPaths
    """The first attempt, as `new_attempt` made it."""
    plan: RunPlan
    on_event: Callable[[Event], None]
    """Called with each record of this launch soon after it is written."""
    rank_command: Sequence[str] | None = None
    """Command that replaces the ranks' own; no corpus is prepared for it."""
    checkpoint_bytes: int | None = None
    """Size of a checkpoint, if known: that much disk space must be free."""
    uses_launch_folder: bool = True
    """Whether the user's code runs in the folder of the first launch; in a container it runs in the
    container's working directory.
    """

    def start(self, attempt: AttemptPaths, plan: RunPlan) -> AttemptRequest:
        """Return the request to start one of its attempts from this process.

        Raises:
            TrainctlError: The folder that the run was launched from is gone (exit code 4).
        """
        return AttemptRequest(
            plan=plan,
            run=self.run,
            attempt=attempt,
            environment=os.environ,
            cores=cores(),
            rank_command=self.rank_command,
            folder=program.folder(plan.config, self.run) if self.uses_launch_folder else None,
        )


def cores() -> int:
    """Return the number of CPU cores this process may use."""
    return len(os.sched_getaffinity(0))
