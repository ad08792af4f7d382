"""Agents on other machines: one exit code for all, and records of the nodes that are lost."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import Any

from trainctl.config.schema import LauncherConfig
from trainctl.errors import ExitCode
from trainctl.launchers.interface import AttemptRequest
from trainctl.runs.failures import Cause, log_tail
from trainctl.runs.records import EventWriter

LOST = 255
"""Exit code of an agent whose connection ended (`ssh`'s own), instead of the agent."""

_SETTLE_SECONDS = 1.0
"""Time for the other agents to report a failure, after the first agent failed."""
_END_SECONDS = 5.0
"""Time beyond the grace for an agent to end, network latency included."""


class NodeAgents(ABC):
    """Agents of all nodes, watched from this machine. Subclasses know how to reach them.

    After a first failure all others are ended. `hosts` has the nodes' host names.
    """

    def __init__(self, request: AttemptRequest, hosts: Sequence[str]) -> None:
        self.hosts = hosts
        self._run, self._attempt = request.run, request.attempt
        self._launcher: LauncherConfig = request.plan.config.launcher
        self._first_code: int | None = None
        self._failed_at: float | None = None
        self._terminated_at: float | None = None
        self._lost_nodes: list[int] = []
        self._code: int | None = None

    @abstractmethod
    def _codes(self) -> list[int | None]:
        """Return each agent's exit code; None if it runs, negative or `LOST` if it is lost."""

    @abstractmethod
    def _order_end(self) -> None:
        """Tell every agent to end its ranks within the grace."""

    @abstractmethod
    def _kill(self) -> None:
        """End what has not followed the order."""

    @abstractmethod
    def _clean_nodes(self, nodes: Sequence[int]) -> Collection[int]:
        """End what agents left on nodes; return those that could be reached."""

    @property
    def margin_seconds(self) -> float:
        return self._launcher.grace_seconds + _SETTLE_SECONDS + 2 * _END_SECONDS

    @property
    def returncode(self) -> int | None:
        return self._code

    def poll(self) -> int | None:
        """End all agents after a first failure. Return the exit code once all have ended."""
        if self._code is not None:
            return self._code
        codes = self._codes()
        now = time.monotonic()
        for node, code in enumerate(codes):
            if code not in (None, 0) and self._failed_at is None:
                self._failed_at, self._first_code = now, code
            if _is_lost(code) and node not in self._lost_nodes and self._terminated_at is None:
                self._lost_nodes.append(node)
        if None in codes:
            if self._failed_at is not None and now > self._failed_at + _SETTLE_SECONDS:
                self.terminate()
            longest = self._launcher.grace_seconds + _END_SECONDS
            if self._terminated_at is not None and now > self._terminated_at + longest:
                self._kill()
            return None
        self._code = self._clean_up([node for node, code in enumerate(codes) if _is_lost(code)])
        return self._code

    def terminate(self) -> None:
        """Tell every agent to end its ranks."""
        if self._terminated_at is None:
            self._terminated_at = time.monotonic()
            self._order_end()

    def describe_death(self) -> dict[str, Any]:
        """Return the record of an agent's own error exit; lost nodes are recorded already."""
        message = f"an agent ended with exit code {self._code} and recorded nothing"
        return self._failure(None, message, Cause.code)

    def _failure(self, node: int | None, message: str, cause: Cause) -> dict[str, Any]:
        """Return fields of a `failure` record about the agent of a node; None is any node."""
        log = self._attempt.agent_log(node or 0)
        return {
            "rank": None,
            "node": node,
            "host": "" if node is None else self.hosts[node],
            "pid": None,
            "cause": cause.value,
            "exit_code": None,
            "signal": None,
            "message": message,
            "hint": cause.hint,
            "log": str(log),
            "log_tail": log_tail(log),
        }

    def _clean_up(self, dirty: Sequence[int]) -> int:
        """Clean up nodes whose agent did not, and record lost nodes; return the exit code."""
        reached = self._clean_nodes(dirty)
        code = self._first_code or 0
        for node in self._lost_nodes:
            host = self.hosts[node]
            if node in reached:
                what, cause, code_of_loss = "the agent on it was killed", Cause.killed, 137
            else:
                tail = log_tail(self._attempt.agent_log(node))
                reason = tail[-1].strip() if tail else "its connection ended"
                what, cause, code_of_loss = (
                    f"was lost: {reason}",
                    Cause.lost_node,
                    ExitCode.training_failed,
                )
            if node == self._lost_nodes[0] and _is_lost(code):
                code = int(code_of_loss)
            with EventWriter(self._run.events, self._attempt.number) as events:
                events.write(
                    "failure",
                    **self._failure(node, f"node {node} ({host}): {what}", cause),
                    launch_exit_code=int(code_of_loss),
                )
        return code


def _is_lost(code: int | None) -> bool:
    """Return True if an agent, or its connection, was killed instead of ending."""
    return code is not None and (code == LOST or code < 0)
