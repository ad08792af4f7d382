"""Recovery from lost nodes: plan and hosts of the next attempt, on the nodes that answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from trainctl.config.hosts import Host
from trainctl.errors import TrainctlError
from trainctl.launch import program
from trainctl.launch.host_selection import HostCheckResult, HostGroup, check_hosts
from trainctl.launch.launch_request import LaunchRequest
from trainctl.launch.shrink import shrink
from trainctl.launch.stop import StopHandler
from trainctl.options.launcher import section_of
from trainctl.options.launcher.ssh import SshConfig
from trainctl.plan.types import RunPlan

LOOK_SECONDS = 2.0
"""Pause between two looks for missing nodes."""


class ElasticPlanner:
    """Finds hosts for the next attempt: all nodes if they answer, fewer if that is allowed.

    `site` has the hosts that the next attempt runs on.

    Args:
        launch: The launch, with the plan for all nodes.
        hosts: All hosts.
        site: The hosts as they answered before the start.
        on_wait: Called with the number of hosts that answer and the names of the missing ones, when
            waiting begins and when they change.
    """

    def __init__(
        self,
        launch: LaunchRequest,
        hosts: tuple[Host, ...],
        site: HostGroup,
        on_wait: Callable[[int, list[str]], None],
    ) -> None:
        self.site = site
        self._launch = launch
        self._whole = launch.plan
        self._hosts = hosts
        self._on_wait = on_wait

    def replan(self, _: RunPlan, stop: StopHandler) -> RunPlan:
        """Return the next attempt's plan, once enough nodes answer.

        Raises:
            TrainctlError: Too few nodes came back in `launcher.node_wait_seconds`, or the launch
                was asked to end.
        """
        deadline = time.monotonic() + section_of(self._whole.config, SshConfig).node_wait_seconds
        told: list[str] | None = None
        while True:
            seen = self._look(self._whole, self._hosts)
            if seen.site is not None:
                self.site = seen.site
                return self._whole
            smaller = self._on_fewer(seen.there)
            if smaller is not None:
                return smaller
            missing = [host.name for host in self._hosts if host not in seen.there]
            if missing != told:
                told = missing
                self._on_wait(len(seen.there), missing)
            if stop.is_stopping or time.monotonic() > deadline:
                raise TrainctlError(_in_vain(seen, missing, len(self._hosts)))
            time.sleep(LOOK_SECONDS)

    def _on_fewer(self, there: Sequence[Host]) -> RunPlan | None:
        """Return a plan on the most hosts where it is legal and fits; None if there is none."""
        least = section_of(self._whole.config, SshConfig).min_nodes
        if least is None:
            return None
        for nodes in range(min(len(there), self._whole.hardware.nodes - 1), least - 1, -1):
            smaller = shrink(self._whole, there[:nodes])
            if smaller is None:
                continue
            seen = self._look(smaller, there[:nodes])
            if seen.site is not None:
                self.site = seen.site
                return smaller
        return None

    def _look(self, plan: RunPlan, hosts: Sequence[Host]) -> HostCheckResult:
        launch = self._launch
        code_folder = program.folder(plan.config, launch.run)
        return check_hosts(plan, hosts, launch.run.root, launch.checkpoint_bytes, code_folder)


def _in_vain(seen: HostCheckResult, missing: Sequence[str], nodes: int) -> str:
    if missing:
        return f"{len(seen.there)} of {nodes} nodes are there, {', '.join(missing)} not"
    reasons = [finding.message for finding in seen.findings if finding.is_error]
    return f"the nodes are not fit for another attempt: {'; '.join(reasons)}"
