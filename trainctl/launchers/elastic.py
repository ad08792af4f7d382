"""Recovery from lost nodes: plan and hosts of the next attempt, on the nodes that answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from trainctl.config.hosts import Host
from trainctl.errors import TrainctlError
from trainctl.launchers.host_checks import HostCheckResult, HostGroup, check_hosts
from trainctl.launchers.interface import LaunchRequest
from trainctl.launchers.rank_command import user_code_folder
from trainctl.launchers.stop import StopHandler
from trainctl.options.launcher import section_of
from trainctl.options.launcher.ssh import SshConfig
from trainctl.plans.types import RunPlan
from trainctl.tuning.assess import assess

POLL_SECONDS = 2.0
"""Pause between two probes for missing nodes."""


class ElasticPlanner:
    """Finds hosts for the next attempt: all nodes if they answer, fewer if that is allowed.

    `group` has the hosts that the next attempt runs on.

    Args:
        group: The hosts as they answered before the start.
        on_wait: Called with the number of hosts that answer and the names of the missing ones, when
            waiting begins and when they change.
    """

    def __init__(
        self,
        launch: LaunchRequest,
        hosts: tuple[Host, ...],
        group: HostGroup,
        on_wait: Callable[[int, list[str]], None],
    ) -> None:
        self.group = group
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
        reported: list[str] | None = None
        while True:
            checked = self._look(self._whole, self._hosts)
            if checked.group is not None:
                self.group = checked.group
                return self._whole
            smaller = self._on_fewer(checked.answering)
            if smaller is not None:
                return smaller
            missing = [host.name for host in self._hosts if host not in checked.answering]
            if missing != reported:
                reported = missing
                self._on_wait(len(checked.answering), missing)
            if stop.is_stopping or time.monotonic() > deadline:
                raise TrainctlError(_why_not(checked, missing, len(self._hosts)))
            time.sleep(POLL_SECONDS)

    def _on_fewer(self, there: Sequence[Host]) -> RunPlan | None:
        """Return a plan on the most hosts where it is legal and fits; None if there is none."""
        least = section_of(self._whole.config, SshConfig).min_nodes
        if least is None:
            return None
        for nodes in range(min(len(there), self._whole.hardware.nodes - 1), least - 1, -1):
            smaller = shrink_plan(self._whole, there[:nodes])
            if smaller is None:
                continue
            checked = self._look(smaller, there[:nodes])
            if checked.group is not None:
                self.group = checked.group
                return smaller
        return None

    def _look(self, plan: RunPlan, hosts: Sequence[Host]) -> HostCheckResult:
        launch = self._launch
        code_folder = user_code_folder(plan.config, launch.run)
        return check_hosts(plan, hosts, launch.run.root, launch.checkpoint_bytes, code_folder)


def _why_not(checked: HostCheckResult, missing: Sequence[str], nodes: int) -> str:
    if missing:
        return f"{len(checked.answering)} of {nodes} nodes are there, {', '.join(missing)} not"
    reasons = [finding.message for finding in checked.findings if finding.is_error]
    return f"the nodes are not fit for another attempt: {'; '.join(reasons)}"


def shrink_plan(plan: RunPlan, hosts: Sequence[Host]) -> RunPlan | None:
    """Return the plan on fewer nodes; None if it is not legal there, or may not fit.

    The global batch stays, and with it the schedule and the order of samples: more gradient
    accumulation, or a smaller micro-batch, makes up for the ranks that are gone.
    """
    config, batch, nodes = plan.config, plan.batch, len(hosts)
    launcher = section_of(config, SshConfig)
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
                launcher=replace(
                    launcher,
                    hosts=[host.name for host in hosts],
                    hostfile=None,
                    include=None,
                    exclude=None,
                    min_nodes=min(launcher.min_nodes or nodes, nodes),
                ),
            ),
            hardware,
        )
        if found.plan is not None and not any(finding.is_error for finding in found.findings):
            return found.plan
    return None


def _sizes(micro: int) -> list[int]:
    """Return the micro-batch sizes to try: the planned one, then its divisors, largest first."""
    return [size for size in range(micro, 0, -1) if micro % size == 0]
