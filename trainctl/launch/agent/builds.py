"""Records of DeepSpeed compiling operators: it takes minutes, in which the ranks seem to hang."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path

from trainctl.hardware.builds import build_folders, is_stale_lock, locks_held_by
from trainctl.runs.layout import AttemptPaths
from trainctl.runs.processes import RunTag, processes_of, terminate_processes
from trainctl.runs.status import Phase, read_beat

_LOOK_SECONDS = 1.0
_CHECK_SECONDS = 5.0
"""Shortest build that is reported for an operator that exists: torch also locks a compiled operator
for a moment, to find out whether it is up to date.
"""


class BuildWatch:
    """Watches for native operators being compiled on this machine, until training begins.

    Torch's cpp_extension holds a file `lock` in an operator's folder while it compiles there. A
    rank that waits for another rank's or run's build sees the same lock.

    Args:
        operators: Names of the operators that the ranks use.
        on_build: Called with an operator and None when its build begins, and with the operator and
            the build's seconds when it ends.
    """

    def __init__(
        self,
        attempt: AttemptPaths,
        operators: Collection[str],
        on_build: Callable[[str, float | None], None],
    ) -> None:
        self._attempt = attempt
        self._unbuilt = set(operators)
        self._on_build = on_build
        self._checked_at = 0.0
        self._locked: dict[str, float] = {}
        self._reported: set[str] = set()

    def look(self) -> None:
        """HostReport builds that began or ended. Looks at most once a second."""
        now = time.monotonic()
        if not self._unbuilt or now - self._checked_at < _LOOK_SECONDS:
            return
        self._checked_at = now
        with suppress(OSError):  # a home on a network file system: the next look may succeed
            self._compare(now)
        beat = read_beat(self._attempt.heartbeat(0))
        if beat is not None and beat.phase is not Phase.start:
            self._unbuilt.clear()

    def _compare(self, now: float) -> None:
        for operator in sorted(self._unbuilt):
            folders = build_folders(operator)
            if any((folder / "lock").exists() for folder in folders):
                since = self._locked.setdefault(operator, now)
                is_new = not any(_is_built(folder, operator) for folder in folders)
                if operator not in self._reported and (is_new or now - since > _CHECK_SECONDS):
                    self._reported.add(operator)
                    self._on_build(operator, None)
            elif operator in self._locked:
                seconds = now - self._locked.pop(operator)
                if operator in self._reported:
                    self._unbuilt.remove(operator)
                    if any(_is_built(folder, operator) for folder in folders):
                        self._on_build(operator, seconds)


def terminate_with_builds(tag: RunTag, *, grace_seconds: float) -> None:
    """End every process that carries the tag, and remove the locks of builds that this interrupts.

    Locks that no living process holds are removed too.
    """
    locks = {(folder / "lock").resolve() for folder in build_folders("*")}
    cut_short = locks & {lock for pid in processes_of(tag) for lock in locks_held_by(pid)}
    terminate_processes(tag, grace_seconds=grace_seconds)
    for lock in locks:
        # A stale lock is of a build that was killed earlier: no living process builds there.
        if lock in cut_short or is_stale_lock(lock):
            with suppress(OSError):
                lock.unlink(missing_ok=True)


def _is_built(folder: Path, operator: str) -> bool:
    return (folder / f"{operator}.so").exists()
