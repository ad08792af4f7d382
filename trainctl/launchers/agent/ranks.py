"""Ranks of a node: started with torchrun's variables, watched, and ended together.

Where possible, ranks are forked by a fork server (`trainctl.train.__main__`). Importing torch,
transformers and DeepSpeed costs some seconds of CPU time, and the server imports once for all ranks
of a node, while the agent prepares the corpus. Else each rank is started as a command.

When one fails, all others are ended within one grace period. A rank that ended stays a zombie, so
that its pid is not reused while the others are asked for their stacks.
"""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from trainctl.errors import ExitCode
from trainctl.launchers.agent.flight_records import StuckCollective
from trainctl.launchers.agent.guard import SignalGuard, terminate_with_builds
from trainctl.launchers.agent.hang_detection import HangDetector, HungRank
from trainctl.launchers.agent.rendezvous import NodeRendezvous
from trainctl.runs.command import FORK_FLAG, AttemptCommand
from trainctl.runs.failures import (
    Cause,
    describe_exit,
    disk_fault,
    effective_return_code,
    error_line,
    exit_code,
    is_lost_peer,
)
from trainctl.runs.layout import AttemptPaths, RunPaths
from trainctl.runs.processes import STORE_VARIABLE, RunTag, adopt_orphans, block_sigterm
from trainctl.runs.provenance import redact_argv
from trainctl.runs.records import EventWriter

_LOOK_SECONDS = 0.02

_POLL_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class RankExit:
    """A rank that ended with an error."""

    rank: int
    """Global rank."""
    pid: int
    return_code: int
    """Exit code, or a negative signal number, as in `subprocess`."""


def start_ranks(
    command: AttemptCommand,
    rendezvous: NodeRendezvous,
    tag: RunTag,
    fork_server: ForkServer | None,
    check_stop: Callable[[], None],
) -> dict[int, int]:
    """Start the ranks of this node, and return the pid of each rank.

    Args:
        fork_server: Fork server for the ranks; if it was killed, its pid stands for the first rank.
            None starts each rank as a command.
        check_stop: Called again and again; does not return when this process is to end.
    """
    variables = torchrun_variables(command, rendezvous)
    pids = None
    if fork_server is not None:
        pids = fork_server.fork(variables, check_stop)
        if pids is None:
            terminate_with_builds(tag, grace_seconds=0)  # the server may have forked some ranks
    if pids is None:
        pids = [_start_rank(of_rank) for of_rank in variables]
    return {int(of_rank["RANK"]): pid for of_rank, pid in zip(variables, pids, strict=False)}


def torchrun_variables(command: AttemptCommand, rendezvous: NodeRendezvous) -> list[dict[str, str]]:
    """Return the environment variables of each rank of this node, as torchrun sets them."""
    ranks, nodes = command.ranks_per_node, len(command.nodes)
    node, world = rendezvous.node, ranks * nodes
    common = {
        "GROUP_RANK": str(node),
        "GROUP_WORLD_SIZE": str(nodes),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": rendezvous.address,
        "MASTER_PORT": str(rendezvous.port),
        "ROLE_NAME": "rank",
        "ROLE_WORLD_SIZE": str(world),
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": rendezvous.run_id,
        "TORCHELASTIC_USE_AGENT_STORE": str(rendezvous.file is None),
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1"),
        "WORLD_SIZE": str(world),
    }
    if rendezvous.file is not None:
        common[STORE_VARIABLE] = str(rendezvous.file)
    return [
        {**common, "LOCAL_RANK": str(local), "RANK": str(rank), "ROLE_RANK": str(rank)}
        for local, rank in enumerate(range(node * ranks, (node + 1) * ranks))
    ]


