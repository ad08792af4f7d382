"""Detection of a hung rank: by its silence, then by what the ranks that still answer tell."""

from __future__ import annotations

import signal
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from os import kill
from pathlib import Path

from trainctl.config.reading import read_json
from trainctl.launchers.agent.flight_records import RankState, StuckCollective, find_stuck
from trainctl.runs.failures import TAIL_LINES
from trainctl.runs.files import ensure_folder
from trainctl.runs.layout import AttemptPaths
from trainctl.runs.processes import wait_while
from trainctl.runs.status import Beat, read_beat

_CHECK_SECONDS = 1.0
_ANSWER_SECONDS = 3.0
_NODES_ANSWER_SECONDS = 10.0
"""Longest wait for the ranks of other nodes, whose agents look once a second."""
_FAILED_SECONDS = 1.0
"""Longest wait for a rank whose call has failed to write so."""
_POLL_SECONDS = 0.05
_COLLECTIVE = "distributed_c10d.py"
_MOST_READ = 1 << 20
"""Bytes from the end of a log in which a stack is looked for; one takes some kB."""


@dataclass(frozen=True, slots=True)
class HungRank:
    """A rank that gives no sign of life."""

    rank: int
    """Global rank."""
    pid: int
    message: str
    """Description of the hang, to follow "rank N" in a sentence."""
    details: tuple[str, ...]
    """Lines of its stack if it answered, else of its state in `/proc`."""
    stuck: StuckCollective | None
    """Collective that the ranks wait in, if their records show one."""


