"""The ssh launcher: an agent on each host, started and watched from this machine."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

from trainctl.errors import Finding, TrainctlError
from trainctl.hardware.packages import loggers_are_installed
from trainctl.launch.attempts import PreparedAttempt, run_attempts
from trainctl.launch.elastic import ElasticPlanner
from trainctl.launch.host_checks import HostGroup, check_hosts, planned_hosts, unprobed_hosts
from trainctl.launch.interface import AttemptRequest, LaunchRequest, Outcome, Rendered
from trainctl.launch.processes import ssh
from trainctl.launch.rank_command import (
    attempt_command,
    not_forwarded,
    rank_variables,
    user_code_folder,
)
from trainctl.launch.ssh_agents import SshAgents, terminate_on_hosts
from trainctl.options.launcher import section_of
from trainctl.options.launcher.ssh import SshConfig
from trainctl.plan.types import RunPlan
from trainctl.runs.directory import last_attempt, run_id
from trainctl.runs.layout import RunPaths
from trainctl.runs.lock import hold
from trainctl.runs.processes import RunTag, terminate_processes
from trainctl.runs.records import EventWriter


def check(plan: RunPlan, folder: Path, checkpoint_bytes: int | None) -> list[Finding]:
    """Return the hosts' problems. All are probed at once, within `launcher.preflight_seconds`.

    Raises:
        TrainctlError: The hostfile is missing or wrong, or there are too few hosts (exit code 2).
    """
    run = RunPaths(folder)
    code_folder = user_code_folder(plan.config, run) if run.record.is_file() else None
    findings = check_hosts(
        plan, planned_hosts(plan), folder, checkpoint_bytes, code_folder
    ).findings
    here = [
        found
        for found in loggers_are_installed(plan.config, plan.hardware)
        if isinstance(found, Finding)
    ]
    return [*here, *findings, *not_forwarded(plan, os.environ)]


def render(request: AttemptRequest, *, group: HostGroup | None = None) -> Rendered:
    """Render an attempt's commands: an ssh for each host. Pure, except that it reads the hostfile.

    Args:
        group: The hosts with their answers; None renders what is known without probing.
    """
    launcher = section_of(request.plan.config, SshConfig)
    group = group or unprobed_hosts(request.plan)
    command = attempt_command(
        request,
        [host.name for host in group.hosts],
        [_environment(request, group, node) for node in range(len(group.hosts))],
        python=launcher.python or sys.executable,
        address=group.address,
        port=group.port,
    )
    commands = tuple(ssh(host, launcher, "trainctl.runs.node_entry") for host in group.hosts)
    return Rendered(command=command, commands=commands)


def run_launch(launch: LaunchRequest) -> Outcome:
    """Run an attempt on the hosts, and those that replace it, to the end.

    Signals are handled as in `trainctl.launch.local.run_launch`. After losing a node it restarts on
    the nodes that are left, or waits for the lost one: see `launcher.min_nodes`.

    Raises:
        TrainctlError: The run is in use (5), the hostfile is wrong (2), or the hosts are not what
            the plan needs (4).
    """
    run, plan = launch.run, launch.plan
    launcher = section_of(plan.config, SshConfig)
    hosts, folder = planned_hosts(plan), user_code_folder(plan.config, run)
    probed = check_hosts(plan, hosts, run.root, launch.checkpoint_bytes, folder)
    if probed.group is None:
        raise TrainctlError.from_findings(probed.findings)

    def on_wait(there: int, missing: list[str]) -> None:
        with EventWriter(run.events, last_attempt(run)) as events:
            launch.on_event(events.write("waiting", there=there, of=len(hosts), missing=missing))

    planner = ElasticPlanner(launch, hosts, probed.group, on_wait)
    with hold(run):
        everything = RunTag(run_id(run), run.root)
        terminate_processes(everything, grace_seconds=0)
        if launch.attempt.number > 1:  # agents of a lost launcher may still run
            terminate_on_hosts(hosts, launcher, everything)

        def start(prepared: PreparedAttempt) -> SshAgents:
            request, nodes = prepared.request, prepared.rendered.command.nodes
            agents = SshAgents(run, request.attempt, prepared.tag, planner.group.hosts, launcher)
            agents.start(nodes, request.folder or Path.cwd())
            return agents

        return run_attempts(
            launch,
            render=lambda request: render(request, group=planner.group),
            start=start,
            replan=planner.replan,
        )


def _environment(request: AttemptRequest, group: HostGroup, node: int) -> dict[str, str]:
    """Return the variables of a node's agent and ranks."""
    host, interface = group.hosts[node], group.interfaces[node]
    launcher = section_of(request.plan.config, SshConfig)
    network: dict[str, str] = {}
    if interface is not None:
        network["GLOO_SOCKET_IFNAME"] = interface
        if launcher.interfaces.get(host.name, launcher.interface) is not None:
            # Without a setting, NCCL's own choice is better: it knows InfiniBand.
            network["NCCL_SOCKET_IFNAME"] = interface
    cores = group.cores[node] or request.cores
    variables = rank_variables(replace(request, cores=cores), network)
    if host.devices is not None:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(str(number) for number in host.devices)
    return variables
