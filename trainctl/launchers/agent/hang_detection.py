"""Detection of a hung rank: by its silence, then by the stacks of the ranks that still answer."""

from __future__ import annotations

import re
import signal
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from os import kill
from pathlib import Path

from trainctl.runs.failures import TAIL_LINES
from trainctl.runs.layout import AttemptPaths
from trainctl.runs.status import Beat, read_beat

_CHECK_SECONDS = 1.0
_ANSWER_SECONDS = 2.0
_POLL_SECONDS = 0.05
_COLLECTIVE = "distributed_c10d.py"


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


class HangDetector:
    """Monitor of the heartbeats of a node's ranks.

    Silence is added up between looks, and capped for each: time in which the agent itself was
    stopped, or the machine asleep, does not count against a rank.

    Args:
        heartbeat_seconds: Longest silence in a step.
        slow_phase_seconds: Longest silence while a rank starts, saves or ends.
    """

    def __init__(
        self, attempt: AttemptPaths, *, heartbeat_seconds: float, slow_phase_seconds: float
    ) -> None:
        self._attempt = attempt
        self._heartbeat_seconds = heartbeat_seconds
        self._slow_phase_seconds = slow_phase_seconds
        self._checked_at = time.monotonic()
        self._beats: dict[int, Beat] = {}
        self._silence: defaultdict[int, float] = defaultdict(float)

    def find_hung(self, pids: Mapping[int, int]) -> HungRank | None:
        """Return the rank to blame once a rank has been silent for too long. Looks once a second.

        In a collective all ranks fall silent together, so all are asked for their stacks. The rank
        to blame is one that does not answer, else one that is not in a collective, else the one
        that fell silent first.
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
        if not any(self._silence[rank] > self._allowance(rank) for rank in pids):
            return None
        stacks = self._collect_stacks(pids)
        rank = min(pids, key=lambda rank: (_blame_order(stacks.get(rank)), self._last_beat(rank)))
        return self._describe(rank, pids[rank], stacks.get(rank))

    def _last_beat(self, rank: int) -> float:
        beat = self._beats.get(rank)
        return beat.monotonic if beat else 0.0

    def _allowance(self, rank: int) -> float:
        beat = self._beats.get(rank)
        slow = beat is None or beat.phase.is_slow
        return self._slow_phase_seconds if slow else self._heartbeat_seconds

    def _collect_stacks(self, pids: Mapping[int, int]) -> dict[int, list[str]]:
        """Return the main thread's stack, innermost call first, of each rank that answers."""
        # A rank without a beat may have no signal handler yet: SIGUSR1 would kill it.
        log_sizes = {
            rank: _file_size(self._attempt.rank_log(rank)) for rank in pids if rank in self._beats
        }
        for rank in log_sizes:
            kill(pids[rank], signal.SIGUSR1)
        deadline = time.monotonic() + _ANSWER_SECONDS
        stacks: dict[int, list[str]] = {}
        while log_sizes.keys() - stacks.keys() and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
            for rank in log_sizes.keys() - stacks.keys():
                stack = _main_stack(self._attempt.rank_log(rank), log_sizes[rank])
                if stack:
                    stacks[rank] = stack
        return stacks

    def _describe(self, rank: int, pid: int, stack: list[str] | None) -> HungRank:
        beat = self._beats.get(rank)
        where = f"{beat.phase.value} after step {beat.step}" if beat else "its start"
        message = f"is hung: no sign of life for {self._silence[rank]:.0f} s (in {where})"
        if stack is not None:
            return HungRank(
                rank, pid, f"{message}; it is at {_innermost_call(stack)}", tuple(stack)
            )
        state = kernel_state(pid)
        return HungRank(rank, pid, f"{message}; it does not answer: {state[0]}", tuple(state))


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


def _blame_order(stack: list[str] | None) -> int:
    """Return 0 for a rank that did not answer, 1 for a busy one, 2 for one in a collective."""
    if stack is None:
        return 0
    return 2 if any(_COLLECTIVE in line for line in stack) else 1


def _main_stack(log: Path, offset: int) -> list[str]:
    """Return the main thread's stack, the last that faulthandler wrote after the offset, if any."""
    try:
        with log.open("rb") as stream:
            stream.seek(offset)
            lines = stream.read().decode(errors="replace").splitlines()
    except OSError:
        return []
    starts = [i for i, line in enumerate(lines) if line.endswith("(most recent call first):")]
    if not starts:
        return []
    frames = [line for line in lines[starts[-1] + 1 :] if line.startswith("  File ")]
    return frames[:TAIL_LINES]


def _innermost_call(stack: list[str]) -> str:
    found = re.match(r'  File "(.*)", line (\d+) in (.*)', stack[0])
    return f"{found[1]}:{found[2]} in {found[3]}" if found else stack[0].strip()


def _file_size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _read_text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
