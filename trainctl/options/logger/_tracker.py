"""What trackers share that cannot take a step back: each step once, with the last attempt's values.

A run that goes back makes steps again. Where they come out as before (a crash and a resume: bit for
bit, on the same layout) the tracker has them already, and goes on. Where one differs (a rewind,
another layout, other settings) the run has branched: the tracker's run is begun anew with the
run's whole curve, and the one before it is given up.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Protocol

from trainctl.options.logger import Followed, Point

_COMPARED = ("train/", "evaluation/")
"""Metrics of what was learnt; how long it took differs each time."""
_AT_ONCE = 500


class Client(Protocol):
    """A tracker, with one run of it open. Branches are the numbers of the points that began them,
    the same for each process that comes to them; the first is 0."""

    def begin(self, branch: int) -> int | None:
        """Make the tracker's run of a branch; with branch 0 nothing counts that it may have of
        this run. Called again where a process was killed before it was committed.

        Returns:
            As `open`.
        """

    def open(self, branch: int) -> int | None:
        """Go on with the tracker's run of a branch.

        Returns:
            The last step that it has, and takes nothing before; None if it takes every point
            whenever it comes, and once.
        """

    def send(self, points: Sequence[Point]) -> None:
        """Take points of the open run."""

    def give_up(self, branch: int) -> None:
        """That of another branch counts no more."""

    def flush(self) -> None:
        """Have what was sent arrive."""

    def end(self, state: str) -> None:
        """The open run has all there is, and stands so."""

    def close(self) -> None:
        """Let go of connections."""


class Tracker:
    """A sink for such a tracker.

    Args:
        run: The run.
        state: Of the last commit.
        client: The tracker.
    """

    def __init__(self, run: Followed, state: Mapping[str, Any] | None, client: Client) -> None:
        known = state or {}
        self._run, self._client = run, client
        self._branch: int = known.get("branch", 0)
        self._number: int = known.get("points", 0)
        # While steps come again: what the tracker has is the run as it stood after so many points,
        # and is compared from this step on.
        self._stood: int | None = known.get("stood")
        self._from: int = known.get("from", 0)
        self._sent: dict[tuple[str, int], object] = {}
        self._last = 0
        self._compare()
        if state is None:
            client.begin(0)
        elif (
            last := client.open(self._branch)
        ) is not None:  # lost on its way when a process was killed
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
            elif self._sent.get((point.kind, point.step)) != _compared(point):
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
        """A branch with a point, and all before it that the run stands by."""
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
        """Begin, or go on, to compare what comes with what the tracker has."""
        curve = () if self._stood is None else self._run.curve(self._stood)
        self._sent = {(p.kind, p.step): _compared(p) for p in curve if p.step >= self._from}
        self._last = max((step for _, step in self._sent), default=0)


def _compared(point: Point) -> object:
    """Return the values that are compared; as text, in which NaN equals itself."""
    return sorted(
        (name, repr(value)) for name, value in point.values.items() if name.startswith(_COMPARED)
    )


def flat(about: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """What is known of a run as `config.optimizer.lr` and its value, lists as they are."""
    for name, value in about.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
