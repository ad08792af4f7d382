"""The ranks of a node under torch's elastic agent, which starts, numbers, watches and stops them.

Three things differ from its defaults. The rendezvous is our own (`trainctl.agent.rendezvous`). A
rank's death is seen before elastic reaps it, so the first to fail is known, and all others end
within one grace (elastic waits 30 seconds for each step). Each rank opens its own log
(`trainctl.runs.rank_entry`).
"""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, SignalException

from trainctl.agent.builds import BuildWatch
from trainctl.agent.guard import SignalGuard
from trainctl.agent.rendezvous import NodeRendezvous
from trainctl.agent.watch import HungRank, Watch
from trainctl.runs.command import AttemptCommand
from trainctl.runs.processes import PARENT_VARIABLE, SIGTERM_SAVES_VARIABLE, RunTag, sweep

_MONITOR_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class RankExit:
    """A rank that ended with an error.

    Attributes:
        rank: Its number in the world.
        pid: Number of its process.
        return_code: Negative is a signal, as `subprocess` has it.
    """

    rank: int
    pid: int
    return_code: int


def run_ranks(
    command: AttemptCommand,
    rendezvous: NodeRendezvous,
    tag: RunTag,
    guard: SignalGuard,
    watch: Watch,
    builds: BuildWatch,
    grace_seconds: float,
    on_failure: Callable[[RankExit | HungRank], None],
) -> None:
    """Start the ranks of this node and wait for all to end.

    Args:
        command: What to start.
        rendezvous: Where it meets those of other nodes.
        tag: What all processes of the attempt carry.
        guard: Has the signals.
        watch: Finds a rank that hangs.
        builds: Finds what the ranks compile before they train.
        grace_seconds: Between SIGTERM and SIGKILL for the ranks that outlive the first failure.
        on_failure: Called at once with the first rank that fails, before the others are stopped.
    """
    os.environ[PARENT_VARIABLE] = str(os.getpid())
    # The guard has the signals; elastic would raise in the middle of starting a rank.
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGQUIT"
    # It calls a rank that was stopped after the first failure the first failure.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    spec = WorkerSpec(
        role="rank",
        local_world_size=command.ranks_per_node,
        entrypoint=sys.executable,
        args=("-m", "trainctl.runs.rank_entry"),
        rdzv_handler=rendezvous,
        max_restarts=0,
        monitor_interval=_MONITOR_SECONDS,
        master_addr=rendezvous.address,
        master_port=rendezvous.port,
    )
    agent = RankAgent(spec, tag, guard, watch, builds, grace_seconds, on_failure)
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
        guard: SignalGuard,
        watch: Watch,
        builds: BuildWatch,
        grace_seconds: float,
        on_failure: Callable[[RankExit | HungRank], None],
    ) -> None:
        super().__init__(spec, logs_specs=RankLogs())
        self._tag = tag
        self._guard = guard
        self._watch = watch
        self._builds = builds
        self._grace_seconds = grace_seconds
        self._on_failure = on_failure
        self._has_failed = False

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        # Ranks inherit the mask: `rank_entry` says what SIGTERM means to them before one arrives.
        blocked = {signal.SIGTERM} if SIGTERM_SAVES_VARIABLE in os.environ else set()
        signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
        try:
            # Elastic has no hook around the start of its ranks, nor one for a look at them below.
            started = super()._start_workers(worker_group)
        finally:
            self._guard.claim_signals()
            signal.pthread_sigmask(signal.SIG_UNBLOCK, blocked)
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
            self._builds.look()
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


def _return_code(pid: int) -> int | None:
    """How a child ended, or None while it runs; it stays a zombie for elastic to reap."""
    found = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if found is None:
        return None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
