"""Plan of a run for the nodes that are left: another layout of the same training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from trainctl.config.hosts import Host
from trainctl.options.launcher import section_of
from trainctl.options.launcher.ssh import SshConfig
from trainctl.plan.types import RunPlan
from trainctl.search.assess import assess


def shrink(plan: RunPlan, hosts: Sequence[Host]) -> RunPlan | None:
    """Return the plan on fewer nodes; None if it is not legal there, or may not fit.

    The global batch stays, and with it the schedule and the order of samples: more gradient
    accumulation, or a smaller micro-batch, makes up for the ranks that are gone.

    Args:
        plan: The plan for all nodes.
        hosts: The hosts that are left.
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
