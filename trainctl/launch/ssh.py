"""The ssh launcher: an agent on each host, started and watched from this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainctl.errors import Finding, TrainctlError
from trainctl.launch import program
from trainctl.launch.outcome import Outcome
from trainctl.launch.regroup import Regroup
from trainctl.launch.remote import ssh
from trainctl.launch.rendered import Rendered
from trainctl.launch.restarts import run_with_restarts
from trainctl.launch.site import Site, hosts_of, look, unasked
from trainctl.launch.stop import Stop, TimeLimit
from trainctl.launch.supervise import Attempt, supervise
from trainctl.launch.team import Team, sweep_hosts
from trainctl.launch.variables import not_forwarded, rank_variables
from trainctl.plan.types import RunPlan
from trainctl.runs.command import AttemptCommand, NodeCommand
from trainctl.runs.directory import last_attempt, run_id
from trainctl.runs.layout import AttemptPaths, RunPaths
from trainctl.runs.lock import hold
from trainctl.runs.processes import RunTag, sweep
from trainctl.runs.records import EventWriter, read_events


def check(plan: RunPlan, folder: Path, checkpoint_bytes: int | None) -> list[Finding]:
    """What is wrong with the hosts: all are asked at once, within `launcher.preflight_seconds`.

    Raises:
        TrainctlError: The hostfile is missing or wrong, or there are too few hosts (exit code 2).
    """
    findings = look(plan, hosts_of(plan), folder, checkpoint_bytes).findings
    return [*findings, *not_forwarded(plan, os.environ)]


def render(
    plan: RunPlan,
    run: RunPaths,
    attempt: AttemptPaths,
    *,
    environment: Mapping[str, str],
    cores: int,
    rank_command: Sequence[str] | None = None,
    folder: Path | None = None,
    site: Site | None = None,
) -> Rendered:
    """What is started for an attempt: an ssh for each host. Pure, but for reading the hostfile.

    Args:
        plan: The plan.
        run: The run.
        attempt: The attempt.
        environment: Of the user's shell; of it `launcher.forward_environment` is taken.
        cores: Processors of a host that has not been asked.
        rank_command: Another command line for the ranks, which then needs no corpus prepared.
        folder: Where agents and ranks run; None is where they are started.
        site: The hosts as they answered; None shows what is known without asking.
    """
    launcher = plan.config.launcher
    site = site or unasked(plan)
    ranks = plan.mesh.world_size // plan.hardware.nodes
    python = launcher.python or sys.executable
    paths = (str(run.root), "--attempt", str(attempt.number))
    nodes = tuple(
        NodeCommand(
            node=node,
            host=host.name,
            argv=(python, "-m", "trainctl.agent", *paths, "--node", str(node)),
            environment=_environment(
                plan, attempt, environment, site, node, max(1, (site.cores[node] or cores) // ranks)
            ),
        )
        for node, host in enumerate(site.hosts)
    )
    command = AttemptCommand(
        nodes=nodes,
        ranks_per_node=ranks,
        **program.of_ranks(
            plan.config, run, attempt, rank_command=rank_command, folder=folder, python=python
        ),
        address=site.address,
        port=site.port,
    )
    commands = tuple(ssh(host, launcher, "trainctl.runs.node_entry") for host in site.hosts)
    return Rendered(command=command, commands=commands)


def run_launch(
    run: RunPaths,
    attempt: AttemptPaths,
    plan: RunPlan,
    on_event: Callable[[dict[str, Any]], None],
    *,
    rank_command: Sequence[str] | None = None,
    checkpoint_bytes: int | None = None,
) -> Outcome:
    """Start an attempt on the hosts and see it, and those that replace it, to the end.

    As `trainctl.launch.local.run_launch`. After losing a node it starts again on those that are
    left, or waits for it: see `launcher.min_nodes`.

    Raises:
        TrainctlError: The run is in use (5), the hostfile is wrong (2), or the hosts are not what
            the plan needs (4).
    """
    hosts, launcher = hosts_of(plan), plan.config.launcher
    seen = look(plan, hosts, run.root, checkpoint_bytes)
    if seen.site is None:
        raise TrainctlError.from_findings(seen.findings)

    def on_wait(there: int, missing: list[str]) -> None:
        with EventWriter(run.events, last_attempt(run)) as events:
            on_event(events.write("waiting", there=there, of=len(hosts), missing=missing))

    group = Regroup(plan, hosts, seen.site, run.root, checkpoint_bytes, on_wait)
    with hold(run):
        identity = run_id(run)
        everything = RunTag(identity, run.root)
        sweep(everything, grace_seconds=0)
        if attempt.number > 1:  # agents that were cut off from an earlier launcher may be there
            sweep_hosts(hosts, launcher, everything)
        # A program of the user's reads no requests: a signal is passed to it, and no more.
        reads_requests = plan.config.trains_itself
        minutes = plan.config.training.time_limit_minutes if reads_requests else None
        limit = TimeLimit(minutes, read_events(run.events))
        folder = program.folder(plan.config, run)

        def run_one(attempt: AttemptPaths, plan: RunPlan, stop: Stop) -> Outcome:
            rendered = render(
                plan,
                run,
                attempt,
                environment=os.environ,
                cores=len(os.sched_getaffinity(0)),
                rank_command=rank_command,
                folder=folder,
                site=group.site,
            )
            rendered.write(attempt)
            tag = RunTag(identity, run.root, attempt.number)

            def start() -> Team:
                team = Team(run, attempt, tag, group.site.hosts, launcher)
                team.start(rendered.command.nodes, folder or Path.cwd())
                return team

            return supervise(
                Attempt(run, attempt, tag, ranks=plan.mesh.world_size),
                start,
                on_event,
                stop,
                grace_seconds=launcher.grace_seconds,
            )

        stop_grace_seconds = launcher.stop_grace_seconds if reads_requests else 0.0
        with Stop(run, stop_grace_seconds=stop_grace_seconds, limit=limit) as stop:
            return run_with_restarts(run, attempt, plan, on_event, stop, run_one, group.plan_again)


def _environment(
    plan: RunPlan,
    attempt: AttemptPaths,
    shell: Mapping[str, str],
    site: Site,
    node: int,
    threads: int,
) -> dict[str, str]:
    """Variables of a node's agent and ranks."""
    host, launcher = site.hosts[node], plan.config.launcher
    variables: dict[str, str] = {}
    interface = site.interfaces[node]
    if interface is not None:
        variables["GLOO_SOCKET_IFNAME"] = interface
        if launcher.interfaces.get(host.name, launcher.interface) is not None:
            # Where nothing was asked for, NCCL's own choice is better: it knows InfiniBand.
            variables["NCCL_SOCKET_IFNAME"] = interface
    variables = rank_variables(plan, attempt, shell, threads=threads, network=variables)
    if host.devices is not None:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(str(number) for number in host.devices)
    return variables
