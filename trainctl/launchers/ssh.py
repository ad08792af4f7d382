"""The ssh launcher: an agent on each host, started and watched from this machine."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from trainctl.config.hosts import Host
from trainctl.errors import Finding, TrainctlError
from trainctl.hardware.packages import check_loggers
from trainctl.launchers.attempts import PreparedAttempt, run_attempts
from trainctl.launchers.host_checks import HostGroup, check_hosts, planned_hosts, unprobed_hosts
from trainctl.launchers.interface import AttemptRequest, LaunchRequest, Outcome, RenderedLaunch
from trainctl.launchers.node_agents import Availability, ElasticPlanner, NodeAgents
from trainctl.launchers.processes import Process, ssh_command, start_with_pdeathsig
from trainctl.launchers.rank_command import (
    attempt_command,
    rank_variables,
    unforwarded_variable_findings,
    user_code_folder,
)
from trainctl.options.launcher import section_of
from trainctl.options.launcher.ssh import SshConfig
from trainctl.plans.types import RunPlan
from trainctl.runs.command import NodeCommand
from trainctl.runs.directory import run_id
from trainctl.runs.layout import RunPaths
from trainctl.runs.lock import hold_lock
from trainctl.runs.processes import (
    LEASE_BEAT,
    LEASE_END,
    LEASE_VARIABLE,
    RunTag,
    encode_command,
    terminate_processes,
)


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
        found for found in check_loggers(plan.config, plan.hardware) if isinstance(found, Finding)
    ]
    return [*here, *findings, *unforwarded_variable_findings(plan, os.environ)]


def render(request: AttemptRequest, *, group: HostGroup | None = None) -> RenderedLaunch:
    """Render an attempt's commands: an ssh for each host. Pure, except that it reads the hostfile.

    Args:
        group: The hosts with their answers; None renders what is known without probing.
    """
    launcher = section_of(request.plan.config, SshConfig)
    group = group or unprobed_hosts(request.plan)
    command = attempt_command(
        request,
        [host.name for host in group.hosts],
        [_node_environment(request, group, node) for node in range(len(group.hosts))],
        python=launcher.python or sys.executable,
        address=group.address,
        port=group.port,
    )
    commands = tuple(
        ssh_command(host, launcher, "trainctl.runs.processes", "exec") for host in group.hosts
    )
    return RenderedLaunch(command=command, commands=commands)


def run_launch(launch: LaunchRequest) -> Outcome:
    """Run an attempt on the hosts, and those that replace it, to the end.

    Signals are handled as in `trainctl.launchers.attempts.run_on_this_machine`. After losing a node
    it restarts on the nodes that are left, or waits for the lost one: see `launcher.min_nodes`.

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

    pool = HostPool(launch, hosts, probed.group)
    with hold_lock(run):
        everything = RunTag(run_id(run), run.root)
        terminate_processes(everything, grace_seconds=0)
        if launch.attempt.number > 1:  # agents of a lost launcher may still run
            terminate_on_hosts(hosts, launcher, everything)

        def start(prepared: PreparedAttempt) -> SshAgents:
            agents = SshAgents(prepared, pool.group.hosts)
            nodes = prepared.rendered.command.nodes
            agents.start(nodes, prepared.request.folder or Path.cwd())
            return agents

        return run_attempts(
            launch,
            render=lambda request: render(request, group=pool.group),
            start=start,
            replan=ElasticPlanner(launch, pool).replan,
        )


class HostPool:
    """The hosts of a launch, probed again before each restart.

    `group` has the hosts that the next attempt runs on.

    Args:
        group: The hosts as they answered before the start.
    """

    def __init__(self, launch: LaunchRequest, hosts: Sequence[Host], group: HostGroup) -> None:
        self.group = group
        self._launch = launch
        self._hosts = hosts
        self._answering: Sequence[Host] = hosts

    def look(self, plan: RunPlan) -> Availability:
        """Probe all hosts, or as many of those that answered last as a smaller plan needs."""
        nodes, launch = plan.hardware.nodes, self._launch
        is_whole = nodes == launch.plan.hardware.nodes
        asked = self._hosts if is_whole else self._answering[:nodes]
        folder = user_code_folder(plan.config, launch.run)
        checked = check_hosts(plan, asked, launch.run.root, launch.checkpoint_bytes, folder)
        self.group = checked.group or self.group
        if is_whole:
            self._answering = checked.answering
        return Availability(
            is_ready=checked.group is not None,
            there=len(checked.answering),
            missing=[host.name for host in asked if host not in checked.answering],
            problems=[finding.message for finding in checked.findings if finding.is_error],
        )

    def section(self, nodes: int) -> SshConfig:
        """Return the launcher's section of a plan on fewer nodes."""
        return replace(
            section_of(self._launch.plan.config, SshConfig),
            hosts=[host.name for host in self._answering[:nodes]],
            hostfile=None,
            include=None,
            exclude=None,
        )


