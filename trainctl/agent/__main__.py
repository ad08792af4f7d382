"""`python -m trainctl.agent RUN_DIR --attempt N --node K`: started by a launcher, once a node."""

from __future__ import annotations

import argparse
import os
import socket
import sys
import traceback
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from trainctl.agent.guard import Guard, leave
from trainctl.errors import ExitCode, TrainctlError
from trainctl.runs.causes import Cause, disk_is_full, exit_code, host_oom_kills
from trainctl.runs.command import read_command
from trainctl.runs.directory import read_plan
from trainctl.runs.failures import describe, error_line, is_lost_peer, settle
from trainctl.runs.layout import RunPaths
from trainctl.runs.processes import PARENT_VARIABLE, RunTag, die_with_parent, sweep
from trainctl.runs.provenance import redact_argv
from trainctl.runs.records import EventWriter
from trainctl.runs.status import State, read_status, write_status

if TYPE_CHECKING:
    from trainctl.agent.elastic import RankExit
    from trainctl.agent.watch import HungRank


def main() -> NoReturn:
    """Supervise the node's ranks to their end; exits with the launch's exit code."""
    # By SIGKILL: until the guard is up there is no process but this one to end, and the import of
    # torch would keep any handler of ours waiting.
    die_with_parent()
    parser = argparse.ArgumentParser(prog="python -m trainctl.agent")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--attempt", type=int, required=True)
    parser.add_argument("--node", type=int, required=True)
    arguments = parser.parse_args()
    Agent(RunPaths(arguments.run_dir), arguments.attempt, arguments.node).run()


class Agent:
    """One node of one attempt.

    Args:
        run: The run.
        attempt: Number of the attempt.
        node: Number of this node.
    """

    def __init__(self, run: RunPaths, attempt: int, node: int) -> None:
        self._run = run
        self._attempt = run.attempt(attempt)
        self._node = node
        self._tag = RunTag.from_environment(os.environ)
        self._launcher_pid = int(os.environ[PARENT_VARIABLE])
        self._grace_seconds = 0.0
        self._codes_are_ours = True

    def run(self) -> NoReturn:
        """Prepare, run the ranks, leave nothing behind, end with the launch's exit code."""
        try:
            code = self._supervise()
        except TrainctlError as error:
            self._report(message=error.message, hint=error.hint, exit_code=int(error.exit_code))
            code = int(error.exit_code)
        except Exception as error:
            traceback.print_exc()
            message = f"the agent failed: {type(error).__name__}: {error}"
            self._report(message=message, exit_code=int(ExitCode.internal_error))
            code = int(ExitCode.internal_error)
        sweep(self._tag, grace_seconds=self._grace_seconds)
        leave(code)

    def _supervise(self) -> int:
        from trainctl.agent.elastic import RankExit, run_ranks
        from trainctl.agent.watch import Watch

        plan = read_plan(self._attempt.plan)
        command = read_command(self._attempt)
        self._grace_seconds = plan.config.launcher.grace_seconds
        guard = Guard(
            self._tag,
            grace_seconds=self._grace_seconds,
            launcher_pid=self._launcher_pid,
            on_orphaned=self._report_orphaned,
        )
        guard.start()
        self._codes_are_ours = plan.config.script is None
        if command.prepare:
            from trainctl.train.prepare import prepare

            prepare(plan, self._run)

        code = 0
        oom_kills = host_oom_kills()
        launcher = plan.config.launcher
        # A program of the user's gives no signs of life, so their absence tells nothing.
        watch = Watch(
            self._attempt,
            heartbeat_seconds=inf if command.is_users else launcher.heartbeat_seconds,
            slow_phase_seconds=inf if command.is_users else launcher.slow_phase_seconds,
        )

        def on_failure(failed: RankExit | HungRank) -> None:
            nonlocal code
            if isinstance(failed, RankExit):
                kills = host_oom_kills() - oom_kills
                code = self._report_exit(failed, command.ranks_per_node, kills)
            else:
                code = self._report_hung(failed)

        if command.is_users:
            with EventWriter(self._run.events, self._attempt.number) as writer:
                writer.write("program", command=redact_argv(command.rank_command))
        run_ranks(command, self._tag, guard, watch, self._grace_seconds, on_failure)
        return code

    def _report_exit(self, ended: RankExit, ranks: int, oom_kills: int) -> int:
        """Record the rank that failed, or the one that this comes from; the launch's exit code."""
        rank, return_code = ended.rank, ended.return_code
        pid: int | None = ended.pid
        culprit = self._rank_behind(ended.rank, ranks)
        if culprit is not None:
            rank, pid, return_code = culprit, None, 1
        log = self._attempt.rank_log(rank)
        return_code = settle(return_code, log)
        fields = describe(
            return_code,
            log,
            host_oom_kills=oom_kills,
            disk_is_full=disk_is_full(self._run.root),
            codes_are_ours=self._codes_are_ours,
        )
        self._report(rank=rank, pid=pid, **fields)
        cause = Cause(fields["cause"])
        return exit_code(return_code, cause, codes_are_ours=self._codes_are_ours)

    def _report_hung(self, hung: HungRank) -> int:
        """Record the rank that hangs; the launch's exit code."""
        self._report(
            rank=hung.rank,
            pid=hung.pid,
            cause=Cause.hung.value,
            message=hung.message,
            hint="the ranks' logs have the stacks of all that answered",
            log=str(self._attempt.rank_log(hung.rank)),
            log_tail=list(hung.details),
        )
        return int(ExitCode.training_failed)

    def _rank_behind(self, ended: int, ranks: int) -> int | None:
        """The rank whose error a lost connection of the ended rank comes from, if its log tells.

        A rank that raised may still be unloading its libraries when its peers are already gone.
        """
        if not is_lost_peer(error_line(self._attempt.rank_log(ended))):
            return None
        for rank in range(ranks):
            error = error_line(self._attempt.rank_log(rank))
            if error and not is_lost_peer(error):
                return rank
        return None

    def _report(self, **fields: Any) -> None:
        """Append a `failure` record; a full disk must not keep the agent from ending the ranks."""
        record = {
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

    def _report_orphaned(self) -> None:
        """What the launcher would have written, had it lived."""
        message = f"the launcher (process {self._launcher_pid}) ended without stopping this attempt"
        self._report(
            cause=Cause.killed.value, message=message, hint="continue with `trainctl resume`"
        )
        status = read_status(self._run)
        if status is not None and status.attempt == self._attempt.number:
            write_status(self._run, status.changed(State.failed, message=message))


if __name__ == "__main__":
    main()
