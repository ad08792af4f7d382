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
from typing import Any

from trainctl.config.hosts import Host
from trainctl.errors import ExitCode, Finding, TrainctlError
from trainctl.hardware.packages import check_loggers
from trainctl.launchers.attempts import PreparedAttempt, run_attempts
from trainctl.launchers.elastic import ElasticPlanner
from trainctl.launchers.host_checks import HostGroup, check_hosts, planned_hosts, unprobed_hosts
from trainctl.launchers.interface import AttemptRequest, LaunchRequest, Outcome, RenderedLaunch
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
from trainctl.runs.directory import last_attempt, run_id
from trainctl.runs.failures import Cause, log_tail
from trainctl.runs.layout import AttemptPaths, RunPaths
from trainctl.runs.lock import hold_lock
from trainctl.runs.processes import (
    LEASE_BEAT,
    LEASE_END,
    LEASE_VARIABLE,
    RunTag,
    encode_command,
    terminate_processes,
)
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

    def on_wait(there: int, missing: list[str]) -> None:
        with EventWriter(run.events, last_attempt(run)) as events:
            launch.on_event(events.write("waiting", there=there, of=len(hosts), missing=missing))

    planner = ElasticPlanner(launch, hosts, probed.group, on_wait)
    with hold_lock(run):
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


def _node_environment(request: AttemptRequest, group: HostGroup, node: int) -> dict[str, str]:
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


_SSH_FAILED = 255
_BEAT_SECONDS = 1.0
_SETTLE_SECONDS = 1.0
"""Time for the other agents to report a failure, after the first agent failed."""
_END_SECONDS = 5.0
"""Time beyond the grace for an agent to end, network latency included."""


class SshAgents:
    """Agents on other machines.

    The end of an ssh tells that its agent ended, and each agent is sent a sign of life on its stdin
    all the time. So each side knows that the other is gone within `launcher.node_timeout_seconds`.

    Args:
        hosts: Hosts in the order of the nodes.
    """

    def __init__(
        self,
        run: RunPaths,
        attempt: AttemptPaths,
        tag: RunTag,
        hosts: Sequence[Host],
        launcher: SshConfig,
    ) -> None:
        self._run = run
        self._attempt = attempt
        self._tag = tag
        self._hosts = hosts
        self._launcher = launcher
        self._processes: list[Process] = []
        self._first_code: int | None = None
        self._failed_at: float | None = None
        self._terminated_at: float | None = None
        self._lost_nodes: list[int] = []
        self._code: int | None = None
        self._ended = threading.Event()

    def start(self, nodes: Sequence[NodeCommand], folder: Path) -> None:
        """Start the agent of each node, in the same `folder` on every host."""
        lease = {LEASE_VARIABLE: str(self._launcher.node_timeout_seconds)}
        for host, node in zip(self._hosts, nodes, strict=True):
            process = start_with_pdeathsig(
                ssh_command(host, self._launcher, "trainctl.runs.processes", "exec"),
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
        codes = [process.poll() for process in self._processes]
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
                for process in self._processes:
                    process.kill()
            return None
        self._ended.set()
        dirty = [node for node, code in enumerate(codes) if _is_lost(code)]
        self._code = self._clean_up(dirty)
        return self._code

    def terminate(self) -> None:
        """Tell every agent to end its ranks."""
        if self._terminated_at is None:
            self._terminated_at = time.monotonic()
            self._send(LEASE_END)

    def describe_death(self) -> dict[str, Any]:
        """Return the record of an agent's own error exit; lost nodes are recorded already."""
        log = self._attempt.agent_log(0)
        return {
            "rank": None,
            "node": None,
            "host": "",
            "pid": None,
            "cause": Cause.code.value,
            "message": f"an agent ended with exit code {self._code} and recorded nothing",
            "hint": "",
            "log": str(log),
            "log_tail": log_tail(log),
        }

    def _beat(self) -> None:
        while not self._ended.wait(_BEAT_SECONDS):
            self._send(LEASE_BEAT)

    def _send(self, message: bytes) -> None:
        for process in self._processes:
            # An agent that has ended, or reads no more, is noticed by the end of its ssh.
            with suppress(BrokenPipeError, BlockingIOError):
                assert process.stdin is not None
                os.write(process.stdin.fileno(), message)

    def _clean_up(self, dirty: Sequence[int]) -> int:
        """Clean up hosts whose agent did not, and record lost nodes; return the exit code."""
        cleaned = terminate_on_hosts(
            [self._hosts[node] for node in dirty], self._launcher, self._tag
        )
        code = self._first_code or 0
        for node in self._lost_nodes:
            host = self._hosts[node]
            is_reachable = cleaned[host.name]
            log = self._attempt.agent_log(node)
            tail = log_tail(log)
            if is_reachable:
                what, cause, code_of_loss = "the agent on it was killed", Cause.killed, 137
            else:
                reason = tail[-1].strip() if tail else "its ssh ended"
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
                    rank=None,
                    node=node,
                    host=host.name,
                    pid=None,
                    cause=cause.value,
                    exit_code=None,
                    signal=None,
                    message=f"node {node} ({host.name}): {what}",
                    hint=cause.hint,
                    log=str(log),
                    log_tail=tail,
                    launch_exit_code=int(code_of_loss),
                )
        return code


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


def _is_lost(code: int | None) -> bool:
    """Return True if an ssh failed or was killed, instead of passing on its agent's exit code."""
    return code is not None and (code == _SSH_FAILED or code < 0)
