"""What a launcher is asked for: a launch, and the start of each of its attempts."""

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
class Start:
    """What an attempt is started from; all that rendering reads."""

    plan: RunPlan
    run: RunPaths
    attempt: AttemptPaths
    environment: Mapping[str, str]
    """That of the user's shell, or of a scheduler's job; of it `launcher.forward_environment` is
    taken."""
    cores: int
    """Processors of this machine, taken for those of a host that is not known better."""
    rank_command: Sequence[str] | None = None
    """Another command line for the ranks, which then needs no corpus prepared."""
    folder: Path | None = None
    """Where agents and ranks run; None is where they are started."""

    @property
    def ranks_per_node(self) -> int:
        return self.plan.mesh.world_size // self.plan.hardware.nodes

    @property
    def threads(self) -> int:
        """Of a rank: an equal share of the processors."""
        return max(1, self.cores // self.ranks_per_node)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """An attempt, and those that replace it when it fails."""

    run: RunPaths
    """The run; its lock is taken unless this process holds it."""
    attempt: AttemptPaths
    """The first attempt, as `new_attempt` made it."""
    plan: RunPlan
    on_event: Callable[[Event], None]
    """Called with each record of this launch soon after it is written."""
    rank_command: Sequence[str] | None = None
    """Another command line for the ranks, which then needs no corpus prepared."""
    checkpoint_bytes: int | None = None
    """Size of a checkpoint, if known: that much space must be free."""
    in_users_folder: bool = True
    """Whether code of the user's runs in the folder of the first launch; in a container it runs
    where that starts."""

    def start(self, attempt: AttemptPaths, plan: RunPlan) -> Start:
        """Return the start of one of its attempts, by this process.

        Raises:
            TrainctlError: The folder that the run was launched from is gone (exit code 4).
        """
        return Start(
            plan=plan,
            run=self.run,
            attempt=attempt,
            environment=os.environ,
            cores=cores(),
            rank_command=self.rank_command,
            folder=program.folder(plan.config, self.run) if self.in_users_folder else None,
        )


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0))
