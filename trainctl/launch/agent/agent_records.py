"""Records that an agent appends to the run's: failures of its ranks, builds, the corpus."""

from __future__ import annotations

import os
import socket
import sys
from contextlib import suppress
from typing import Any

from trainctl.errors import ExitCode
from trainctl.launch.agent.hang_detection import HungRank
from trainctl.launch.agent.ranks import RankExit
from trainctl.runs.command import AttemptCommand
from trainctl.runs.failures import (
    Cause,
    describe,
    disk_is_full,
    effective_return_code,
    error_line,
    exit_code,
    is_lost_peer,
)
from trainctl.runs.layout import AttemptPaths, RunPaths
from trainctl.runs.provenance import redact_argv
from trainctl.runs.records import EventWriter


class AgentRecords:
    """Writer of one agent's records. A full disk must not keep the agent from ending the ranks."""

    def __init__(self, run: RunPaths, attempt: AttemptPaths, node: int) -> None:
        self._run = run
        self._attempt = attempt
        self._node = node

    def write_program(self, command: AttemptCommand) -> None:
        """Record the command of a user's program."""
        with EventWriter(self._run.events, self._attempt.number) as writer:
            writer.write("program", command=redact_argv(command.rank_command))

    def write_build(self, operator: str, seconds: float | None) -> None:
        """Record that an operator is being compiled, or that it was compiled in `seconds`."""
        self._write(
            "build",
            operator=operator,
            seconds=seconds,
            node=self._node,
            host=socket.gethostname(),
        )

    def write_not_joined(self, seconds: float) -> None:
        """Record that ranks of a user's program seem to train without each other."""
        self._write("not_joined", seconds=seconds)

    def write_corpus(self, message: str) -> None:
        """Record a message about the tokenized corpus."""
        print(message, file=sys.stderr, flush=True)
        self._write("corpus", message=message, host=socket.gethostname())

    def write_preempted(self) -> None:
        """Record the preemption; the launcher then has all ranks save and end."""
        self._write("preempted", node=self._node, host=socket.gethostname())

    def write_rank_exit(
        self, ended: RankExit, command: AttemptCommand, oom_kills: int, *, uses_trainctl_codes: bool
    ) -> int:
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
            uses_trainctl_codes=uses_trainctl_codes,
        )
        cause = Cause(fields["cause"])
        code = exit_code(return_code, cause, uses_trainctl_codes=uses_trainctl_codes)
        self.write_failure(code, rank=rank, **where, **fields)
        return code

    def write_hang(self, hung: HungRank) -> int:
        """Record the hung rank, and return the launch's exit code."""
        code = int(ExitCode.training_failed)
        self.write_failure(
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

    def write_failure(self, launch_exit_code: int, **fields: Any) -> None:
        """Append a `failure` record; print it where that fails.

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

    def _write(self, kind: str, **fields: Any) -> None:
        with suppress(OSError):  # a full disk, which others report
            with EventWriter(self._run.events, self._attempt.number) as writer:
                writer.write(kind, **fields)
