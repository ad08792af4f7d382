"""Sink for trackers that cannot go back a step: each step is sent once.

A run that goes back repeats steps. If they come out as before (a crash and a resume on the same
layout: bit for bit), the tracker has them already, and logging continues. If one differs (a rewind,
another layout, other settings), the run has branched: the tracker's run is started again with the
whole curve, and the previous one is given up. So the tracker shows the last attempt's values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, Protocol

from trainctl.options.logger import FollowedRun, Point

_COMPARED = ("train/", "evaluation/")
"""Prefixes of metrics of the training itself; timings differ each time."""
_AT_ONCE = 500


class Client(Protocol):
    """A tracker with one open run.

    A branch is named by the number of the point that began it, so every process that reaches it
    uses the same number; the first is 0.
    """

    def begin(self, branch: int) -> int | None:
        """Create the tracker's run of a branch; with branch 0, discard all its earlier runs of this
        run.

        It is called again if a process was killed before a commit.

        Returns:
            As in `open`.
        """

    def open(self, branch: int) -> int | None:
        """Continue the tracker's run of a branch.

        Returns:
            The last step that the tracker has, if it takes no earlier step; None if it takes every
            point at any time, and stores it once.
        """

    def send(self, points: Sequence[Point]) -> None:
        """Send points to the open run."""

    def give_up(self, branch: int) -> None:
        """Mark the tracker's run of another branch as superseded."""

    def flush(self) -> None:
        """Wait until everything sent has arrived."""

    def end(self, state: str) -> None:
        """End the open run, which is complete, in this state."""

    def close(self) -> None:
        """Close connections."""


class Tracker:
    """Sink for a tracker that cannot go back a step.

    Args:
        state: State of the last commit; None for the first process.
    """

    def __init__(self, run: FollowedRun, state: Mapping[str, Any] | None, client: Client) -> None:
        known = state or {}
        self._run, self._client = run, client
        self._branch: int = known.get("branch", 0)
        self._number: int = known.get("points", 0)
        # While steps are repeated: the tracker has the run's state after `_stood` points, and steps
        # from `_from` on are compared with it.
        self._stood: int | None = known.get("stood")
        self._from: int = known.get("from", 0)
        self._sent: dict[tuple[str, int], object] = {}
        self._last = 0
        self._compare()
        if state is None:
            client.begin(0)
        elif (
            last := client.open(self._branch)
        ) is not None:  # points were lost when a process was killed
            lost = run.curve(self._stood or self._number)
            self._send(point for point in lost if point.step > last)

    def write(self, points: Sequence[Point]) -> None:
        waiting: list[Point] = []
        for point in points:
            self._number = point.number
            if self._sent and point.step > self._last:
                self._sent, self._stood = {}, None
            if not self._sent:
                waiting.append(point)
            elif self._sent.get((point.kind, point.step)) != _comparable_values(point):
                self._client.send(waiting)
                waiting = []
                self._begin(point.number)
        self._client.send(waiting)

    def go_back(self, step: int) -> None:
        if self._stood is None:
            self._stood, self._from = self._number, step
        self._from = min(self._from, step)
        self._compare()

    def commit(self) -> Mapping[str, Any]:
        self._client.flush()
        going_back = {} if self._stood is None else {"stood": self._stood, "from": self._from}
        return {"branch": self._branch, "points": self._number, **going_back}

    def end(self, state: str) -> None:
        self._client.end(state)

    def close(self) -> None:
        self._client.close()

    def _begin(self, number: int) -> None:
        """Begin a branch at a point, and send all points up to it that the run stands by."""
        before, self._branch = self._branch, number
        self._sent, self._stood = {}, None
        self._client.begin(number)
        self._send(self._run.curve(number))
        self._client.give_up(before)

    def _send(self, points: Iterable[Point]) -> None:
        each = iter(points)
        while some := list(islice(each, _AT_ONCE)):
            self._client.send(some)

    def _compare(self) -> None:
        """Start, or continue, to compare repeated steps with the steps that the tracker has."""
        curve = () if self._stood is None else self._run.curve(self._stood)
        self._sent = {
            (p.kind, p.step): _comparable_values(p) for p in curve if p.step >= self._from
        }
        self._last = max((step for _, step in self._sent), default=0)


def _comparable_values(point: Point) -> object:
    """Return the values to compare, as text, in which NaN equals itself."""
    return sorted(
        (name, repr(value)) for name, value in point.values.items() if name.startswith(_COMPARED)
    )
