"""The local launcher: one agent on this machine, and its ranks."""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainctl.config.schema import Accelerator
from trainctl.errors import ExitCode, Finding, TrainctlError
from trainctl.hardware.health import preflight
from trainctl.launch import program
from trainctl.launch.agents import OneProcess
from trainctl.launch.outcome import Outcome
from trainctl.launch.processes import start_agent
from trainctl.launch.rendered import Rendered
from trainctl.launch.restarts import run_with_restarts
from trainctl.launch.stop import Stop, TimeLimit
from trainctl.launch.supervise import Attempt, supervise
from trainctl.launch.variables import rank_variables
from trainctl.plan.types import RunPlan
from trainctl.runs.command import AttemptCommand, NodeCommand
from trainctl.runs.directory import run_id
from trainctl.runs.layout import AttemptPaths, RunPaths
from trainctl.runs.lock import hold
from trainctl.runs.processes import RunTag, sweep
from trainctl.runs.records import read_events

_LEFTOVER_GRACE_SECONDS = 1.0


def render(
    plan: RunPlan,
    run: RunPaths,
    attempt: AttemptPaths,
    *,
    environment: Mapping[str, str],
    cores: int,
    folder: Path | None = None,
    rank_command: Sequence[str] | None = None,
) -> Rendered:
    """What `run_launch` starts for an attempt. Pure: reads and starts nothing.

    Args:
        plan: The plan.
        run: The run.
        attempt: The attempt.
        environment: Of the user's shell; of it `launcher.forward_environment` is taken.
        cores: Processors of this machine, shared among the ranks.
        folder: Where agents and ranks run; None is the current folder.
        rank_command: Another command line for the ranks, which then needs no corpus prepared.
    """
    ranks = plan.mesh.world_size
    agent = ("-m", "trainctl.agent", str(run.root), "--attempt", str(attempt.number), "--node", "0")
    on_cpu = plan.hardware.accelerator is Accelerator.cpu
    node = NodeCommand(
        node=0,
        host=socket.gethostname(),
        argv=(sys.executable, *agent),
        environment=rank_variables(
            plan,
            attempt,
            environment,
            threads=max(1, cores // ranks),
            network={"GLOO_SOCKET_IFNAME": "lo"} if on_cpu else None,
        ),
    )
    command = AttemptCommand(
        nodes=(node,),
        ranks_per_node=ranks,
        **program.of_ranks(plan.config, run, attempt, rank_command=rank_command, folder=folder),
        port=plan.config.launcher.port,
    )
    return Rendered(command=command, commands=(node.argv,))


def check(plan: RunPlan, folder: Path, checkpoint_bytes: int | None) -> list[Finding]:
    """What this machine lacks; space is looked for later, where the run's directory is."""
    return preflight(plan.config, plan.hardware)


def run_launch(
    run: RunPaths,
    attempt: AttemptPaths,
    plan: RunPlan,
    on_event: Callable[[dict[str, Any]], None],
    *,
    rank_command: Sequence[str] | None = None,
    checkpoint_bytes: int | None = None,
) -> Outcome:
    """Start an attempt on this machine and see it, and those that replace it when it fails, to
    the end. Call it in the main thread.

    SIGINT, SIGTERM and SIGHUP stop every rank, a second one without grace; see `Stop` for when
    SIGTERM saves first. When this returns or raises, no process of the run is left.

    Args:
        run: The run; its lock is taken unless this process holds it.
        attempt: The first attempt, as `new_attempt` made it.
        plan: Its plan.
        on_event: Called with each record of this launch soon after it is written.
        rank_command: Another command line for the ranks, which then needs no corpus prepared.
        checkpoint_bytes: Size of a checkpoint, if known: that much space must be free.

    Raises:
        TrainctlError: The run is in use (5), or its disk has no space for a checkpoint (4).
    """
    if checkpoint_bytes is not None:
        require_space(run.root, checkpoint_bytes)
    launcher = plan.config.launcher
    cores = len(os.sched_getaffinity(0))

    with hold(run) as lock:
        identity = run_id(run)
        # Only after the launcher and the agent of an earlier attempt were killed at one blow.
        sweep(RunTag(identity, run.root), grace_seconds=_LEFTOVER_GRACE_SECONDS)
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
                cores=cores,
                folder=folder,
                rank_command=rank_command,
            )
            rendered.write(attempt)
            (node,) = rendered.command.nodes
            tag = RunTag(identity, run.root, attempt.number)
            log = attempt.agent_log(0)

            def start() -> OneProcess:
                process = start_agent(
                    node.argv,
                    tag=replace(tag, node=0),
                    environment=node.environment,
                    log=log,
                    lock=lock,
                    folder=folder,
                )
                return OneProcess(process, log, "the agent", node=0)

            return supervise(
                Attempt(run, attempt, tag, ranks=plan.mesh.world_size),
                start,
                on_event,
                stop,
                grace_seconds=launcher.grace_seconds,
            )

        stop_grace_seconds = launcher.stop_grace_seconds if reads_requests else 0.0
        with Stop(run, stop_grace_seconds=stop_grace_seconds, limit=limit) as stop:
            return run_with_restarts(run, attempt, plan, on_event, stop, run_one)


def require_space(folder: Path, needed_bytes: int) -> None:
    """Refuse a folder on a disk with less free space than that.

    Raises:
        TrainctlError: Exit code 4.
    """
    free_bytes = shutil.disk_usage(folder).free
    if free_bytes < needed_bytes:
        raise TrainctlError(
            f"a checkpoint takes {needed_bytes / 1e9:.1f} GB, and {folder} has "
            f"{free_bytes / 1e9:.1f} GB free",
            hint="free space, or name a directory on another disk with --run-dir",
            exit_code=ExitCode.environment,
        )
