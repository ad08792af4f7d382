"""Types that all launchers share: what a launcher is given, and what it returns."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from trainctl.launch.rank_command import user_code_folder
from trainctl.plan.types import RunPlan
from trainctl.runs.command import AttemptCommand, write_command
from trainctl.runs.files import write_text
from trainctl.runs.layout import AttemptPaths, RunPaths
from trainctl.runs.records import Event
from trainctl.runs.status import State


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

    def attempt_request(self, attempt: AttemptPaths, plan: RunPlan) -> AttemptRequest:
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
            folder=user_code_folder(plan.config, self.run) if self.uses_launch_folder else None,
        )


def cores() -> int:
    """Return the number of CPU cores this process may use."""
    return len(os.sched_getaffinity(0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendered:
    """Commands to start for an attempt, and files to write for it."""

    command: AttemptCommand
    """The command of each node."""
    commands: tuple[tuple[str, ...], ...]
    """Command lines that the launcher itself runs to start the nodes, in order."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Further files of the attempt's folder: text by name."""

    @property
    def text(self) -> str:
        """The commands as a person could type them."""
        return "".join(f"{shlex.join(argv)}\n" for argv in self.commands)

    def write(self, attempt: AttemptPaths) -> None:
        """Write `command.json`, `commands.txt` and the files to the attempt's folder."""
        write_command(attempt, self.command)
        write_text(attempt.root / "commands.txt", self.text)
        for name, text in self.files.items():
            write_text(attempt.root / name, text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """End of an attempt, and exit code of its launch."""

    exit_code: int
    """Exit code of the launch; 0 only if every rank ended well."""
    state: State
    """finished, failed, stopped, or queued if a scheduler has taken it."""
    message: str = ""
    """Sentence about the end; empty when finished."""
    cause: str = ""
    """`cause` of the failure's record; empty if nothing failed."""
    hint: str = ""
    log: Path | None = None
    """The log that tells more, if there is one."""
    log_tail: tuple[str, ...] = ()
    is_transient: bool = False
    """Whether another attempt may end better."""
    is_cancelled: bool = False
    """Whether a scheduler told both the launcher and the agents to end."""


class Agents(Protocol):
    """Everything that runs an attempt, on all of its nodes."""

    @property
    def margin_seconds(self) -> float:
        """Seconds beyond the grace that the agents may take to end their ranks and themselves."""

    @property
    def returncode(self) -> int | None:
        """Exit code of the launch, as the agents report it; negative is a signal, None: it runs."""

    def poll(self) -> int | None:
        """Do what is due, and return `returncode`."""

    def terminate(self) -> None:
        """Have every node end its ranks within the grace. Also called from a signal handler."""

    def describe_death(self) -> dict[str, Any]:
        """Return fields of a `failure` record, after an error exit that no agent has recorded."""
