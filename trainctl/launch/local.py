"""The local launcher: one agent on this machine, and its ranks."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainctl.config.schema import Accelerator
from trainctl.errors import ExitCode, TrainctlError
from trainctl.launch import program
from trainctl.launch.outcome import Outcome
from trainctl.launch.restarts import run_with_restarts
from trainctl.launch.stop import Stop, TimeLimit
from trainctl.launch.supervise import Attempt, supervise
from trainctl.plan.types import RunPlan
from trainctl.runs.command import AttemptCommand, NodeCommand, write_command
from trainctl.runs.directory import run_id
from trainctl.runs.layout import AttemptPaths, RunPaths
from trainctl.runs.lock import hold
from trainctl.runs.processes import PARENT_VARIABLE, RunTag, sweep
from trainctl.runs.provenance import select
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
) -> AttemptCommand:
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
    node = NodeCommand(
        node=0,
        host=socket.gethostname(),
        argv=(sys.executable, *agent),
        environment=_environment(plan, attempt, environment, threads=max(1, cores // ranks)),
    )
    return AttemptCommand(
        nodes=(node,),
        ranks_per_node=ranks,
        rank_command=tuple(rank_command or program.command(plan.config, run, attempt)),
        prepare=rank_command is None and plan.config.trains_itself,
        is_users=not plan.config.trains_itself,
        folder=None if folder is None else str(folder),
        port=plan.config.launcher.port,
    )


def _environment(
    plan: RunPlan, attempt: AttemptPaths, shell: Mapping[str, str], *, threads: int
) -> dict[str, str]:
    """Variables set for agent and ranks; later ones win, the user's own last."""
    launcher = plan.config.launcher
    variables = {
        "OMP_NUM_THREADS": str(threads),
        # What a rank wrote before it was killed must be in its log, and a crash leave a stack.
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
        **program.environment(plan, attempt),
    }
    if plan.hardware.accelerator is Accelerator.cpu:
        variables["GLOO_SOCKET_IFNAME"] = "lo"
    variables |= select(shell, launcher.forward_environment)
    if launcher.omp_num_threads is not None:
        variables["OMP_NUM_THREADS"] = str(launcher.omp_num_threads)
    return variables | launcher.environment


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

        def run_one(attempt: AttemptPaths, stop: Stop) -> Outcome:
            command = render(
                plan,
                run,
                attempt,
                environment=os.environ,
                cores=cores,
                folder=folder,
                rank_command=rank_command,
            )
            write_command(attempt, command)
            tag = RunTag(identity, run.root, attempt.number)
            return supervise(
                Attempt(run, attempt, tag, ranks=plan.mesh.world_size),
                lambda: _start_agent(command.nodes[0], tag, attempt.agent_log(0), lock, folder),
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


def _start_agent(
    node: NodeCommand, tag: RunTag, log: Path, lock: int, folder: Path | None
) -> subprocess.Popen[bytes]:
    """Start an agent in a session of its own: a terminal's Ctrl-C reaches only the launcher."""
    environment = {
        **os.environ,
        **node.environment,
        **tag.environment(),
        PARENT_VARIABLE: str(os.getpid()),
    }
    with log.open("ab") as stream:
        return subprocess.Popen(
            node.argv,
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            start_new_session=True,
            pass_fds=(lock,),
        )
