"""Logs of an attempt: their owners, their hosts, and the lines appended to them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainctl.config.reading import open_file
from trainctl.runs.command import read_command
from trainctl.runs.failures import log_tail
from trainctl.runs.layout import AttemptPaths

_CHUNK_BYTES = 1 << 20
LONGEST_LINE = 1_000_000
"""Characters of a line that are shown: a program may write for days without a newline."""
_PROGRAMS = ("launcher", "srun", "mpirun")
"""Logs that belong to no single node."""


@dataclass(frozen=True, slots=True)
class Log:
    """A log file of an attempt."""

    path: Path
    label: str
    """Name of its process, such as `rank 3 on node-b`."""


def logs_of(attempt: AttemptPaths, ranks: Sequence[int] = ()) -> list[Log]:
    """Return the existing logs: of the launcher, of srun or mpirun, of the agents, of the ranks.

    Args:
        ranks: Only logs of these ranks; empty returns all logs.
    """
    try:
        names = {path.name for path in attempt.logs.iterdir()}
    except OSError:
        return []
    hosts, per_node = _places(attempt)
    found = []
    for name in () if ranks else _PROGRAMS:
        if f"{name}.log" in names:
            found.append(Log(attempt.logs / f"{name}.log", name))
    for number in [] if ranks else _numbers(names, "agent"):
        found.append(Log(attempt.agent_log(number), f"agent {number}{_host_suffix(hosts, number)}"))
    for rank in _numbers(names, "rank"):
        if not ranks or rank in ranks:
            where = _host_suffix(hosts, rank // per_node) if per_node else ""
            found.append(Log(attempt.rank_log(rank), f"rank {rank}{where}"))
    return found


def tail_logs(logs: Sequence[Log], lines: int) -> Iterator[tuple[Log, list[str]]]:
    """Yield the last lines of each log that has any."""
    for log in logs:
        tail = log_tail(log.path, lines)
        if tail:
            yield log, tail


class LogFollower:
    """Reads whole lines as they are appended to the logs of an attempt, new logs included.

    Args:
        ranks: Only logs of these ranks; empty follows all logs.
    """

    def __init__(self, attempt: AttemptPaths, ranks: Sequence[int] = ()) -> None:
        self._attempt = attempt
        self._ranks = ranks
        self._offsets = {log.path: _size(log.path) for log in logs_of(attempt, ranks)}
        self._partial: dict[Path, tuple[bytes, int]] = {}  # last line so far, and length cut

    def poll(self) -> Iterator[tuple[Log, str]]:
        """Yield the lines since the last call, or since the follower was made."""
        for log in logs_of(self._attempt, self._ranks):
            try:
                with open_file(log.path) as stream:
                    stream.seek(self._offsets.get(log.path, 0))
                    data = stream.read(_CHUNK_BYTES)
            except OSError:
                continue
            self._offsets[log.path] = self._offsets.get(log.path, 0) + len(data)
            kept, dropped = self._partial.get(log.path, (b"", 0))
            *lines, rest = data.split(b"\n")
            for line in lines:
                text = (kept + line).decode(errors="replace")
                yield log, cut_line(text, len(text) + dropped)
                kept, dropped = b"", 0
            kept += rest
            dropped += max(0, len(kept) - LONGEST_LINE)
            self._partial[log.path] = kept[:LONGEST_LINE], dropped


def cut_line(line: str, length: int | None = None) -> str:
    """Cut a line of more than `LONGEST_LINE` characters, and mark it as cut.

    Args:
        length: Length of the whole line, where `line` is its beginning.
    """
    length = len(line) if length is None else length
    if length <= LONGEST_LINE:
        return line
    return f"{line[:LONGEST_LINE]} [cut: the line has {length:,} characters]"


def _places(attempt: AttemptPaths) -> tuple[dict[int, str], int]:
    """Return the host of each node, and the ranks per node; 0 if that is not recorded."""
    try:
        command = read_command(attempt)
    except (OSError, ValueError, TypeError):
        return {}, 0
    return {node.node: node.host for node in command.nodes}, command.ranks_per_node


def _host_suffix(hosts: dict[int, str], node: int) -> str:
    return f" on {hosts[node]}" if hosts.get(node) else ""


def _numbers(names: set[str], kind: str) -> list[int]:
    """Return the numbers K of the files `KIND-K.log`, ascending."""
    middles = (
        name.removeprefix(f"{kind}-").removesuffix(".log")
        for name in names
        if name.startswith(f"{kind}-") and name.endswith(".log")
    )
    return sorted(int(middle) for middle in middles if middle.isdecimal())


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
