"""`python -m trainctl.launch.agent RUN_DIR --attempt N`: the supervisor of one node.

Arguments or the environment give the number of its node and the address of the first node
(`trainctl.launch.agent.node_identity`).
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import traceback
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import Any, NoReturn

from trainctl.engines import patch_checks as declared
from trainctl.errors import ExitCode, TrainctlError
from trainctl.hardware.builds import needed_operators
from trainctl.launch.agent.builds import BuildWatch, terminate_with_builds
from trainctl.launch.agent.guard import SignalGuard, exit_now
from trainctl.launch.agent.hang_detection import HangDetector, HungRank
from trainctl.launch.agent.node_identity import (
    NodeIdentity,
    exec_with_tag,
    find_node_identity,
    prepare_ranks,
    set_gloo_interface,
)
from trainctl.launch.agent.ranks import ForkServer, RankExit, start_ranks, watch_ranks
from trainctl.launch.agent.rendezvous import JoinWatch, NodeRendezvous
from trainctl.runs.causes import Cause, disk_is_full, exit_code, host_oom_kills
from trainctl.runs.command import AttemptCommand, read_command
from trainctl.runs.directory import read_plan
from trainctl.runs.failures import describe, effective_return_code, error_line, is_lost_peer
from trainctl.runs.heartbeats import Heartbeat, Phase
from trainctl.runs.layout import RunPaths
from trainctl.runs.processes import (
    PARENT_VARIABLE,
    SIGTERM_SAVES_VARIABLE,
    RunTag,
    die_with_parent,
)
from trainctl.runs.provenance import redact_argv
from trainctl.runs.records import EventWriter
from trainctl.runs.status import State, read_status, write_status

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
    parser = argparse.ArgumentParser(prog="python -m trainctl.launch.agent")
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
        tag: Tag of the attempt's processes.
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
        self._codes_are_ours = True

    def run(self) -> NoReturn:
        """Supervise the ranks, leave no process behind, and exit with the launch's exit code."""
        try:
            code = self._supervise()
        except TrainctlError as error:
            code = int(error.exit_code)
            self._report(code, message=error.message, hint=error.hint, exit_code=code)
        except Exception as error:
            traceback.print_exc()
            message = f"the agent failed: {type(error).__name__}: {error}"
            code = int(ExitCode.internal_error)
            self._report(code, message=message, exit_code=code)
        terminate_with_builds(self._tag, grace_seconds=self._grace_seconds)
        for file in self._attempt.root.glob(f"{self._attempt.store.name}*"):
            file.unlink(missing_ok=True)
        exit_now(code)

    def _supervise(self) -> int:
        plan = read_plan(self._attempt.plan)
        # For all ranks of the node; each rank checks again in its own process.
        declared.require(plan.config)
        command = read_command(self._attempt)
        if command.folder is not None:  # the launch's folder, which has the user's code
            os.chdir(command.folder)
        self._grace_seconds = plan.config.launcher.grace_seconds
        guard = SignalGuard(
            self._tag,
            grace_seconds=self._grace_seconds,
            launcher_pid=self._launcher_pid,
            on_orphaned=self._report_orphaned,
            lease_seconds=self._place.lease_seconds,
            on_preempted=self._report_preempted if sigterm_saves() else None,
        )
        guard.start()
        if _early_sigterm:
            os.kill(os.getpid(), signal.SIGTERM)
        launcher = plan.config.launcher
        nodes = plan.hardware.nodes
        address, port = self._place.rendezvous or (command.address, command.port)
        if nodes > 1:
            set_gloo_interface(address)
        os.environ[PARENT_VARIABLE] = str(os.getpid())
        prepare_ranks(plan, command.ranks_per_node)
        fork_server = (
            ForkServer(command, launcher.slow_phase_seconds) if command.is_forked else None
        )
        self._codes_are_ours = plan.config.script is None
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
        if command.prepare:
            from trainctl.data.prepare import assist_preparation, prepare

            # All nodes tokenize. With a shared cache, node 0 alone assembles the corpus, and the
            # others then find it there.
            if self._node > 0:
                assist_preparation(plan)
                rendezvous.await_mark("prepared", guard.block_if_stopping)
            if self._node == 0:
                shown = Heartbeat(self._attempt.preparation)
                prepare(
                    plan,
                    self._run,
                    self._tell_corpus,
                    lambda text: shown.beat(Phase.start, doing=text),
                )
                shown.beat(Phase.start, doing="starting the ranks")
            else:
                prepare(plan, self._run, self._tell_corpus)
            rendezvous.mark("prepared")

        code = 0
        oom_kills = host_oom_kills()
        # A user's program writes no heartbeats, so their absence means nothing.
        watch = HangDetector(
            self._attempt,
            heartbeat_seconds=inf if command.is_users else launcher.heartbeat_seconds,
            slow_phase_seconds=inf if command.is_users else launcher.slow_phase_seconds,
        )
        # All nodes compile the same operators: node 0 reports them.
        operators = needed_operators(plan.config, plan.hardware) if self._node == 0 else ()
        builds = BuildWatch(self._attempt, operators, self._report_build)

        def on_failure(failed: RankExit | HungRank) -> None:
            nonlocal code
            if isinstance(failed, RankExit):
                kills = host_oom_kills() - oom_kills
                code = self._report_exit(failed, command, kills)
            else:
                code = self._report_hung(failed)

        if command.is_users and self._node == 0:
            with EventWriter(self._run.events, self._attempt.number) as writer:
                writer.write("program", command=redact_argv(command.rank_command))
        stopping = guard.block_if_stopping
        joining = None
        if command.is_users and self._node == 0 and nodes * command.ranks_per_node > 1:
            joining = JoinWatch(rendezvous, self._report_not_joined)

        def look() -> None:
            builds.look()
            if joining is not None:
                joining.look()

        pids = start_ranks(command, rendezvous, self._tag, fork_server, stopping)
        if watch_ranks(pids, self._tag, guard, watch, look, self._grace_seconds, on_failure):
            if joining is not None:
                joining.look(at_end=True)
            rendezvous.wait_for_other_nodes(stopping)
        return code

    def _report_exit(self, ended: RankExit, command: AttemptCommand, oom_kills: int) -> int:
        """Record the failed rank, or the rank behind its failure; return the launch's exit code."""
        rank, return_code = ended.rank, ended.return_code
        where: dict[str, Any] = {"pid": ended.pid}
        culprit = self._rank_behind(ended.rank, len(command.nodes) * command.ranks_per_node)
        if culprit is not None:
            rank, return_code = culprit, 1
            node = command.nodes[culprit // command.ranks_per_node]
            where = {"pid": None, "node": node.node, "host": node.host}
        log = self._attempt.rank_log(rank)
        return_code = effective_return_code(return_code, log)
        fields = describe(
            return_code,
            log,
            host_oom_kills=oom_kills,
            disk_is_full=disk_is_full(self._run.root),
            uses_trainctl_codes=self._codes_are_ours,
        )
        cause = Cause(fields["cause"])
        code = exit_code(return_code, cause, uses_trainctl_codes=self._codes_are_ours)
        self._report(code, rank=rank, **where, **fields)
        return code

    def _report_hung(self, hung: HungRank) -> int:
        """Record the hung rank, and return the launch's exit code."""
        code = int(ExitCode.training_failed)
        self._report(
            code,
            rank=hung.rank,
            pid=hung.pid,
            cause=Cause.hung.value,
            message=hung.message,
            hint="the ranks' logs have the stacks of all that answered",
            log=str(self._attempt.rank_log(hung.rank)),
            log_tail=list(hung.details),
        )
        return code

    def _rank_behind(self, ended: int, ranks: int) -> int | None:
        """Return the rank whose error cost the ended rank its connection, if its log shows one.

        A rank that raised may still be unloading its libraries when its peers have already ended.
        """
        if not is_lost_peer(error_line(self._attempt.rank_log(ended))):
            return None
        for rank in range(ranks):
            error = error_line(self._attempt.rank_log(rank))
            if error and not is_lost_peer(error):
                return rank
        return None

    def _report(self, launch_exit_code: int, **fields: Any) -> None:
        """Append a `failure` record. A full disk must not keep the agent from ending the ranks.

        Args:
            launch_exit_code: Exit code of the launch, if this failure ends it.
        """
        record = {
            "launch_exit_code": launch_exit_code,
            "rank": None,
            "node": self._node,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "cause": Cause.reported.value,
            "exit_code": None,
            "signal": None,
            "hint": "",
            "log": str(self._attempt.agent_log(self._node)),
            "log_tail": [],
            **fields,
        }
        try:
            with EventWriter(self._run.events, self._attempt.number) as writer:
                writer.write("failure", **record)
        except OSError as error:
            with suppress(OSError):  # the log is on the same disk
                print(f"cannot record {record}: {error}", file=sys.stderr)

    def _report_build(self, operator: str, seconds: float | None) -> None:
        """Record that an operator is being compiled, or that it was compiled in `seconds`."""
        where = {"node": self._node, "host": socket.gethostname()}
        with suppress(OSError):  # a full disk, which others will report
            with EventWriter(self._run.events, self._attempt.number) as writer:
                writer.write("build", operator=operator, seconds=seconds, **where)

    def _report_not_joined(self, seconds: float) -> None:
        """Record that ranks of a user's program seem to train without each other."""
        with suppress(OSError):  # a full disk, which others will report
            with EventWriter(self._run.events, self._attempt.number) as writer:
                writer.write("not_joined", seconds=seconds)

    def _tell_corpus(self, message: str) -> None:
        """Record a message about the tokenized corpus."""
        print(message, file=sys.stderr, flush=True)
        with suppress(OSError):  # a full disk, which others will report
            with EventWriter(self._run.events, self._attempt.number) as writer:
                writer.write("corpus", message=message, host=socket.gethostname())

    def _report_preempted(self) -> None:
        """Record the preemption; the launcher then has all ranks save and end."""
        with suppress(OSError):  # a full disk: nothing could be saved either
            with EventWriter(self._run.events, self._attempt.number) as writer:
                writer.write("preempted", node=self._node, host=socket.gethostname())

    def _report_orphaned(self, loss: str) -> None:
        """Record the failure and status in place of a launcher that is gone. Only node 0 does."""
        if self._node > 0:
            return
        who = f"process {self._launcher_pid}"
        if self._place.lease_seconds is not None:
            who = "on another machine"
        message = f"the launcher ({who}) {loss}"
        self._report(
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
