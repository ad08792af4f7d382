"""The agents of an attempt, as whoever supervises it sees them: one thing that runs and ends."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from trainctl.launch.processes import Process
from trainctl.runs.failures import describe


class Agents(Protocol):
    """What runs an attempt on all of its nodes."""

    @property
    def margin_seconds(self) -> float:
        """What they may take beyond the grace to end their ranks and themselves."""

    @property
    def returncode(self) -> int | None:
        """Exit code of the launch by the agents' account; negative is a signal, None: it runs."""

    def poll(self) -> int | None:
        """Look whether it still runs, and see to what is due; then as `returncode`."""

    def terminate(self) -> None:
        """Have every node end its ranks within the grace. Called from a signal's handler too."""

    def describe_death(self) -> dict[str, Any]:
        """Fields of a `failure` record, after an end with an error that no agent has recorded."""


@dataclass(frozen=True, slots=True)
class OneProcess:
    """A single process: the agent of this machine, or one program that stands for all nodes."""

    process: Process
    log: Path
    name: str
    """As it is named when it died."""
    node: int | None = None
    """Its node; None if it stands for all of them."""
    margin_seconds: float = 1.0
    """What it may take beyond the grace to end its ranks and itself."""

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