class HangDetector:
    """Monitor of the heartbeats of a node's ranks.

    Silence is added up between looks, and capped for each: time in which the agent itself was
    stopped, or the machine asleep, does not count against a rank.

    Args:
        heartbeat_seconds: Longest silence in a step.
        slow_phase_seconds: Longest silence while a rank starts, saves or ends.
    """

    def __init__(
        self,
        attempt: AttemptPaths,
        *,
        heartbeat_seconds: float,
        slow_phase_seconds: float,
        world_size: int,
    ) -> None:
        self._attempt = attempt
        self._heartbeat_seconds = heartbeat_seconds
        self._slow_phase_seconds = slow_phase_seconds
        self._world = range(world_size)
        self._checked_at = time.monotonic()
        self._beats: dict[int, Beat] = {}
        self._silence: defaultdict[int, float] = defaultdict(float)
        self._has_answered = False

    def find_hung(self, pids: Mapping[int, int]) -> HungRank | None:
        """Return the rank to blame once a rank has been silent for too long. Looks once a second.

        In a collective all ranks fall silent together, so all ranks of all nodes are asked for
        their stacks and collectives. The rank to blame is one that has not entered the collective
        which does not end. If their records show none, it is a rank that does not answer, else one
        that is not in a collective, else the one that fell silent first.
        """
        interval = min(_CHECK_SECONDS, self._heartbeat_seconds / 4)
        since = time.monotonic() - self._checked_at
        if since < interval:
            return None
        self._checked_at += since
        for rank in pids:
            beat = read_beat(self._attempt.heartbeat(rank))
            if beat is not None and beat != self._beats.get(rank):
                self._beats[rank] = beat
                self._silence[rank] = 0.0
            self._silence[rank] += min(since, 2 * interval)
        if any(self._silence[rank] > self._allowance(rank) for rank in pids):
            return self._blame(pids, self.ask_ranks(pids, wait_for_nodes=True))
        if not self._has_answered and self._attempt.flight_request.exists():
            self._has_answered = True  # the agent of another node has found a rank silent
            self._signal_ranks(pids)
        return None

    def find_interrupted(self, pids: Mapping[int, int]) -> StuckCollective | None:
        """Return the collective that the end of a rank has interrupted on others.

        A rank whose call has just failed may answer that no call is open; it writes again, as
        `write_failed_record` does, before it ends.

        Args:
            pids: Live ranks of this node.
        """
        stuck = find_stuck(self.ask_ranks(pids))
        deadline = time.monotonic() + _FAILED_SECONDS
        while stuck is None and pids and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
            stuck = find_stuck(self.ask_ranks({}))
        return stuck

    def _last_beat(self, rank: int) -> float:
        beat = self._beats.get(rank)
        return beat.monotonic if beat else 0.0

    def _allowance(self, rank: int) -> float:
        beat = self._beats.get(rank)
        slow = beat is None or beat.phase.is_slow
        return self._slow_phase_seconds if slow else self._heartbeat_seconds

    def ask_ranks(
        self, pids: Mapping[int, int], *, wait_for_nodes: bool = False
    ) -> dict[int, RankState]:
        """Return what each rank of the run is doing, once all have answered or the time is over.

        Args:
            pids: Live ranks of this node.
            wait_for_nodes: Whether to wait for the other nodes' ranks too.
        """
        with suppress(OSError):  # a full disk: the logs' stacks remain
            ensure_folder(self._attempt.flight_request.parent)
            self._attempt.flight_request.touch()
        log_sizes = self._signal_ranks(pids)
        is_local = len(pids) == len(self._world) or not wait_for_nodes
        awaited = log_sizes.keys() if is_local else self._world
        wait_while(
            lambda: not all(self._attempt.flight_record(rank).exists() for rank in awaited),
            _ANSWER_SECONDS if is_local else _NODES_ANSWER_SECONDS,
        )
        # The log of a rank that has died may end with its stack.
        offsets = {rank: 0 for rank in self._world if rank not in pids} | log_sizes
        return {
            rank: self._state_of(rank, pids.get(rank), offsets.get(rank)) for rank in self._world
        }

    def _signal_ranks(self, pids: Mapping[int, int]) -> dict[int, int]:
        """Ask ranks to answer; return the sizes of their logs before they do, by rank."""
        # A rank without a beat may have no signal handler yet: SIGUSR1 would kill it.
        ranks = [rank for rank in pids if self._attempt.heartbeat(rank).exists()]
        log_sizes = {rank: _file_size(self._attempt.rank_log(rank)) for rank in ranks}
        for rank in ranks:
            kill(pids[rank], signal.SIGUSR1)
        return log_sizes

    def _state_of(self, rank: int, pid: int | None, log_offset: int | None) -> RankState:
        """Return the answer of a rank.

        Args:
            pid: Its process; None if it has ended or is on another node.
            log_offset: Place in its log behind which a stack counts; None if there is no log yet.
        """
        try:
            record = read_json(self._attempt.flight_record(rank))
            return RankState(record, record["stack"])
        except (OSError, ValueError):
            log = self._attempt.rank_log(rank)
            stack = [] if log_offset is None else _main_stack(log, log_offset)
        if pid is None:
            return RankState(None, stack, "has ended or does not answer")
        return RankState(None, stack, f"does not answer: {kernel_state(pid)[0]}")

    def _blame(self, pids: Mapping[int, int], states: Mapping[int, RankState]) -> HungRank:
        stuck = find_stuck(states)
        missing = [rank for rank in pids if stuck is not None and rank in stuck.elsewhere]
        rank = min(
            missing or pids,
            key=lambda rank: (_blame_order(states[rank].stack), self._last_beat(rank)),
        )
        beat = self._beats.get(rank)
        where = f"{beat.phase.value} after step {beat.step}" if beat else "its start"
        message = f"is hung: no sign of life for {self._silence[rank]:.0f} s (in {where})"
        message += f"; {stuck.sentence}" if stuck else f"; it {states[rank].place}"
        details = states[rank].stack or kernel_state(pids[rank])
        return HungRank(rank, pids[rank], message, tuple(details[:TAIL_LINES]), stuck)


def kernel_state(pid: int) -> list[str]:
    """Return lines from `/proc` about a process that does not answer, its state first."""
    lines = []
    folder = Path("/proc", str(pid))
    for line in _read_text(folder / "status").splitlines():
        if line.startswith("State:"):
            lines.append("process state " + " ".join(line.split()[1:]))
    lines = lines or ["process state unknown"]
    waits_in = _read_text(folder / "wchan").strip()
    if waits_in not in ("", "0"):
        lines.append(f"waits in {waits_in}")
    return [*lines, *_read_text(folder / "stack").splitlines()]  # only root can read the stack


def _blame_order(stack: Sequence[str]) -> int:
    """Return 0 for a rank that did not answer, 1 for a busy one, 2 for one in a collective."""
    if not stack:
        return 0
    return 2 if any(_COLLECTIVE in line for line in stack) else 1


def _main_stack(log: Path, offset: int) -> list[str]:
    """Return the main thread's stack, the last that faulthandler wrote after the offset, if any.

    Only the end of a log is read: logs may be large, and on another machine's disk.
    """
    try:
        with log.open("rb") as stream:
            stream.seek(max(offset, _file_size(log) - _MOST_READ))
            lines = stream.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    starts = [i for i, line in enumerate(lines) if line.endswith("(most recent call first):")]
    if not starts:
        return []
    return [line for line in lines[starts[-1] + 1 :] if line.startswith("  File ")]


def _file_size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _read_text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
