"""Agents of an attempt as their supervisor sees them: one object that runs and ends."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from trainctl.launch.processes import Process
from trainctl.runs.failures import describe


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


@dataclass(frozen=True, slots=True)
class AgentProcess:
    """A single process: the agent of this machine, or one program (srun, mpirun) for all nodes."""

    process: Process
    log: Path
    name: str
    """Name of the process in the message about its death."""
    node: int | None = None
    """Number of its node; None if it stands for all of them."""
    margin_seconds: float = 1.0
    """Seconds beyond the grace that it may take to end its ranks and itself."""

    @property
    def returncode(self) -> int | None:
        return self.process.returncode

    def poll(self) -> int | None:
        return self.process.poll()

    def terminate(self) -> None:
        self.process.terminate()

    def describe_death(self) -> dict[str, Any]:
        assert self.process.returncode is not None
        fields = describe(self.process.returncode, self.log)
        where = f"node {self.node}, " if self.node is not None else ""
        fields["message"] = f"{self.name} ({where}process {self.process.pid}) {fields['message']}"
        return {
            "rank": None,
            "node": self.node,
            "host": socket.gethostname(),
            "pid": self.process.pid,
            **fields,
        }
