"""Recovery from lost nodes: the plan of the next attempt, on the nodes that are there."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from trainctl.errors import TrainctlError
from trainctl.launchers.interface import LaunchRequest
from trainctl.launchers.stop import StopHandler
from trainctl.options.launcher import section_of
from trainctl.options.launcher._elastic import ElasticConfig
from trainctl.plans.types import RunPlan
from trainctl.runs.directory import last_attempt
from trainctl.runs.records import EventWriter
from trainctl.tuning.assess import assess

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
