"""Agents on other machines: one exit code for all, records of lost nodes, and the next attempt.

It is planned on the nodes that are there.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from trainctl.config.schema import LauncherConfig
from trainctl.errors import ExitCode, TrainctlError
from trainctl.launchers.interface import AttemptRequest, LaunchRequest
from trainctl.launchers.stop import StopHandler
from trainctl.options.launcher import section_of
from trainctl.options.launcher._elastic import ElasticConfig
from trainctl.plans.types import RunPlan
from trainctl.runs.directory import last_attempt
from trainctl.runs.failures import Cause, log_tail
from trainctl.runs.records import EventWriter
from trainctl.tuning.assess import assess

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


POLL_SECONDS = 2.0
"""Pause between two looks for missing nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Availability:
    """Answer of a pool of nodes to the nodes that a plan needs."""

    is_ready: bool
    """Whether the next attempt can start on them."""
    there: int
    """Number of usable nodes."""
    missing: Sequence[str] = ()
    """Names of the nodes that do not answer."""
    problems: Sequence[str] = ()
    """Other reasons against a start."""


class NodePool(Protocol):
    """Nodes of a launch."""

    def look(self, plan: RunPlan) -> Availability:
        """Look for as many nodes as the plan has."""

    def section(self, nodes: int) -> ElasticConfig:
        """Return the launcher's section of a plan on fewer nodes."""


class ElasticPlanner:
    """Plans the next attempt: on all nodes if they are there, on fewer if that is allowed."""

    def __init__(self, launch: LaunchRequest, pool: NodePool) -> None:
        self._launch = launch
        self._whole = launch.plan
        self._pool = pool
        self._launcher = section_of(launch.plan.config, ElasticConfig)

    def replan(self, _: RunPlan, stop: StopHandler) -> RunPlan:
        """Return the next attempt's plan, once enough nodes are there.

        Raises:
            TrainctlError: Too few nodes came back in `launcher.node_wait_seconds`, or the launch
                was asked to end.
        """
        deadline = time.monotonic() + self._launcher.node_wait_seconds
        reported: Sequence[str] | None = None
        while True:
            found = self._pool.look(self._whole)
            if found.is_ready:
                return self._whole
            smaller = self._on_fewer(found.there)
            if smaller is not None:
                return smaller
            if found.missing != reported:
                reported = found.missing
                record_waiting(self._launch, found)
            if stop.is_stopping or time.monotonic() > deadline:
                raise TrainctlError(why_not(found, self._whole.hardware.nodes))
            time.sleep(POLL_SECONDS)

    def _on_fewer(self, there: int) -> RunPlan | None:
        """Return a plan on the most nodes where it is legal and fits; None if there is none."""
        least = self._launcher.min_nodes
        if least is None:
            return None
        for nodes in range(min(there, self._whole.hardware.nodes - 1), least - 1, -1):
            smaller = shrink_plan(self._whole, nodes, self._pool.section(nodes))
            if smaller is not None and self._pool.look(smaller).is_ready:
                return smaller
        return None


def record_waiting(launch: LaunchRequest, found: Availability) -> None:
    """Record that a launch waits for nodes."""
    fields = {"there": found.there, "of": launch.plan.hardware.nodes}
    with EventWriter(launch.run.events, last_attempt(launch.run)) as events:
        launch.on_event(events.write("waiting", **fields, missing=list(found.missing)))


def why_not(found: Availability, nodes: int) -> str:
    """Return a sentence about why a launch waited for its nodes in vain."""
    if found.missing:
        return f"{found.there} of {nodes} nodes are there, {', '.join(found.missing)} not"
    return f"the nodes are not fit for another attempt: {'; '.join(found.problems)}"


def shrink_plan(plan: RunPlan, nodes: int, launcher: ElasticConfig) -> RunPlan | None:
    """Return the plan on fewer nodes; None if it is not legal there, or may not fit.

    The global batch stays, and with it the schedule and the order of samples: more gradient
    accumulation, or a smaller micro-batch, makes up for the ranks that are gone.
    """
    config, batch = plan.config, plan.batch
    hardware = replace(
        plan.hardware,
        nodes=nodes,
        name=plan.hardware.name.replace(f"{plan.hardware.nodes}x", f"{nodes}x", 1),
    )
    for micro in _sizes(batch.micro_batch_size):
        found = assess(
            replace(
                config,
                hardware=replace(config.hardware, nodes=nodes),
                # Keep what was decided for all nodes, such as the steps of a token budget.
                training=replace(
                    config.training,
                    global_batch_size=batch.global_batch_size,
                    micro_batch_size=micro,
                    gradient_accumulation_steps=None,
                ),
                parallelism=replace(config.parallelism, data=None),
                launcher=replace(launcher, min_nodes=min(launcher.min_nodes or nodes, nodes)),
            ),
            hardware,
        )
        if found.plan is not None and not any(finding.is_error for finding in found.findings):
            return found.plan
    return None


def _sizes(micro: int) -> list[int]:
    """Return the micro-batch sizes to try: the planned one, then its divisors, largest first."""
    return [size for size in range(micro, 0, -1) if micro % size == 0]