def _node_environment(request: AttemptRequest, group: HostGroup, node: int) -> dict[str, str]:
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


_BEAT_SECONDS = 1.0


class SshAgents(NodeAgents):
    """Agents on hosts, each the remote command of an ssh.

    The end of an ssh tells that its agent ended, and each agent is sent a sign of life on its stdin
    all the time. So each side knows that the other is gone within `launcher.node_timeout_seconds`.

    Args:
        hosts: Hosts in the order of the nodes.
    """

    def __init__(self, prepared: PreparedAttempt, hosts: Sequence[Host]) -> None:
        super().__init__(prepared.request, [host.name for host in hosts])
        self._tag = prepared.tag
        self._reached_by = hosts
        self._ssh = section_of(prepared.request.plan.config, SshConfig)
        self._processes: list[Process] = []
        self._ended = threading.Event()

    def start(self, nodes: Sequence[NodeCommand], folder: Path) -> None:
        """Start the agent of each node, in the same `folder` on every host."""
        lease = {LEASE_VARIABLE: str(self._ssh.node_timeout_seconds)}
        for host, node in zip(self._reached_by, nodes, strict=True):
            process = start_with_pdeathsig(
                ssh_command(host, self._ssh, "trainctl.runs.processes", "exec"),
                tag=self._tag,
                log=self._attempt.agent_log(node.node),
                has_input=True,
            )
            self._processes.append(process)
            assert process.stdin is not None
            variables = {
                **node.environment,
                **replace(self._tag, node=node.node).environment(),
                **lease,
            }
            with suppress(BrokenPipeError):  # it has ended: its exit code tells
                process.stdin.write(encode_command(node.argv, variables, folder))
            os.set_blocking(process.stdin.fileno(), False)
        # Not in the main thread, which may block on a terminal that takes no output.
        threading.Thread(target=self._beat, name="lease", daemon=True).start()

    def _codes(self) -> list[int | None]:
        return [process.poll() for process in self._processes]

    def _order_end(self) -> None:
        self._send(LEASE_END)

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()

    def _clean_nodes(self, nodes: Sequence[int]) -> list[int]:
        self._ended.set()
        hosts = [self._reached_by[node] for node in nodes]
        cleaned = terminate_on_hosts(hosts, self._ssh, self._tag)
        return [node for node in nodes if cleaned[self.hosts[node]]]

    def _beat(self) -> None:
        while not self._ended.wait(_BEAT_SECONDS):
            self._send(LEASE_BEAT)

    def _send(self, message: bytes) -> None:
        for process in self._processes:
            # An agent that has ended, or reads no more, is noticed by the end of its ssh.
            with suppress(BrokenPipeError, BlockingIOError):
                assert process.stdin is not None
                os.write(process.stdin.fileno(), message)


def terminate_on_hosts(hosts: Sequence[Host], launcher: SshConfig, tag: RunTag) -> dict[str, bool]:
    """End the processes of a run on hosts, in parallel; processes of other runs are left alone.

    Returns:
        By name, whether the host could be reached and nothing is left on it.
    """
    arguments = [str(tag.directory), tag.run_id]
    if tag.attempt is not None:
        arguments += ["--attempt", str(tag.attempt)]
    started = [
        subprocess.Popen(
            ssh_command(host, launcher, "trainctl.runs.processes", "terminate", *arguments),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        for host in hosts
    ]
    deadline = time.monotonic() + launcher.node_timeout_seconds
    results = {}
    for host, process in zip(hosts, started, strict=True):
        try:
            code = process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        results[host.name] = code == 0
    return results
