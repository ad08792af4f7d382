"""`python -m trainctl.launchers.agent RUN_DIR --attempt N`: the supervisor of one node.

Arguments or the environment give the number of its node and the address of the first node
(`trainctl.launchers.agent.rendezvous`).
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import traceback
from collections.abc import Mapping
from functools import partial
from math import inf
from pathlib import Path
from typing import NoReturn

from trainctl.engines import patch_checks
from trainctl.errors import ExitCode, TrainctlError
from trainctl.hardware.builds import needed_operators
from trainctl.launchers.agent.guard import BuildWatch, SignalGuard, exit_now, terminate_with_builds
from trainctl.launchers.agent.hang_detection import HangDetector, HungRank
from trainctl.launchers.agent.ranks import (
    AgentRecords,
    ForkServer,
    RankExit,
    start_ranks,
    watch_ranks,
)
from trainctl.launchers.agent.rendezvous import (
    JoinWatch,
    NodeIdentity,
    NodeRendezvous,
    exec_with_tag,
    find_node_identity,
    prepare_ranks,
    set_gloo_interface,
)
from trainctl.plans.types import RunPlan
from trainctl.runs.command import AttemptCommand, read_command
from trainctl.runs.directory import read_plan
from trainctl.runs.failures import Cause, host_oom_kills
from trainctl.runs.layout import RunPaths
from trainctl.runs.processes import PARENT_VARIABLE, SIGTERM_SAVES_VARIABLE, RunTag, die_with_parent
from trainctl.runs.status import Heartbeat, Phase, State, read_status, write_status

_early_sigterm: list[bool] = []
"""Filled by a scheduler's SIGTERM that arrived before the signal guard was started."""


def sigterm_saves() -> bool:
    """Return True if SIGTERM is a scheduler's notice that this job ends soon."""
    return SIGTERM_SAVES_VARIABLE in os.environ


def main() -> NoReturn:
    """Supervise the node's ranks to their end, and exit with the launch's exit code."""
    # SIGKILL: until the guard is started, this is the only process to end.
    launcher_pid = int(os.environ.get(PARENT_VARIABLE) or os.getppid())
    die_with_parent(launcher_pid)
    # Also blocked while this process executes itself again with its tag (`exec_with_tag`).
    early = {signal.SIGTERM} if sigterm_saves() else set()
    signal.pthread_sigmask(signal.SIG_BLOCK, early)
    parser = argparse.ArgumentParser(prog="python -m trainctl.launchers.agent")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--node", type=int)
    parser.add_argument("--rendezvous", metavar="HOST:PORT")
    arguments = parser.parse_args()
    run = RunPaths(arguments.run_dir)
    try:
        place = find_node_identity(os.environ, node=arguments.node, rendezvous=arguments.rendezvous)
        tag = exec_with_tag(run, arguments.attempt, place.node)
    except TrainctlError as error:
        print(f"error: {error.message}\nhint: {error.hint}", file=sys.stderr)
        sys.exit(int(error.exit_code))
    if early:
        signal.signal(signal.SIGTERM, lambda *_: _early_sigterm.append(True))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, early)
    Agent(run, tag, place, launcher_pid).run()