def watch_ranks(
    pids: Mapping[int, int],
    tag: RunTag,
    guard: SignalGuard,
    watch: HangDetector,
    look: Callable[[], None],
    grace_seconds: float,
    on_failure: Callable[[RankExit | HungRank, Mapping[int, int]], None],
) -> bool:
    """Wait until all ranks have ended. Return True if all of them succeeded.

    Args:
        look: Called again and again while ranks live.
        grace_seconds: Time between SIGTERM and SIGKILL for the ranks that outlive the first
            failure.
        on_failure: Called at once with the first rank that fails and the pids of those that live,
            before these are stopped.
    """
    while True:
        codes = {rank: _return_code(pid) for rank, pid in pids.items()}
        # Check after reading the codes: a rank that the guard ended has not failed.
        guard.block_if_stopping()
        alive = {rank: pids[rank] for rank, code in codes.items() if code is None}
        failed = [RankExit(rank, pids[rank], code) for rank, code in codes.items() if code]
        if failed:
            # Killed ranks first: their peers fail a moment later by a broken connection.
            first = min(failed, key=lambda ended: (ended.return_code > 0, ended.rank))
            on_failure(first, alive)
            terminate_with_builds(tag, grace_seconds=grace_seconds)
            return False
        if not alive:
            return True
        look()
        hung = watch.find_hung(alive)
        if hung is not None:
            on_failure(hung, alive)
            terminate_with_builds(tag, grace_seconds=0)  # peers wait for it, and it may be stopped
            return False
        time.sleep(_LOOK_SECONDS)


def _start_rank(variables: Mapping[str, str]) -> int:
    """Start a rank as a command. Until it opens its own log, it writes to the agent's log."""
    with block_sigterm():
        started = subprocess.Popen(
            [sys.executable, "-P", "-m", "trainctl.runs.command"],
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    return started.pid


def _return_code(pid: int) -> int | None:
    """Return the exit code of a child, a negative signal number, or None while it runs."""
    found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


class ForkServer:
    """The agent's handle on the fork server; creating it starts the server."""

    def __init__(self, command: AttemptCommand, patience_seconds: float) -> None:
        self._deadline = time.monotonic() + patience_seconds
        adopt_orphans()
        with block_sigterm():
            self._process = subprocess.Popen(
                [*command.rank_command, FORK_FLAG],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                start_new_session=True,
            )

    def fork(
        self, variables: Sequence[Mapping[str, str]], check_stop: Callable[[], None]
    ) -> list[int] | None:
        """Fork one rank for each set of variables, and return their pids: children of this process.

        If the server was killed, return its pid alone: its exit status stands for the first rank.
        Return None if it failed by itself or took too long; the ranks then report the error when
        they import.

        Args:
            check_stop: Called again and again; does not return when this process is to end.
        """
        request, answer = self._process.stdin, self._process.stdout
        assert request is not None and answer is not None
        with answer:
            with suppress(BrokenPipeError), request:
                request.write(json.dumps([dict(of_rank) for of_rank in variables]).encode() + b"\n")
            answered = b""
            while not answered.endswith(b"\n"):
                check_stop()
                if select.select([answer], [], [], _POLL_SECONDS)[0]:
                    part = os.read(answer.fileno(), 1 << 16)
                    if not part:
                        break
                    answered += part
                elif time.monotonic() > self._deadline:
                    self._process.kill()
                    return None
        ended = os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        if ended is None or ended.si_code != os.CLD_EXITED:
            return [self._process.pid]
        if self._process.wait() != 0:
            return None
        pids: list[int] = json.loads(answered)
        return pids


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
            "build", operator=operator, seconds=seconds, node=self._node, host=socket.gethostname()
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
        self,
        ended: RankExit,
        command: AttemptCommand,
        oom_kills: int,
        find_interrupted: Callable[[], StuckCollective | None],
        *,
        uses_trainctl_codes: bool,
    ) -> int:
        """Record the failed rank, or the rank behind its failure; return the launch's exit code.

        Args:
            find_interrupted: Returns the collective that the others wait in, for a failure of one.
        """
        rank, return_code = ended.rank, ended.return_code
        where: dict[str, Any] = {"pid": ended.pid}
        culprit = self._rank_behind(ended.rank, len(command.nodes) * command.ranks_per_node)
        if culprit is not None:
            rank, return_code = culprit, 1
            node = command.nodes[culprit // command.ranks_per_node]
            where = {"pid": None, "node": node.node, "host": node.host}
        log = self._attempt.rank_log(rank)
        return_code = effective_return_code(return_code, log)
        fields = describe_exit(
            return_code,
            log,
            host_oom_kills=oom_kills,
            disk=disk_fault(self._run.root),
            uses_trainctl_codes=uses_trainctl_codes,
        )
        cause = Cause(fields["cause"])
        code = exit_code(return_code, cause, uses_trainctl_codes=uses_trainctl_codes)
        stuck = find_interrupted() if cause.is_of_collective else None
        if stuck is not None:
            fields |= {
                "message": f"{fields['message']}; {stuck.sentence}",
                "collective": asdict(stuck),
            }
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
            collective=hung.stuck and asdict(hung.stuck),
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
            "collective": None,
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
