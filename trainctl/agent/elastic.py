"""The ranks of a node under torch's elastic agent, which starts, numbers, watches and stops them.

Three things differ from its defaults. The rendezvous store listens on a socket that is already
bound, so no port can be taken in between. A rank's death is seen before elastic reaps it, so the
first to fail is known, and all others end within one grace (elastic waits 30 seconds for each
step). Each rank opens its own log (`trainctl.runs.rank_entry`).
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, TCPStore
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
)

from trainctl.agent.guard import Guard
from trainctl.agent.watch import HungRank, Watch
from trainctl.errors import ExitCode, TrainctlError
from trainctl.runs.command import AttemptCommand
from trainctl.runs.processes import PARENT_VARIABLE, RunTag, sweep

LOOPBACK = "127.0.0.1"
_MONITOR_SECONDS = 0.02
_STORE_TIMEOUT = timedelta(seconds=300)


@dataclass(frozen=True, slots=True)
class RankExit:
    """A rank that ended with an error.

    Attributes:
        rank: In the world.
        pid: Of its process.
        return_code: Negative is a signal, as `subprocess` has it.
    """

    rank: int
    pid: int
    return_code: int


def run_ranks(
    command: AttemptCommand,
    tag: RunTag,
    guard: Guard,
    watch: Watch,
    grace_seconds: float,
    on_failure: Callable[[RankExit | HungRank], None],
) -> None:
    """Start the ranks of this node and wait for all to end.

    Args:
        command: What to start.
        tag: What all processes of the attempt carry.
        guard: Has the signals.
        watch: Finds a rank that hangs.
        grace_seconds: Between SIGTERM and SIGKILL for the ranks that outlive the first failure.
        on_failure: Called at once with the first rank that fails, before the others are stopped.

    Raises:
        TrainctlError: The rendezvous port is taken.
    """
    os.environ[PARENT_VARIABLE] = str(os.getpid())
    # It calls a rank that was stopped after the first failure the first failure.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    rendezvous = NodeRendezvous(tag.run_id, command.port)
    spec = WorkerSpec(
        role="rank",
        local_world_size=command.ranks_per_node,
        entrypoint=sys.executable,
        args=("-m", "trainctl.runs.rank_entry"),
        rdzv_handler=rendezvous,
        max_restarts=0,
        monitor_interval=_MONITOR_SECONDS,
        master_addr=LOOPBACK,
        master_port=rendezvous.port,
    )
    agent = RankAgent(spec, tag, guard, watch, grace_seconds, on_failure)
    try:
        agent.run()
    except SignalException:  # elastic's handlers are in place for a moment, while it starts ranks
        guard.wait_for_end()


class RankAgent(LocalElasticAgent):
    """Elastic's agent for one node; the arguments are those of `run_ranks`."""

    def __init__(
        self,
        spec: WorkerSpec,
        tag: RunTag,
        guard: Guard,
        watch: Watch,
        grace_seconds: float,
        on_failure: Callable[[RankExit | HungRank], None],
    ) -> None:
        super().__init__(spec, logs_specs=RankLogs())
        self._tag = tag
        self._guard = guard
        self._watch = watch
        self._grace_seconds = grace_seconds
        self._on_failure = on_failure
        self._has_failed = False

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        started = super()._start_workers(worker_group)
        self._guard.claim_signals()
        return started

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        codes = {worker: _return_code(worker.id) for worker in worker_group.workers}
        # After the look at the ranks: one that the guard ended has not failed.
        self._guard.yield_if_stopping()
        failed = [
            RankExit(worker.global_rank, worker.id, code)
            for worker, code in codes.items()
            if code not in (None, 0)
        ]
        alive = {worker.global_rank: worker.id for worker, code in codes.items() if code is None}
        if not failed and alive:
            hung = self._watch.find_hung(alive)
            if hung is None:
                return RunResult(state=WorkerState.HEALTHY)
            self._report(hung)
            sweep(self._tag, grace_seconds=0)  # its peers wait for it, and it may be stopped
        if failed:
            # A peer of a killed rank fails a moment later by a broken connection, hence this order.
            self._report(min(failed, key=lambda ended: (ended.return_code > 0, ended.rank)))
            sweep(self._tag, grace_seconds=self._grace_seconds)
        return super()._monitor_workers(worker_group)

    def _report(self, failed: RankExit | HungRank) -> None:
        """Only the first: what follows are the ranks that were ended for it."""
        if not self._has_failed:
            self._has_failed = True
            self._on_failure(failed)


class RankLogs(LogsSpecs):
    """Leaves both streams of the ranks to `trainctl.runs.rank_entry`."""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Nothing is redirected by elastic: until a rank has its log, it writes to the agent's."""
        inherited = dict.fromkeys(envs, "")
        return LogsDest(stdouts=inherited, stderrs=inherited, error_files=inherited)

    @property
    def root_log_dir(self) -> str:
        return ""


class NodeRendezvous(RendezvousHandler):
    """A single node's rendezvous: a store on the loopback address, on a socket bound here.

    Args:
        run_id: Prefix of the store's keys.
        port: To listen on; None takes a free one.

    Raises:
        TrainctlError: The port is taken (exit code 4).
    """

    def __init__(self, run_id: str, port: int | None) -> None:
        self._run_id = run_id
        listener = _listen(port)
        self.port: int = listener.getsockname()[1]
        self._store = TCPStore(
            LOOPBACK,
            self.port,
            world_size=1,
            is_master=True,
            timeout=_STORE_TIMEOUT,
            master_listen_fd=listener.detach(),
        )

    def get_backend(self) -> str:
        return "trainctl"

    @property
    def use_agent_store(self) -> bool:
        """The ranks use this store; none of them has to find a port."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """This node is the only one."""
        store = PrefixStore(self._run_id, self._store)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(LOOPBACK, self.port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Nothing waits for it."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


def _listen(port: int | None) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((LOOPBACK, port or 0))
        listener.listen(socket.SOMAXCONN)
    except OSError as error:
        listener.close()
        raise TrainctlError(
            f"launcher.port={port} on {LOOPBACK}: {error.strerror}",
            hint="launcher.port=null takes a free one",
            exit_code=ExitCode.environment,
        ) from None
    return listener


def _return_code(pid: int) -> int | None:
    """How a child ended, or None while it runs; it stays a zombie for elastic to reap."""
    found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