class Agent:
    """Supervisor of one node in one attempt.

    Args:
        launcher_pid: The parent of this process.
    """

    def __init__(self, run: RunPaths, tag: RunTag, place: NodeIdentity, launcher_pid: int) -> None:
        assert tag.attempt is not None
        self._run = run
        self._attempt = run.attempt(tag.attempt)
        self._place = place
        self._node = place.node
        self._tag = tag
        self._launcher_pid = launcher_pid
        self._grace_seconds = 0.0
        self._records = AgentRecords(run, self._attempt, place.node)

    def run(self) -> NoReturn:
        """Supervise the ranks, leave no process behind, and exit with the launch's exit code."""
        try:
            code = self._supervise()
        except TrainctlError as error:
            code = int(error.exit_code)
            self._records.write_failure(
                code, message=error.message, hint=error.hint, exit_code=code
            )
        except Exception as error:
            traceback.print_exc()
            message = f"the agent failed: {type(error).__name__}: {error}"
            code = int(ExitCode.internal_error)
            self._records.write_failure(code, message=message, exit_code=code)
        terminate_with_builds(self._tag, grace_seconds=self._grace_seconds)
        for file in self._attempt.root.glob(f"{self._attempt.store.name}*"):
            file.unlink(missing_ok=True)
        exit_now(code)

    def _supervise(self) -> int:
        plan = read_plan(self._attempt.plan)
        # For all ranks of the node; each rank checks again in its own process.
        patch_checks.require_definitions(plan.config)
        command = read_command(self._attempt)
        if command.folder is not None:  # the launch's folder, which has the user's code
            os.chdir(command.folder)
        guard = self._start_guard(plan)
        address, port = self._place.rendezvous or (command.address, command.port)
        nodes = plan.hardware.nodes
        if nodes > 1:
            set_gloo_interface(address)
        os.environ[PARENT_VARIABLE] = str(os.getpid())
        prepare_ranks(plan, command.ranks_per_node)
        fork_server = (
            ForkServer(command, plan.config.launcher.slow_phase_seconds)
            if command.is_forked
            else None
        )
        # A user's program needs a port, and `launcher.port` is honoured; else a file is enough.
        is_file = nodes == 1 and port is None and command.prepare
        rendezvous = NodeRendezvous(
            self._tag.run_id,
            self._node,
            nodes,
            address,
            port,
            file=self._attempt.store if is_file else None,
        )
        rendezvous.announce(self._attempt.number)
        if command.prepare:
            self._prepare_corpus(plan, rendezvous, guard)
        return self._run_ranks(plan, command, rendezvous, guard, fork_server)

    def _start_guard(self, plan: RunPlan) -> SignalGuard:
        """Handle signals from now on, with the first one if it came already."""
        self._grace_seconds = plan.config.launcher.grace_seconds
        guard = SignalGuard(
            self._tag,
            grace_seconds=self._grace_seconds,
            launcher_pid=self._launcher_pid,
            on_orphaned=self._report_orphaned,
            lease_seconds=self._place.lease_seconds,
            on_preempted=self._records.write_preempted if sigterm_saves() else None,
        )
        guard.start()
        if _early_sigterm:
            os.kill(os.getpid(), signal.SIGTERM)
        return guard

    def _prepare_corpus(
        self, plan: RunPlan, rendezvous: NodeRendezvous, guard: SignalGuard
    ) -> None:
        """Tokenize the corpus together with the other nodes.

        With a shared cache, node 0 alone assembles the corpus, and the others then find it there.
        """
        from trainctl.data.prepare import assist_preparation, prepare

        if self._node > 0:
            assist_preparation(plan)
            rendezvous.await_mark("prepared", guard.block_if_stopping)
            prepare(plan, self._run, self._records.write_corpus)
        else:
            heartbeat = Heartbeat(self._attempt.preparation)

            def show(text: str) -> None:
                heartbeat.beat(Phase.start, doing=text)

            prepare(plan, self._run, self._records.write_corpus, show)
            show("starting the ranks")
        rendezvous.mark("prepared")

    def _run_ranks(
        self,
        plan: RunPlan,
        command: AttemptCommand,
        rendezvous: NodeRendezvous,
        guard: SignalGuard,
        fork_server: ForkServer | None,
    ) -> int:
        launcher, is_first = plan.config.launcher, self._node == 0
        code = 0
        oom_kills = host_oom_kills()

        def on_failure(failed: RankExit | HungRank, alive: Mapping[int, int]) -> None:
            nonlocal code
            if isinstance(failed, RankExit):
                code = self._records.write_rank_exit(
                    failed,
                    command,
                    host_oom_kills() - oom_kills,
                    partial(hangs.find_interrupted, alive),
                    uses_trainctl_codes=plan.config.script is None,
                )
            else:
                code = self._records.write_hang(failed)

        # A user's program writes no heartbeats, so their absence means nothing.
        hangs = HangDetector(
            self._attempt,
            heartbeat_seconds=inf if command.is_users else launcher.heartbeat_seconds,
            slow_phase_seconds=inf if command.is_users else launcher.slow_phase_seconds,
            world_size=len(command.nodes) * command.ranks_per_node,
        )
        # All nodes compile the same operators: node 0 reports them.
        operators = needed_operators(plan.config, plan.hardware) if is_first else ()
        builds = BuildWatch(self._attempt, operators, self._records.write_build)
        joining = None
        if command.is_users and is_first:
            self._records.write_program(command)
            if len(command.nodes) * command.ranks_per_node > 1:
                joining = JoinWatch(rendezvous, self._records.write_not_joined)

        def look() -> None:
            builds.look()
            if joining is not None:
                joining.look()

        pids = start_ranks(command, rendezvous, self._tag, fork_server, guard.block_if_stopping)
        if watch_ranks(pids, self._tag, guard, hangs, look, self._grace_seconds, on_failure):
            if joining is not None:
                joining.look(at_end=True)
            rendezvous.wait_for_other_nodes(guard.block_if_stopping)
        return code

    def _report_orphaned(self, loss: str) -> None:
        """Record the failure and status in place of a launcher that is gone. Only node 0 does."""
        if self._node > 0:
            return
        who = f"process {self._launcher_pid}"
        if self._place.lease_seconds is not None:
            who = "on another machine"
        message = f"the launcher ({who}) {loss}"
        self._records.write_failure(
            int(ExitCode.terminated),
            cause=Cause.killed.value,
            message=message,
            hint="continue with `trainctl resume`",
            launcher_lost=True,
        )
        status = read_status(self._run)
        # A launcher that only this node has lost may have written a final status.
        is_open = status is not None and not status.state.is_final
        if status is not None and is_open and status.attempt == self._attempt.number:
            write_status(self._run, status.changed(State.failed, message=message))


if __name__ == "__main__":
    main()
